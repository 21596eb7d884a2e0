package consumer

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
)

// lateStream is a stream in memory that seems damaged for a while, and of which one answer comes late: it
// says what was so at the question.
type lateStream struct {
	*memoryStream
	begun time.Time
	wrong time.Duration // so long it seems damaged
	seems func(st *stream.State) error
	// this one of the questions for its state is answered when more time has passed than a recheck
	// waits
	late      int
	questions int
}

func (s *lateStream) damaged() bool { return time.Since(s.begun) < s.wrong }

func (s *lateStream) State(ctx context.Context) (stream.State, error) {
	st, err := s.memoryStream.State(ctx)
	if s.damaged() {
		err = s.seems(&st)
	}
	if s.questions++; s.questions == s.late {
		time.Sleep(confirm + time.Second)
	}
	return st, err
}

func (s *lateStream) Get(ctx context.Context, seq uint64) (*stream.Message, error) {
	if s.damaged() {
		return nil, nil
	}
	return s.memoryStream.Get(ctx, seq)
}

// A loss counts when a recheck agrees that was asked for so much later: an answer that is late makes
// it no later. Neither the reading that saw it first nor the one after it ends Run before its time; when the
// loss lasts, one does.
func TestALateAnswerConfirmsNoLoss(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kind  error
		seems func(st *stream.State) error
	}{
		"gap": {ErrGap, func(st *stream.State) error {
			st.First = st.Last - uint64(time.Now().UnixMilli()%7) // retention goes on
			return nil
		}},
		"another stream": {ErrStream, func(st *stream.State) error {
			st.Created, st.First, st.Last = time.Now().Add(time.Hour), 1, 0
			return nil
		}},
		"no stream": {jetstream.ErrStreamNotFound, func(*stream.State) error {
			return jetstream.ErrStreamNotFound
		}},
	} {
		for late, wrong := range []time.Duration{confirm - time.Millisecond, confirm + 1500*time.Millisecond,
			time.Second} {
			t.Run(name+"/late "+[]string{"none", "first", "second"}[late], func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					s, src, offsets := &publisher{}, newMemoryStream(), Memory()
					all := s.events(20, 3)
					src.publish(all...)
					cfg := Config{Name: "orders", Stream: "OUTBOX", hooks: stream.Hooks{Source: src},
						Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
					handled := 0
					run := func() error {
						consumer, err := New(nil, offsets, cfg)
						if err != nil {
							t.Fatal(err)
						}
						ctx, cancel := context.WithCancel(t.Context())
						defer cancel()
						var done atomic.Int64
						defer func() { handled += int(done.Load()) }()
						return consumer.Run(ctx, func(context.Context, pgx.Tx, *Event) error {
							if done.Add(1) == 20 {
								cancel()
							}
							return nil
						})
					}
					if err := run(); err != nil || handled != 20 {
						t.Fatalf("Run: %v, %d events", err, handled)
					}
					src.publish(s.events(20, 3)...)
					damaged := &lateStream{memoryStream: src, begun: time.Now(), wrong: wrong, seems: c.seems,
						late: late}
					cfg.hooks.Source = damaged
					if err := run(); err != nil || handled != 40 {
						t.Fatalf("a loss that does not last: Run: %v, %d events", err, handled)
					}
					src.publish(s.events(20, 3)...)
					*damaged = lateStream{memoryStream: src, begun: time.Now(), wrong: time.Hour,
						seems: c.seems, late: late}
					if err := run(); !errors.Is(err, c.kind) {
						t.Errorf("a loss that lasts: Run: %v, want %v", err, c.kind)
					}
					if d := time.Since(damaged.begun); d < confirm || d > 12*confirm {
						t.Errorf("it ended after %v", d)
					}
				})
			})
		}
	}
}
