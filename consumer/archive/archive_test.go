package archive_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/archive"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	segments "github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

func TestMain(m *testing.M) {
	natstest.RunChild()
	goleak.VerifyTestMain(m)
}

// world is a stream on a server, and its archive in a folder.
type world struct {
	t      *testing.T
	js     jetstream.JetStream
	api    *jsapi.Client
	s      jetstream.Stream
	folder string
	n      int
}

func newWorld(t *testing.T) *world {
	t.Helper()
	nc, js := natstest.Connect(t, natstest.Server(t).URL())
	w := &world{t: t, js: js, folder: t.TempDir(), api: jsapi.New(nc, "")}
	var err error
	w.s, err = w.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX",
		Subjects: []string{"outbox.>"}})
	must.Succeed(t, err)
	return w
}

// publish publishes n events of documents d0 to d3 in turn.
func (w *world) publish(n int) {
	w.t.Helper()
	for range n {
		w.n++
		at := outbox.LSN(w.n * 16)
		h := outbox.Header{Pos: outbox.Position{LSN: at}, Of: 1, Due: at, Thru: at, Timeline: 1,
			ID: fmt.Sprint("id-", w.n)}
		_, err := w.js.PublishMsg(w.t.Context(), &nats.Msg{Subject: fmt.Sprintf("outbox.d%d", w.n%4),
			Data: []byte(h.ID), Header: nats.Header{outbox.HeaderName: {h.String()}}})
		must.Succeed(w.t, err)
	}
}

// archive archives up to a message. The gaps were lost before they could be archived.
func (w *world) archive(to uint64, gaps ...outbox.SequenceRange) {
	w.t.Helper()
	store, err := segments.Open(w.t.Context(), "file://"+w.folder)
	must.Succeed(w.t, err)
	defer store.Close() //nolint:errcheck // a test
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	a, err := segments.Load(w.t.Context(), store, segments.FolderOf("OUTBOX", info.Created), nil)
	must.Succeed(w.t, err)
	s, err := a.NewSegment()
	must.Succeed(w.t, err)
	s.Gap(gaps, nil)
	for seq := a.Next(); seq <= to; seq++ {
		m, err := w.api.Message(w.t.Context(), "OUTBOX", jsapi.MessageRequest{Seq: seq})
		must.Succeed(w.t, err)
		if m == nil {
			continue
		}
		h, err := nats.DecodeHeadersMsg(m.Header)
		must.Succeed(w.t, err)
		must.Succeed(w.t, s.Add(&segments.Message{Seq: seq, Time: m.Time, Subject: m.Subject, Header: h,
			Data: m.Data}))
	}
	_, err = a.Append(w.t.Context(), s, 0)
	must.Succeed(w.t, err)
}

func (w *world) purge(to uint64) {
	w.t.Helper()
	must.Succeed(w.t, w.s.Purge(w.t.Context(), jetstream.WithPurgeSequence(to+1)))
}

// consumer is one that keeps its offsets in memory.
func (w *world) consumer(filters ...string) (*consumer.Consumer, error) {
	w.t.Helper()
	past, err := archive.Open(w.t.Context(), "file://"+w.folder)
	must.Succeed(w.t, err)
	w.t.Cleanup(func() { must.Succeed(w.t, past.Close()) })
	return consumer.New(w.js, consumer.Memory(), consumer.Config{Name: "texts", Filters: filters,
		Archive: past, Partitions: 2, MaxInFlight: 2, Batch: 1})
}

