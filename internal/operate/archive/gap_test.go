package archive

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

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
	w.noteErased(outbox.Sequences{{From: 8, To: 8}})
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
	a, err := archive.Load(t.Context(), store, archive.FolderOf("OUTBOX", w.s.CachedInfo().Created), nil)
	must.Succeed(t, err)
	s, err := a.NewSegment()
	must.Succeed(t, err)
	must.Succeed(t, s.Add(&archive.Message{Seq: 1}))
	api := jsapi.New(w.js.Conn(), "")
	c := &command{cfg: w.cfg, api: api, stream: stream.New(api, "OUTBOX", slog.New(slog.DiscardHandler)),
		a: a, upTo: 5, to: 5}
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 2))
	err = c.hole(t.Context(), s, 4, nil)
	if err == nil || !strings.Contains(err.Error(), "lacks message 3") ||
		outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("got %v", err)
	}
	must.Succeed(t, c.hole(t.Context(), s, 2, nil))
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

// TestAnArchiveWithNothingOfTheStreamMayBeAnotherOne: its volume is not mounted. Accepting would begin a
// second one, that lacks what the first one has.
func TestAnArchiveWithNothingOfTheStreamMayBeAnotherOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(10)
	w.confirm(6)
	w.mustRun(Options{Now: true})
	must.Succeed(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(9)))
	w.confirm(9)
	says := func(unmounted bool) {
		t.Helper()
		_, err := w.run(Options{Now: true})
		w.wantFault(err, archive.CodeGap)
		if strings.Contains(err.Error(), "mounted") != unmounted {
			t.Error(err)
		}
	}
	says(false)
	w.cfg.Archive.URL += "/elsewhere"
	says(true)
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
	// A segment says so at once, however young it is: the next run knows nothing of what this one was told.
	r := w.mustRun(Options{AcceptGap: archive.Range{From: 11, To: 15}})
	if len(r.Segments) == 0 {
		t.Fatal("what was accepted is forgotten")
	}
	if s := r.Segments[0]; s.First != 11 || s.Last != 25 || len(s.Gaps) != 1 || s.Missing != 5 {
		t.Fatalf("%+v", r)
	}
	must.Succeed(t, w.s.Purge(t.Context()))
	w.confirm(28)
	_, err = w.run(Options{Now: true})
	w.wantFault(err, archive.CodeGap)
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
