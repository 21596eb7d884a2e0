package archive

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// world is a stream with a record that the test writes.
type world struct {
	t      *testing.T
	js     jetstream.JetStream
	s      jetstream.Stream
	store  *checkpoint.Store
	cfg    config.Config
	record uint64 // its revision
}

func newWorld(t *testing.T) *world {
	t.Helper()
	url := natstest.Server(t).URL()
	nc, err := nats.Connect(url, nats.Timeout(time.Minute))
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	w := &world{t: t}
	w.js, err = jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	must.Succeed(t, err)
	w.makeStream(1)
	w.store = checkpoint.NewStore(jsapi.New(nc, ""),
		checkpoint.StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	must.Succeed(t, w.store.EnsureBucket(t.Context(), 1, jetstream.FileStorage))
	cfg, err := config.Load(config.Args{"nats.url": url, "stream": "OUTBOX", "slot": "outflow",
		"archive.url": "file://" + t.TempDir()}, nil)
	must.Succeed(t, err)
	w.cfg = cfg
	return w
}

func (w *world) makeStream(first uint64) {
	w.t.Helper()
	var err error
	w.s, err = w.js.CreateStream(w.t.Context(), jetstream.StreamConfig{
		Name: "OUTBOX", Subjects: []string{"outbox.>"}, FirstSeq: first, AllowDirect: true,
	})
	must.Succeed(w.t, err)
}

func (w *world) publish(n int) {
	w.t.Helper()
	for range n {
		info, err := w.s.Info(w.t.Context())
		must.Succeed(w.t, err)
		seq := max(info.State.LastSeq+1, info.State.FirstSeq)
		_, err = w.js.PublishMsg(w.t.Context(), &nats.Msg{
			Subject: fmt.Sprintf("outbox.doc%d", seq%3), Header: nats.Header{"By": {"anna"}, "a": {"1", "2"}},
			Data: fmt.Appendf(nil, `{"n": %d}`, seq),
		})
		must.Succeed(w.t, err)
	}
}

// confirm says that all up to a sequence is confirmed, and what is behind it is in a newer checkpoint.
func (w *world) confirm(seq uint64) {
	w.t.Helper()
	at := func(seq uint64) checkpoint.StoredCheckpoint {
		return checkpoint.StoredCheckpoint{Checkpoint: relay.Checkpoint{
			Due: outbox.LSN(1000 + seq), Seq: seq, Settings: w.cfg.Reorder.Settings(),
			Timeline: 1}, Since: time.Now()}
	}
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	rec := &checkpoint.Record{
		Version: 2, Slot: "outflow", Database: "d", SystemID: "1", Stream: "OUTBOX", Created: info.Created,
		Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Key: "seq_key", Payload: "payload"},
		Publication: checkpoint.PublicationSeen{PublicationIdentity: relay.PublicationIdentity{
			OID: 16401, Xmin: 730,
			RelOID: 16402, RelXmin: 730}, Seen: 1},
		Checkpoints: []checkpoint.StoredCheckpoint{at(seq), at(seq + 5)},
	}
	w.record, err = w.store.Save(w.t.Context(), rec, w.record)
	must.Succeed(w.t, err)
}

func (w *world) run(o Options) (*Report, error) {
	w.t.Helper()
	return Run(w.t.Context(), w.cfg, slog.New(slog.DiscardHandler), o)
}

func (w *world) mustRun(o Options) *Report {
	w.t.Helper()
	r, err := w.run(o)
	must.Succeed(w.t, err)
	return r
}

func (w *world) archived() (seqs []uint64) {
	w.t.Helper()
	must.Succeed(w.t, each(w.t.Context(), w.cfg, func(_ string, a *archive.Archive) error {
		return a.Read(w.t.Context(), 1, func(m *archive.Message) error {
			seqs = append(seqs, m.Seq)
			return nil
		})
	}))
	return seqs
}

func (w *world) wantFault(err error, code string) {
	w.t.Helper()
	if f := outbox.FaultOf(err); f == nil || f.Code != code {
		w.t.Fatalf("got %v, want code %s", err, code)
	}
}