// TestAConsumerReadsArchiveAndStream: with and without filters, while archive and retention go on and
// overtake it, it has each event once and in order, with the bytes, headers and sequences of the stream.
func TestAConsumerReadsArchiveAndStream(t *testing.T) {
	t.Parallel()
	for _, filters := range [][]string{nil, {"outbox.d1"}, {"outbox.d0", "outbox.d3"}} {
		t.Run(fmt.Sprint(filters), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.publish(300)
			w.archive(40)
			w.archive(90)
			w.purge(60)
			c, err := w.consumer(filters...)
			must.Succeed(t, err)
			var mu sync.Mutex
			var had []uint64
			overtake := map[uint64]func(){
				36:  func() { w.archive(140); w.purge(120) },
				37:  func() { w.archive(140); w.purge(120) },
				148: func() { w.archive(250); w.purge(250) },
				149: func() { w.archive(250); w.purge(250) },
			}
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				ended <- c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
					mu.Lock()
					defer mu.Unlock()
					had = append(had, e.Sequence)
					if want := fmt.Sprint("id-", e.Sequence); string(e.Data) != want || e.ID != want {
						t.Errorf("message %d: %s of event %s", e.Sequence, e.Data, e.ID)
					}
					if f := overtake[e.Sequence]; f != nil {
						if e.Sequence < 100 {
							delete(overtake, 36)
							delete(overtake, 37)
						} else {
							delete(overtake, 148)
							delete(overtake, 149)
						}
						f()
					}
					return nil
				})
			}()
			var want []uint64
			for seq := range uint64(300) {
				if seq++; filters == nil || slices.Contains(filters, fmt.Sprintf("outbox.d%d", seq%4)) {
					want = append(want, seq)
				}
			}
			await.Until(t, "all events", func() error {
				mu.Lock()
				defer mu.Unlock()
				if len(had) < len(want) {
					return fmt.Errorf("%d of %d", len(had), len(want))
				}
				return nil
			})
			stop()
			must.Succeed(t, <-ended)
			if slices.Sort(had); !slices.Equal(had, want) {
				t.Errorf("had %v, want %v", had, want)
			}
			if len(overtake) > 0 {
				t.Errorf("retention did not overtake it: %v", overtake)
			}
		})
	}
}

// erase erases messages as `outflow erase` does: the sequences of those that the stream has are noted, and
// then they go.
func (w *world) erase(seqs ...uint64) {
	w.t.Helper()
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	var all, kept outbox.Sequences
	for _, seq := range seqs {
		r := outbox.SequenceRange{From: seq, To: seq}
		if all = all.With(r); seq >= info.State.FirstSeq {
			kept = kept.With(r)
		}
	}
	cfg := info.Config
	cfg.Metadata = map[string]string{outbox.MetadataErased: kept.String()}
	_, err = w.js.UpdateStream(w.t.Context(), cfg)
	must.Succeed(w.t, err)
	for _, r := range kept {
		for seq := r.From; seq <= r.To; seq++ {
			must.Succeed(w.t, w.s.SecureDeleteMsg(w.t.Context(), seq))
		}
	}
	store, err := segments.Open(w.t.Context(), "file://"+w.folder)
	must.Succeed(w.t, err)
	defer store.Close() //nolint:errcheck // a test
	a, err := segments.Load(w.t.Context(), store, segments.FolderOf("OUTBOX", info.Created), nil)
	must.Succeed(w.t, err)
	_, err = a.Erase(w.t.Context(), segments.Erasing{Request: "request",
		Is: func(m *segments.Message) (bool, error) { return all.Has(m.Seq), nil }})
	must.Succeed(w.t, err)
}

// TestWhatWasErasedIsPassedOver: messages that were erased in the archive alone, in both, and in the stream
// alone, at the ends of segments and of what retention has left, which is where the archive ends or before
// that. All others are read, in order.
func TestWhatWasErasedIsPassedOver(t *testing.T) {
	t.Parallel()
	for _, purged := range []uint64{30, 40} {
		t.Run(fmt.Sprint("purged-", purged), func(t *testing.T) {
			t.Parallel()
			passesOverErased(t, purged)
		})
	}
}

