package archive

import (
	"context"
	"encoding/hex"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

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

// TestTheConsumerOfARunSaysWhoseItIs: lists of consumers name it.
func TestTheConsumerOfARunSaysWhoseItIs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(5)
	w.confirm(5)
	made, err := w.js.Conn().SubscribeSync("$JS.API.CONSUMER.CREATE.OUTBOX.>")
	must.Succeed(t, err)
	must.Succeed(t, w.js.Conn().Flush())
	w.mustRun(Options{Now: true})
	m, err := made.NextMsg(time.Minute)
	must.Succeed(t, err)
	if !strings.Contains(string(m.Data), `"`+jsapi.MetadataReader+`":"outflow archive run"`) {
		t.Errorf("%s: %s", m.Subject, m.Data)
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

// TestWhatReadsTheArchiveMakesNoFolder: nothing is mounted there, or the path is mistyped. What writes it
// makes it.
func TestWhatReadsTheArchiveMakesNoFolder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	above := filepath.Join(t.TempDir(), "not")
	dir := filepath.Join(above, "mounted")
	w.cfg.Archive.URL = "file://" + dir
	log := slog.New(slog.DiscardHandler)
	list := func() ([]Listing, error) { return List(t.Context(), w.cfg) }
	for what, read := range map[string]func() error{
		"list":    func() error { _, err := list(); return err },
		"verify":  func() error { _, err := Verify(t.Context(), w.cfg, 0); return err },
		"restore": func() error { _, err := w.restore(RestoreOptions{To: "PAST"}); return err },
		"rows":    func() error { _, err := PutBack(t.Context(), w.cfg, log, RowsOptions{}); return err },
	} {
		err := read()
		w.wantFault(err, "archive_empty")
		if !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := os.Stat(above); !os.IsNotExist(err) {
			t.Errorf("%s has made the folder: %v", what, err)
		}
	}
	w.publish(1)
	w.confirm(1)
	w.mustRun(Options{Now: true})
	if all, err := list(); err != nil || len(all) != 1 || len(all[0].Segments) != 1 {
		t.Errorf("%+v, %v", all, err)
	}
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

// TestARunEndsWithItsTurn, and the next one goes on where it has ended: each message is read once, and what
// is made is what one run makes.
func TestARunEndsWithItsTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(20)
	w.confirm(18)
	reads := 0
	o := Options{Now: true, Known: &archive.Known{}, Turn: 1, Hit: func(point string) {
		if point == "archive.message" {
			reads++
		}
	}}
	for n := range 18 {
		if r := w.mustRun(o); reads != n+1 || (r.Archived == 18) != (n == 17) {
			t.Fatalf("run %d has read %d messages: %+v", n, reads, r)
		}
	}
	if got := w.archived(); len(got) != 18 {
		t.Errorf("archived are %v", got)
	}
	w.wantReach(archive.Reach{Last: 18, Complete: 1018, Whole: 1018})
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 20))
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 19))
	w.comesBack()
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
	if !slept || len(r.Segments) != 0 || r.Archived != 20 || r.Stands != 20 || len(w.archived()) != 20 {
		t.Errorf("%+v, %v", r, w.archived())
	}
}

// TestWhatOthersDoWhileARunLooksIsNoDifference: when it has looked at the archive, or is about to, more is
// published, confirmed and archived.
func TestWhatOthersDoWhileARunLooksIsNoDifference(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(10)
	w.confirm(10)
	w.mustRun(Options{Now: true})
	sc, err := wiring.Broker(w.cfg, slog.New(slog.DiscardHandler))
	must.Succeed(t, err)
	conn, err := wiring.Connect(t.Context(), w.cfg, sc)
	must.Succeed(t, err)
	t.Cleanup(conn.Close)
	store, err := open(t.Context(), w.cfg, archive.OpenThere)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	for _, before := range []bool{true, false} {
		last, did := w.s.CachedInfo().State.LastSeq, false
		looking := listing{Store: store, before: before, hit: func() {
			if !did {
				did = true
				w.publish(10)
				last += 10
				w.confirm(last)
				w.mustRun(Options{Now: true})
			}
		}}
		c := &command{cfg: w.cfg, api: conn.API(), o: Options{Now: true}}
		must.Succeed(t, c.run(t.Context(), looking, conn, slog.New(slog.DiscardHandler)))
		must.Succeed(t, c.waits(t.Context()))
		if c.report.Archived != last || c.report.Stands != last {
			t.Errorf("before %v: %+v, not %d", before, c.report, last)
		}
	}
}

