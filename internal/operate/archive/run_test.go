package archive

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
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
	return newWorldOn(t, natstest.Server(t))
}

func newWorldOn(t *testing.T, s *natsserver.Server) *world {
	t.Helper()
	w := &world{t: t}
	w.connect(s.URL(), "file://"+t.TempDir())
	w.makeStream(1)
	must.Succeed(t, w.store.EnsureBucket(t.Context(), 1, jetstream.FileStorage))
	return w
}

func (w *world) connect(url, archive string) {
	w.t.Helper()
	nc, err := nats.Connect(url, nats.Timeout(time.Minute))
	must.Succeed(w.t, err)
	w.t.Cleanup(nc.Close)
	w.js, err = jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	must.Succeed(w.t, err)
	w.store = checkpoint.NewStore(jsapi.New(nc, ""),
		checkpoint.StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	w.cfg, err = config.Load(config.Args{"nats.url": url, "stream": "OUTBOX", "slot": "outflow",
		"archive.url": archive}, nil)
	must.Succeed(w.t, err)
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
	w.publishBehind(0, n)
}

// publishBehind publishes messages, of which the first one says that the broker had lost those from a
// sequence on; 0: none.
func (w *world) publishBehind(lost uint64, n int) {
	w.t.Helper()
	for i := range n {
		info, err := w.s.Info(w.t.Context())
		must.Succeed(w.t, err)
		seq := max(info.State.LastSeq+1, info.State.FirstSeq)
		h := nats.Header{"By": {"anna"}, "a": {"1", "2"}}
		if i == 0 && lost > 0 {
			h.Set(outbox.HeaderLost, fmt.Sprint(lost))
		}
		_, err = w.js.PublishMsg(w.t.Context(), &nats.Msg{
			Subject: fmt.Sprintf("outbox.doc%d", seq%3), Header: h, Data: fmt.Appendf(nil, `{"n": %d}`, seq),
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
	w.publishBehind(13, 3)
	w.confirm(22)
	if r := w.mustRun(Options{Now: true}); r.Archived != 22 {
		t.Fatalf("archived up to %d", r.Archived)
	}
	v, err := Verify(t.Context(), w.cfg, 0)
	must.Succeed(t, err)
	if v.Messages != 14 || v.Read != 2 {
		t.Errorf("%+v", v)
	}
	w.wantReach(archive.Reach{Last: 22, Complete: 1022, Whole: 1022})
}

func (w *world) wantReach(want archive.Reach) {
	w.t.Helper()
	must.Succeed(w.t, each(w.t.Context(), w.cfg, func(_ string, a *archive.Archive) error {
		got := a.Reach(func(system string, timeline uint32, _ outbox.LSN) bool {
			return system == "1" && timeline == 1
		})
		if got != want {
			w.t.Errorf("%+v, want %+v", got, want)
		}
		return nil
	}))
}

// TestWhatIsTakenFromWithinIsLost: as by a limit for each subject, before it was archived, and also where the
// newest confirmed messages are. Nothing stops, and nothing shows any more that all is archived. What the
// broker had lost, and what was erased, is not lost.
func TestWhatIsTakenFromWithinIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	take := func(seqs ...uint64) {
		t.Helper()
		for _, seq := range seqs {
			must.Succeed(t, w.s.DeleteMsg(t.Context(), seq))
		}
	}
	run := func(confirmed, archived uint64, gaps ...archive.Range) {
		t.Helper()
		w.confirm(confirmed)
		r := w.mustRun(Options{Now: true})
		if len(r.Segments) != 1 || r.Archived != archived || !slices.Equal(r.Segments[0].Gaps, gaps) {
			t.Fatalf("%+v", r)
		}
	}
	w.publish(20)
	run(6, 6)
	s := stream.New(jsapi.New(w.js.Conn(), ""), "OUTBOX", slog.New(slog.DiscardHandler))
	must.Succeed(t, s.NoteErased(t.Context(), outbox.Sequences{{From: 8, To: 8}}))
	take(8, 19, 20)
	w.publishBehind(19, 3)
	run(20, 18)
	run(21, 21)
	w.wantReach(archive.Reach{Last: 21, Complete: 1021, Whole: 1021})
	w.publish(10)
	take(22, 25, 32, 33)
	run(33, 33, archive.Range{From: 22, To: 22}, archive.Range{From: 25, To: 25},
		archive.Range{From: 32, To: 33})
	w.wantReach(archive.Reach{Last: 33, Complete: 1033, Whole: 1021})
	w.publish(5)
	take(37, 38) // a run is killed when it has written the segment up to there, and the next one has more
	w.confirm(38)
	ctx, stop := context.WithCancel(t.Context())
	_, err := Run(ctx, w.cfg, slog.New(slog.DiscardHandler), Options{Now: true, Hit: func(point string) {
		if point == "archive.written" {
			stop()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	w.publish(2)
	w.confirm(40)
	r := w.mustRun(Options{Now: true})
	if len(r.Segments) != 2 || r.Segments[0].Last != 38 || r.Segments[1].First != 39 ||
		!slices.Equal(r.Segments[0].Gaps, []archive.Range{{From: 37, To: 38}}) {
		t.Fatalf("%+v", r)
	}
	w.wantReach(archive.Reach{Last: 40, Complete: 1040, Whole: 1021})
	w.comesBack()
}

// TestAHoleIsWhatTheLeaderLacks: the server that is read from may lack a message.
func TestAHoleIsWhatTheLeaderLacks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(5)
	store, err := archive.Open(t.Context(), w.cfg.Archive.URL)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	a, err := archive.Load(t.Context(), store, archive.FolderOf("OUTBOX", time.Now()), nil)
	must.Succeed(t, err)
	s, err := a.NewSegment()
	must.Succeed(t, err)
	must.Succeed(t, s.Add(&archive.Message{Seq: 1}))
	api := jsapi.New(w.js.Conn(), "")
	c := &command{cfg: w.cfg, api: api, stream: stream.New(api, "OUTBOX", slog.New(slog.DiscardHandler)),
		upTo: 5, to: 5}
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 2))
	err = c.hole(t.Context(), s, 4, nil)
	if err == nil || !strings.Contains(err.Error(), "lacks message 3") ||
		outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("got %v", err)
	}
	must.Succeed(t, c.hole(t.Context(), s, 2, nil))
}

// comesBack restores what was archived, and compares it with the stream.
func (w *world) comesBack() {
	w.t.Helper()
	_, err := Verify(w.t.Context(), w.cfg, 0)
	must.Succeed(w.t, err)
	_, err = w.restore(RestoreOptions{To: "PAST"})
	must.Succeed(w.t, err)
	if got, want := w.stored("PAST"), w.stored("OUTBOX"); !reflect.DeepEqual(got, want) {
		w.t.Errorf("%v\n%v", got, want)
	}
}

// TestTheLossOfAllThatIsNotArchivedCanBeAccepted: there is no message behind it, so a segment has none.
// Killed at any point, the next run makes the same one, also when there is a message by then.
func TestTheLossOfAllThatIsNotArchivedCanBeAccepted(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"", "archive.begin", "archive.written", "archive.verified"} {
		for _, more := range []bool{false, true} {
			w := newWorld(t)
			known := &archive.Known{}
			w.publish(10)
			w.confirm(6)
			w.mustRun(Options{Now: true, Known: known})
			must.Succeed(t, w.s.Purge(t.Context()))
			w.confirm(9) // 10 is not confirmed
			_, err := w.run(Options{Now: true})
			w.wantFault(err, archive.CodeGap)
			accept := Options{Now: true, AcceptGap: archive.Range{From: 7, To: 9}}
			if point != "" {
				ctx, stop := context.WithCancel(t.Context())
				killed := accept
				killed.Hit = func(p string) {
					if p == point {
						stop()
					}
				}
				_, err = Run(ctx, w.cfg, slog.New(slog.DiscardHandler), killed)
				if !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
			}
			if more {
				w.publish(2)
			}
			r := w.mustRun(accept)
			if len(r.Segments) != 1 || r.Segments[0].Messages != 0 || r.Archived != 9 ||
				!slices.Equal(r.Segments[0].Gaps, []archive.Range{{From: 7, To: 9}}) {
				t.Fatalf("%+v", r)
			}
			w.wantReach(archive.Reach{Last: 9, Complete: 1009, Whole: 1006})
			if r := w.mustRun(Options{Now: true, Known: known}); len(r.Segments) != 0 || r.Archived != 9 {
				t.Errorf("%+v", r)
			}
			w.publish(3)
			w.confirm(12)
			_, err = w.run(Options{Now: true, Known: known})
			w.wantFault(err, archive.CodeGap) // 10
			w.mustRun(Options{Now: true, Known: known, AcceptGap: archive.Range{From: 10, To: 10}})
			if got := w.archived(); !slices.Equal(got, []uint64{1, 2, 3, 4, 5, 6, 11, 12}) {
				t.Errorf("archived are %v", got)
			}
			_, err = Verify(t.Context(), w.cfg, 0)
			must.Succeed(t, err)
			restored, err := w.restore(RestoreOptions{To: "PAST"})
			must.Succeed(t, err)
			if len(w.stored("PAST")) != 8 {
				t.Errorf("%+v", restored)
			}
		}
	}
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
// so. For messages that were deleted from within it does not stop.
func TestMessagesThatTheLimitsTookAreAGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(30)
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 5))
	w.confirm(10)
	if r := w.mustRun(Options{Now: true}); r.Segments[0].Missing != 1 || len(r.Segments[0].Gaps) != 1 {
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

// TestEachMessageIsReadOnce by a process that runs on, although its segment is not complete yet: unless
// something has happened to what it has read.
func TestEachMessageIsReadOnce(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		then  func(w *world)
		reads int // in the last run
		upTo  uint64
		lacks uint64
	}{
		"nothing happens": {reads: 3, upTo: 18, then: func(*world) {}},
		"a limit takes one": {reads: 3, upTo: 18, then: func(w *world) {
			must.Succeed(t, w.s.DeleteMsg(t.Context(), 5))
		}},
		"one is erased": {reads: 3 + 17, upTo: 18, lacks: 5, then: func(w *world) {
			s := stream.New(jsapi.New(w.js.Conn(), ""), "OUTBOX", slog.New(slog.DiscardHandler))
			must.Succeed(t, s.NoteErased(t.Context(), outbox.Sequences{{From: 5, To: 5}}))
			must.Succeed(t, w.s.DeleteMsg(t.Context(), 5))
		}},
		"another process archives": {reads: 3, upTo: 18, then: func(w *world) {
			w.mustRun(Options{Now: true})
		}},
		"less is confirmed": {reads: 10, upTo: 10, then: func(w *world) { w.confirm(10) }},
		"it is another stream": {reads: 18, upTo: 18, then: func(w *world) {
			must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
			w.makeStream(1)
			w.publish(20)
		}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			reads, known := 0, &archive.Known{}
			run := func(now bool) *Report {
				reads = 0
				return w.mustRun(Options{Now: now, Known: known, Hit: func(point string) {
					if point == "archive.message" {
						reads++
					}
				}})
			}
			w.publish(20)
			w.confirm(12)
			run(false)
			w.confirm(15)
			if run(false); reads != 3 || len(w.archived()) > 0 {
				t.Errorf("it has read %d messages again, and archived %v", reads-3, w.archived())
			}
			c.then(w)
			if c.upTo == 18 {
				w.confirm(18)
			}
			r := run(true)
			if r.Archived != c.upTo || reads != c.reads {
				t.Errorf("archived up to %d, with %d messages read, want %d", r.Archived, reads, c.reads)
			}
			want := c.upTo
			if c.lacks > 0 {
				want--
			}
			if got := w.archived(); uint64(len(got)) != want || slices.Contains(got, c.lacks) {
				t.Errorf("archived: %v", got)
			}
		})
	}
}

