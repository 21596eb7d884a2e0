package torture

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/outbox"
)

func quoted(name string) string { return pgx.Identifier{name}.Sanitize() }

// truth is what was committed, read from a slot of its own with test_decoding.
type truth struct {
	w      *harness
	slot   string
	reader *oracle.Reader
}

func newTruth(ctx context.Context, w *harness) (*truth, error) {
	t := &truth{w: w, slot: w.name + "_truth"}
	t.reader = oracle.NewReader(oracle.Source{
		Slot: t.slot, Events: oracle.Origin(w.o.Source), Tables: []string{"public." + w.table},
		Columns: w.shape.columns,
		Subject: func(r oracle.Row) string { return w.name + "." + oracle.Token(r.Text("doc_id")) },
	})
	return t, t.with(ctx, func(conn *pgx.Conn) error { return oracle.CreateSlot(ctx, conn, t.slot) })
}

// with runs something on a connection of its own.
func (t *truth) with(ctx context.Context, do func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, t.w.pgURL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // it has only read
	return do(conn)
}

// judge compares everything. Where outflow has failed already there is nothing to compare: that is the
// verdict.
func (a *attack) judge(ctx context.Context) (*Report, error) {
	r := a.report()
	if r.Failure != "" {
		return r, nil
	}
	w := a.w
	if w.o.Sabotage != "" {
		if err := sabotage(ctx, w.victims[0], w.o.Sabotage); err != nil {
			return nil, fmt.Errorf("sabotage: %w", err)
		}
	}
	w.screen.event("stopped; the judge reads the WAL, the table and %d streams", len(w.victims)+1)
	err := w.truth.with(ctx, func(conn *pgx.Conn) error {
		if err := w.truth.readAll(ctx, conn); err != nil {
			return err
		}
		check, err := w.truth.reader.Truth().CheckTable(ctx, conn, "public."+quoted(w.table),
			w.shape.columns)
		r.Table = check.First
		r.Rows = check.Rows
		if err == nil && !check.OK(false) && r.Table == "" {
			r.Table = fmt.Sprintf("%d rows are gone from the table", check.Gone)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("the truth: %w", err)
	}
	t := w.truth.reader.Truth()
	r.Transactions, r.Ticks, r.Changes, r.Messages = t.Commits, t.Ticks, t.Changes, t.Messages
	var timeline func(oracle.LSN) uint32
	await(ctx, catchUpLimit, func() bool {
		timeline, err = oracle.Timelines(ctx, w.pgURL)
		return err == nil || wrong(err)
	})
	if err != nil {
		return nil, fmt.Errorf("timelines: %w", err)
	}
	twin := ""
	for _, v := range append([]*victim{w.twin}, w.victims...) {
		s, err := v.judge(ctx, t, timeline)
		if err != nil {
			return nil, fmt.Errorf("judge %s: %w", v.stream, err)
		}
		switch {
		case v == w.twin:
			twin = s.Digest
		case v.resetted.Load():
			s.Twin = "not compared: other ordering settings on the way"
		case s.Digest == twin:
			s.Twin = "equal"
		default:
			s.Twin = "DIFFERENT"
		}
		r.Streams = append(r.Streams, s)
	}
	r.decide()
	return r, nil
}

// readAll reads to the end. A reading that was cut short, by the end of the attack or by a fault, may hold
// the slot for a moment.
func (t *truth) readAll(ctx context.Context, conn *pgx.Conn) (err error) {
	await(ctx, catchUpLimit, func() bool {
		err = t.reader.Read(ctx, conn)
		inUse, ok := errors.AsType[*pgconn.PgError](err)
		return !ok || inUse.Code != objectInUse
	})
	return err
}

const objectInUse = "55006"

// judge compares a victim's stream with the WAL.
func (v *victim) judge(ctx context.Context, t *oracle.Truth, timeline func(oracle.LSN) uint32) (s Stream,
	err error) {
	s = Stream{Name: v.stream, Slot: v.slot}
	err = answered(ctx, func() error {
		s.Judgement, err = oracle.Judge(ctx, v.nats.js, v.stream, t, oracle.Config{
			Slot: v.slot, Start: v.began, Timeline: timeline, Settings: v.w.shape.settings,
		})
		return err
	})
	if err != nil {
		return s, err
	}
	s.Good = s.OK()
	err = answered(ctx, func() error {
		s.Digest, err = v.digest(ctx)
		return err
	})
	return s, err
}

// answered reads from a server, and again from the beginning where it did not answer in time: a machine that
// stands still for a moment is not a verdict.
func answered(ctx context.Context, read func() error) (err error) {
	await(ctx, catchUpLimit, func() bool {
		err = read()
		return !slices.ContainsFunc([]error{
			nats.ErrTimeout, nats.ErrNoResponders, nats.ErrConnectionReconnecting, nats.ErrDisconnected,
			nats.ErrStaleConnection, nats.ErrNoServers,
			context.DeadlineExceeded, jetstream.ErrNoHeartbeat, jetstream.ErrOrderedConsumerReset,
			jetstream.ErrJetStreamNotEnabled,
		}, func(target error) bool { return errors.Is(err, target) })
	})
	return err
}

// digest is over everything in all messages but their numbers, and what the first one says of a loss: after a
// lost tail the same messages may have other numbers.
func (v *victim) digest(ctx context.Context) (string, error) {
	h := sha256.New()
	err := oracle.Read(ctx, v.nats.js, v.stream, func(m *oracle.Message) error {
		fmt.Fprintf(h, "%q\n", m.Subject)
		for _, name := range slices.Sorted(maps.Keys(m.Header)) {
			if !strings.HasPrefix(name, "Nats-Expected-") && name != outbox.HeaderLost {
				fmt.Fprintf(h, "%q: %q\n", name, m.Header[name])
			}
		}
		fmt.Fprintf(h, "%d\n", len(m.Data))
		h.Write(m.Data)
		return nil
	})
	return fmt.Sprintf("%x", h.Sum(nil)), err
}

// drain reads the truth while the run lasts, so that PostgreSQL need not keep all its WAL.
func (t *truth) drain(ctx context.Context, every time.Duration) {
	for pause(ctx, every) == nil {
		// PostgreSQL may be down: the next time will do
		_ = t.with(ctx, func(conn *pgx.Conn) error { return t.reader.Read(ctx, conn) })
	}
}