// TestARunWithoutNATSIsNoGap: the connection is lost between two questions.
func TestARunWithoutNATSIsNoGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	store, err := archive.Open(t.Context(), w.cfg.Archive.URL)
	must.Succeed(t, err)
	a, err := archive.Load(t.Context(), store, archive.FolderOf("OUTBOX", time.Now()), nil)
	must.Succeed(t, err)
	w.js.Conn().Close()
	c := &command{cfg: w.cfg, api: jsapi.New(w.js.Conn(), ""), a: a, upTo: 5, to: 5}
	if err := c.pass(t.Context()); !errors.Is(err, nats.ErrConnectionClosed) {
		t.Errorf("got %v", err)
	}
}

// TestOnlyWhatIsConfirmedIsArchived: what is behind the oldest checkpoint may be lost and come again as
// something else.
func TestOnlyWhatIsConfirmedIsArchived(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(20)
	w.confirm(0)
	if r := w.mustRun(Options{Now: true}); r.Archived != 0 {
		t.Errorf("archived up to %d, and nothing is confirmed", r.Archived)
	}
	w.confirm(12)
	if r := w.mustRun(Options{}); r.Archived != 0 {
		t.Errorf("archived up to %d before it is old enough", r.Archived)
	}
	if r := w.mustRun(Options{Now: true}); r.Archived != 12 || len(w.archived()) != 12 {
		t.Fatalf("archived up to %d", r.Archived)
	}
	// The end is lost and comes again.
	for seq := uint64(20); seq > 12; seq-- {
		must.Succeed(t, w.s.DeleteMsg(t.Context(), seq))
	}
	w.publish(3)
	w.confirm(22)
	if r := w.mustRun(Options{Now: true}); r.Archived != 22 {
		t.Fatalf("archived up to %d", r.Archived)
	}
	v, err := Verify(t.Context(), w.cfg, 0)
	must.Succeed(t, err)
	if v.Messages != 14 || v.Read != 2 {
		t.Errorf("%+v", v)
	}
	must.Succeed(t, each(t.Context(), w.cfg, func(_ string, a *archive.Archive) error {
		got := a.Reach(func(system string, timeline uint32, _ outbox.LSN) bool {
			return system == "1" && timeline == 1
		})
		if got != (archive.Reach{Last: 22, Complete: 1022, Whole: 1022}) {
			t.Errorf("%+v", got)
		}
		return nil
	}))
}

// TestAnArchiveOfNothingDoesNotHold: a prefix that is mistyped, or a folder without a segment.
func TestAnArchiveOfNothingDoesNotHold(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, err := Verify(t.Context(), w.cfg, 0)
	w.wantFault(err, "archive_empty")
	w.publish(1)
	w.confirm(1)
	w.mustRun(Options{Now: true})
	_, err = Verify(t.Context(), w.cfg, 0)
	must.Succeed(t, err)
	w.cfg.Stream = "OUTBOXES"
	_, err = Verify(t.Context(), w.cfg, 1)
	w.wantFault(err, "archive_empty")
}

// TestMessagesThatTheLimitsTookAreAGap: it stops with the range until that is accepted, and the manifest says
// so. Messages that were deleted from within are only missing.
func TestMessagesThatTheLimitsTookAreAGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(30)
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 5))
	w.confirm(10)
	if r := w.mustRun(Options{Now: true}); r.Segments[0].Missing != 1 || len(r.Segments[0].Gaps) != 0 {
		t.Fatalf("%+v", r)
	}
	must.Succeed(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(16)))
	w.confirm(25)
	_, err := w.run(Options{Now: true})
	w.wantFault(err, archive.CodeGap)
	_, err = w.run(Options{Now: true, AcceptGap: archive.Range{From: 12, To: 15}})
	w.wantFault(err, archive.CodeGap)
	r := w.mustRun(Options{Now: true, AcceptGap: archive.Range{From: 11, To: 15}})
	if s := r.Segments[0]; s.First != 11 || s.Last != 25 || len(s.Gaps) != 1 || s.Missing != 5 {
		t.Fatalf("%+v", r)
	}
	must.Succeed(t, w.s.Purge(t.Context()))
	w.confirm(28)
	_, err = w.run(Options{Now: true})
	w.wantFault(err, archive.CodeGap)
}