func passesOverErased(t *testing.T, purged uint64) {
	w := newWorld(t)
	w.publish(60)
	w.archive(20)
	w.archive(40)
	w.purge(purged)
	erased := []uint64{1, 2, 20, 21, 30, 31, 40, 41, 50}
	w.erase(erased...)
	c, err := w.consumer()
	must.Succeed(t, err)
	var mu sync.Mutex
	had := map[uint64]bool{}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() {
		ended <- c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
			mu.Lock()
			defer mu.Unlock()
			if slices.Contains(erased, e.Sequence) || string(e.Data) != fmt.Sprint("id-", e.Sequence) {
				t.Errorf("message %d: %s", e.Sequence, e.Data)
			}
			had[e.Sequence] = true
			return nil
		})
	}()
	await.Until(t, "all others", func() error {
		select {
		case err := <-ended:
			t.Fatalf("Run: %v", err)
		default:
		}
		mu.Lock()
		defer mu.Unlock()
		if len(had) < w.n-len(erased) {
			return fmt.Errorf("%d of %d", len(had), w.n-len(erased))
		}
		return nil
	})
	stop()
	must.Succeed(t, <-ended)
}

// TestAGapBeforeWhatWasErasedIsTold: nothing is left to be read of the archive behind what was lost before it
// was archived.
func TestAGapBeforeWhatWasErasedIsTold(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(60)
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 36))
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 37))
	w.archive(40, outbox.SequenceRange{From: 36, To: 37})
	w.purge(40)
	w.erase(35, 38, 39, 40)
	c, err := w.consumer()
	must.Succeed(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	err = c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
		if e.Sequence == 60 {
			stop()
		}
		return nil
	})
	if !errors.Is(err, consumer.ErrGap) || !strings.Contains(err.Error(), "36 to 37 are neither") {
		t.Errorf("Run: %v", err)
	}
}

// TestWhatIsWrongWithAnArchiveEndsRun: an object with a flipped bit, one that is lost, and an archive that
// has nothing of this stream. A folder that does not exist is refused, and not made.
func TestWhatIsWrongWithAnArchiveEndsRun(t *testing.T) {
	t.Parallel()
	run := func(w *world, filters ...string) error {
		c, err := w.consumer(filters...)
		must.Succeed(t, err)
		return c.Run(t.Context(), func(context.Context, pgx.Tx, *consumer.Event) error { return nil })
	}
	object := func(w *world) string {
		all, err := filepath.Glob(filepath.Join(w.folder, "v1", "*", "*.jsonl.zst"))
		must.Succeed(t, err)
		return all[0]
	}
	w := newWorld(t)
	w.publish(60)
	w.archive(40)
	w.purge(30)
	text, err := os.ReadFile(object(w))
	must.Succeed(t, err)
	text[len(text)/2] ^= 1
	must.Succeed(t, os.WriteFile(object(w), text, 0o600))
	if err := run(w); !errors.Is(err, consumer.ErrArchive) ||
		!strings.Contains(err.Error(), "bit was flipped") {
		t.Errorf("a flipped bit: %v", err)
	}
	must.Succeed(t, os.Remove(object(w)))
	if err := run(w); !errors.Is(err, consumer.ErrArchive) || !strings.Contains(err.Error(), "it is lost") {
		t.Errorf("a lost object: %v", err)
	}
	w.folder = t.TempDir()
	w.archive(35)
	w.purge(50)
	if err := run(w, "outbox.d1"); !errors.Is(err, consumer.ErrGap) ||
		!strings.Contains(err.Error(), "36 to 50 are neither") {
		t.Errorf("an archive that ends before the stream, with a filter: %v", err)
	}
	w.folder = t.TempDir()
	if err := run(w); !errors.Is(err, consumer.ErrGap) ||
		!strings.Contains(err.Error(), "1 to 50 are neither") {
		t.Errorf("an empty archive: %v", err)
	}
	none := filepath.Join(w.folder, "none")
	if _, err := archive.Open(t.Context(), "file://"+none); !errors.Is(err, consumer.ErrArchive) {
		t.Errorf("no folder: %v", err)
	}
	if _, err := os.Stat(none); !os.IsNotExist(err) {
		t.Errorf("the folder was made: %v", err)
	}
}