// listing calls hit before or behind each look at what is in a folder.
type listing struct {
	archive.Store
	before bool
	hit    func()
}

func (l listing) List(ctx context.Context, folder, after string) ([]string, error) {
	if l.before {
		l.hit()
	}
	names, err := l.Store.List(ctx, folder, after)
	if !l.before {
		l.hit()
	}
	return names, err
}

// TestWhatAnotherRunHasArchivedIsNoGap: the stream lets it go before this run comes to it.
func TestWhatAnotherRunHasArchivedIsNoGap(t *testing.T) {
	t.Parallel()
	for _, to := range []uint64{20, 30} { // all goes that this run may archive, or some of it
		w := newWorld(t)
		w.publish(30)
		store, err := open(t.Context(), w.cfg, archive.OpenThere)
		must.Succeed(t, err)
		t.Cleanup(func() { must.Succeed(t, store.Close()) })
		a, err := archive.Load(t.Context(), store, archive.FolderOf("OUTBOX", w.s.CachedInfo().Created), nil)
		must.Succeed(t, err)
		w.confirm(24)
		w.mustRun(Options{Now: true})
		must.Succeed(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(25)))
		api := jsapi.New(w.js.Conn(), "")
		c := &command{cfg: w.cfg, api: api, stream: stream.New(api, "OUTBOX", slog.New(slog.DiscardHandler)),
			a: a, upTo: to, to: to}
		if err := c.pass(t.Context()); !errors.Is(err, archive.ErrOvertaken) || a.Next() != 25 {
			t.Errorf("up to %d: %v, and the archive ends at %d", to, err, a.Next()-1)
		}
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
	_, err = w.run(Options{Now: true})
	w.wantFault(err, "stream_missing")
	w.makeStream(1)
	_, err = w.run(Options{Now: true})
	w.wantFault(err, "archive_record")
}

// TestNothingIsArchivedOfTwoStreams: one is made in place of the other while a run reads, or has written an
// object, or none is.
func TestNothingIsArchivedOfTwoStreams(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"archive.message", "archive.verified"} {
		for _, again := range []bool{true, false} {
			w := newWorld(t)
			w.publish(20)
			w.confirm(12)
			done := false
			r, err := w.run(Options{Now: true, Hit: func(at string) {
				if at != point || done {
					return
				}
				done = true
				must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
				if again {
					w.makeStream(1)
					w.publish(20)
				}
			}})
			w.wantFault(err, "stream_recreated")
			if len(r.Segments) > 0 || len(w.archived()) > 0 {
				t.Errorf("%s: %+v", point, r)
			}
		}
	}
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
			w.noteErased(outbox.Sequences{{From: 5, To: 5}})
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

// TestASegmentWaitsForNoClockThatHasGoneBack, which may take longer than anybody waits for the archive.
func TestASegmentWaitsForNoClockThatHasGoneBack(t *testing.T) {
	t.Parallel()
	c := &command{now: time.Now()}
	c.cfg.Archive.SegmentAge = time.Hour
	for ahead, want := range map[time.Duration]bool{0: false, -time.Hour: true, time.Minute: false,
		365 * 24 * time.Hour: true} {
		if got := c.isOld(c.now.Add(ahead)); got != want {
			t.Errorf("%v ahead: %v", ahead, got)
		}
	}
}

// TestWhatAKilledRunHasWrittenIsRemoved: what it was writing has no name yet, and nobody looks for it.
func TestWhatAKilledRunHasWrittenIsRemoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(10)
	w.confirm(5)
	w.mustRun(Options{Now: true})
	dir := filepath.Join(strings.TrimPrefix(w.cfg.Archive.URL, "file://"), "v1",
		archive.FolderOf("OUTBOX", w.s.CachedInfo().Created))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, ".new-LEFT"), []byte("a part of a segment"), 0o600))
	w.mustRun(Options{})
	left, err := filepath.Glob(filepath.Join(dir, ".new-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}