// TestWhatAStoppedRunHasReadMakesASegment if that is large enough. Otherwise nothing is written, and the next
// run reads it again.
func TestWhatAStoppedRunHasReadMakesASegment(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cfg.Archive.SegmentSize = 8 << 20
	random := rand.NewChaCha8([32]byte{})
	half := make([]byte, 32<<10)
	for range 30 {
		_, _ = random.Read(half)
		_, err := w.js.Publish(t.Context(), "outbox.d", hex.AppendEncode(nil, half))
		must.Succeed(t, err)
	}
	w.confirm(30)
	for _, c := range []struct{ stopped, archived uint64 }{{5, 0}, {20, 20}, {3, 20}} {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		read := uint64(0)
		r, err := Run(ctx, w.cfg, slog.New(slog.DiscardHandler), Options{Hit: func(point string) {
			if point == "archive.message" {
				if read++; read == c.stopped {
					stop()
				}
			}
		}})
		if !errors.Is(err, context.Canceled) || r.Archived != c.archived || read != c.stopped {
			t.Fatalf("stopped at %d: archived up to %d after %d messages, %v", c.stopped, r.Archived, read,
				err)
		}
	}
	if r := w.mustRun(Options{Now: true}); r.Archived != 30 || len(r.Segments) != 1 ||
		r.Segments[0].First != 21 {
		t.Errorf("then: %+v", r)
	}
	if got := w.archived(); len(got) != 30 {
		t.Errorf("archived are %v", got)
	}
}

// TestTwoArchiversAtOnceMakeOneArchive: the second one runs while the first one is about to create its
// manifest, for more messages.
func TestTwoArchiversAtOnceMakeOneArchive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(30)
	w.confirm(10)
	slept := false
	r := w.mustRun(Options{Now: true, Hit: func(p string) {
		if p != "archive.begin" || slept {
			return
		}
		slept = true
		w.confirm(20)
		w.mustRun(Options{Now: true})
	}})
	if !slept || len(r.Segments) != 0 || len(w.archived()) != 20 {
		t.Errorf("%+v, %v", r, w.archived())
	}
}

func TestAnotherStreamThanTheArchivesIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(30)
	_, err := w.run(Options{Now: true})
	w.wantFault(err, "archive_record")
	w.confirm(10)
	w.mustRun(Options{Now: true})
	// As of a server that was restored from a backup: the record is older than the archive.
	w.confirm(5)
	_, err = w.run(Options{Now: true})
	w.wantFault(err, archive.CodeDiffers)
	must.Succeed(t, w.js.DeleteStream(context.WithoutCancel(t.Context()), "OUTBOX"))
	w.makeStream(1)
	_, err = w.run(Options{Now: true})
	w.wantFault(err, "archive_record")
}

// TestAKilledRunHoldsTheStreamForHalfAMinute: its consumer is nobody's, and retention waits for each.
func TestAKilledRunHoldsTheStreamForHalfAMinute(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(3)
	w.confirm(3)
	ctx, stop := context.WithCancel(t.Context())
	_, err := Run(ctx, w.cfg, slog.New(slog.DiscardHandler), Options{Now: true, Hit: func(point string) {
		if point == "archive.written" {
			stop()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	seen := 0
	w.mustRun(Options{Hit: func(point string) { // it ends the segment that is there while it reads
		if point != "archive.begin" {
			return
		}
		consumers := w.s.ListConsumers(t.Context())
		for c := range consumers.Info() {
			if seen++; c.Config.InactiveThreshold != inactive {
				t.Errorf("it stays for %v", c.Config.InactiveThreshold)
			}
		}
		must.Succeed(t, consumers.Err())
	}})
	if seen != 1 {
		t.Errorf("%d consumers", seen)
	}
}