// TestReadingIsSpreadOverATime: it takes as long as it is told to, but no longer than a millisecond for each
// message, and ends when it is stopped meanwhile.
func TestReadingIsSpreadOverATime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(300)
	w.confirm(200)
	began := time.Now()
	w.mustRun(Options{Now: true, Over: time.Hour})
	if took := time.Since(began); took < 200*slowest-nap {
		t.Errorf("200 messages were read within %v", took)
	}
	w.confirm(300)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	r, err := Run(ctx, w.cfg, slog.New(slog.DiscardHandler), Options{Now: true, Over: time.Hour,
		Hit: func(point string) {
			if point == "archive.message" {
				stop()
			}
		}})
	if !errors.Is(err, context.Canceled) || r.Archived != 200 {
		t.Errorf("archived up to %d, %v", r.Archived, err)
	}
}

// TestWhatTheBrokerLostIsNotArchived, although a process had read it for the segment that it had begun: other
// messages have come under those sequences, in the same stream.
func TestWhatTheBrokerLostIsNotArchived(t *testing.T) {
	t.Parallel()
	dir, known := t.TempDir(), &archive.Known{}
	server := natstest.Server(t, natsserver.Options{Dir: dir})
	w := newWorldOn(t, server)
	w.publish(20)
	w.confirm(15)
	w.mustRun(Options{Known: known})
	made := w.s.CachedInfo().Created
	server.Shutdown()
	_, err := natsserver.Tear(dir, "OUTBOX", natsserver.Back, func(seq uint64, _ time.Time) bool {
		return seq <= 10
	})
	must.Succeed(t, err)
	w.connect(natstest.Server(t, natsserver.Options{Dir: dir}).URL(), w.cfg.Archive.URL)
	w.s, err = w.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	if now := w.s.CachedInfo(); !now.Created.Equal(made) || now.State.LastSeq != 10 {
		t.Fatalf("the stream was made at %v, not %v, and ends at %d", now.Created, made, now.State.LastSeq)
	}
	w.publishBehind(11, 10)
	w.confirm(20)
	if r := w.mustRun(Options{Now: true, Known: known}); r.Archived != 20 || len(r.Segments) != 1 {
		t.Fatalf("%+v", r)
	}
	w.comesBack()
}
