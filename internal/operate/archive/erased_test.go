package archive

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// TestWhatWasErasedBeforeItWasArchivedIsNoGap: at the front of the stream and within. A stream that is
// restored says so as well. What was removed beside it is a gap as ever.
func TestWhatWasErasedBeforeItWasArchivedIsNoGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(20)
	w.erase(outbox.Sequences{{From: 1, To: 2}, {From: 5, To: 5}})
	w.erase(outbox.Sequences{{From: 7, To: 8}})
	w.confirm(8) // has no message
	if r := w.mustRun(Options{Now: true}); r.Archived != 6 || r.Segments[0].Erased != 3 {
		t.Errorf("%+v", r)
	}
	w.confirm(12)
	if r := w.mustRun(Options{Now: true}); r.Archived != 12 || r.Segments[0].Erased != 2 {
		t.Errorf("%+v", r)
	}
	want := []uint64{3, 4, 6, 9, 10, 11, 12}
	if got := w.archived(); !reflect.DeepEqual(got, want) {
		t.Errorf("archived %v, want %v", got, want)
	}
	if _, err := Restore(t.Context(), w.cfg, slog.New(slog.DiscardHandler),
		RestoreOptions{To: "AGAIN"}); err == nil {
		restored, err := w.js.Stream(t.Context(), "AGAIN")
		must.Succeed(t, err)
		info := restored.CachedInfo()
		if info.Config.Metadata[outbox.MetadataErased] != "1+1,3,2+1" || info.State.Msgs != 7 ||
			info.State.LastSeq != 12 || info.State.FirstSeq != 3 {
			t.Errorf("restored as %+v, %v", info.State, info.Config.Metadata)
		}
	} else {
		t.Error(err)
	}

	w.erase(outbox.Sequences{{From: 14, To: 14}})
	must.Succeed(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(16)))
	w.confirm(18)
	_, err := w.run(Options{Now: true})
	w.wantFault(err, "archive_gap")
	r := w.mustRun(Options{Now: true, AcceptGap: outbox.SequenceRange{From: 13, To: 15}})
	if r.Archived != 18 ||
		r.Segments[0].Erased != 1 || len(r.Segments[0].Gaps) != 2 {
		t.Errorf("%+v", r)
	}
}

// TestARunEndsBesideAnInterruptedErasure: that has noted messages as erased, and has not deleted
// them, so they are not read again and again. An erasure that is at work is waited for, and whoever stops the
// run meanwhile does not wait.
func TestARunEndsBesideAnInterruptedErasure(t *testing.T) {
	t.Parallel()
	w := newConfirmed(t)
	w.noteErased(outbox.Sequences{{From: 5, To: 6}})
	begun := 0
	r, err := w.run(Options{Now: true, pause: time.Millisecond, Hit: func(point string) {
		if point == "archive.begin" {
			begun++
		}
	}})
	w.wantFault(err, "erase_busy")
	f := outbox.FaultOf(err)
	if begun != 1 || r.Archived != 0 || !strings.Contains(f.Message, "from 1 on") ||
		!strings.Contains(f.Message, "still has 5") ||
		!strings.Contains(f.Hint, "outflow erase") || !strings.Contains(f.Hint, outbox.MetadataErased) {
		t.Errorf("read %d times, %+v, %v: %s", begun, r, err, f.Hint)
	}

	ctx, stop := context.WithCancel(t.Context())
	_, err = Run(ctx, w.cfg, slog.New(slog.DiscardHandler), Options{Now: true, pause: time.Hour,
		Hit: func(point string) {
			if point == "archive.begin" {
				time.AfterFunc(100*time.Millisecond, stop) // mostly in the pause behind it
			}
		}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("stopped: %v", err)
	}

	begun = 0
	r, err = w.run(Options{Now: true, pause: time.Millisecond, Hit: func(point string) {
		if point != "archive.begin" {
			return
		}
		if begun++; begun == 1 {
			must.Succeed(t, w.s.SecureDeleteMsg(t.Context(), 5))
			must.Succeed(t, w.s.SecureDeleteMsg(t.Context(), 6))
		}
	}})
	must.Succeed(t, err)
	if r.Archived != 12 || r.Segments[0].Erased != 2 || begun != 2 {
		t.Errorf("read %d times, %+v", begun, r)
	}
}

// TestARunEndsBesideAnErasureThatGoesOn: whenever a segment is made, more of its messages are erased.
func TestARunEndsBesideAnErasureThatGoesOn(t *testing.T) {
	t.Parallel()
	w := newConfirmed(t)
	begun := uint64(0)
	_, err := w.run(Options{Now: true, pause: time.Millisecond, Hit: func(point string) {
		if point == "archive.begin" {
			begun++
			w.erase(outbox.Sequences{{From: begun, To: begun}})
		}
	}})
	w.wantFault(err, "erase_busy")
	if begun != eraseTries {
		t.Errorf("read %d times, %v", begun, err)
	}
	if r := w.mustRun(Options{Now: true}); r.Archived != 12 || r.Segments[0].Messages != 12-eraseTries {
		t.Errorf("%+v", r)
	}
}

// TestAnErasureThatGoesOnLeavesAnArchiveThatGoesOn: whenever an object was written, one of its messages is
// erased, and somebody may be about to name that object, so it stays. That is no damage, however many there
// are.
func TestAnErasureThatGoesOnLeavesAnArchiveThatGoesOn(t *testing.T) {
	t.Parallel()
	w := newConfirmed(t)
	begun := uint64(0)
	o := Options{Now: true, pause: time.Millisecond, Hit: func(point string) {
		if point == "archive.written" && begun < 8 {
			begun++
			w.erase(outbox.Sequences{{From: begun, To: begun}})
		}
	}}
	_, err := w.run(o)
	w.wantFault(err, "erase_busy")
	if r := w.mustRun(o); r.Archived != 12 || r.Segments[0].Erased != 8 || begun != 8 {
		t.Errorf("read %d times, %+v", begun, r)
	}
	if got := w.archived(); !slices.Equal(got, []uint64{9, 10, 11, 12}) {
		t.Errorf("archived are %v", got)
	}
}

// TestWhatIsErasedFromTheArchiveDuringARestoreIsNoGap: the run that made the stream knew nothing of it, and
// the one that goes on says it.
func TestWhatIsErasedFromTheArchiveDuringARestoreIsNoGap(t *testing.T) {
	t.Parallel()
	w := newArchived(t)
	w.killRestore("restore.made", 1)
	w.eraseArchived(func(seq uint64) bool { return seq == 5 })
	_, err := w.restore(RestoreOptions{To: "AGAIN"})
	must.Succeed(t, err)
	restored, err := w.js.Stream(t.Context(), "AGAIN")
	must.Succeed(t, err)
	info := restored.CachedInfo()
	if info.Config.Metadata[outbox.MetadataErased] != "5" || info.State.Msgs != 8 || info.State.LastSeq != 9 {
		t.Errorf("restored as %+v, %v", info.State, info.Config.Metadata)
	}
}

// TestARestoreThatHasNoRoomForWhatWasErasedMeanwhileSaysWhatToDo: nothing leaves the front of a stream
// that is being restored.
func TestARestoreThatHasNoRoomForWhatWasErasedMeanwhileSaysWhatToDo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const last = 130_001
	w.fill(func(s *archive.Segment) {
		for seq := uint64(1); seq <= last; seq++ {
			must.Succeed(t, s.Add(&archive.Message{Seq: seq, Time: time.Unix(int64(seq), 0),
				Subject: "outbox.doc", Data: []byte("{}")}))
		}
	})
	w.killRestore("restore.made", 1)
	w.eraseArchived(func(seq uint64) bool { return seq%2 == 0 })
	_, err := w.restore(RestoreOptions{To: "AGAIN"})
	w.wantFault(err, "erase_room")
	if hint := outbox.FaultOf(err).Hint; !strings.Contains(hint, "`nats stream rm AGAIN`") ||
		!strings.Contains(hint, "--from 27605`") {
		t.Error(hint)
	}
}

// TestWhatIsErasedBetweenTwoRunsOfARestoreMustNotBeInTheStream: nor may the stream begin with it.
func TestWhatIsErasedBetweenTwoRunsOfARestoreMustNotBeInTheStream(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		point  string
		n      int
		erased uint64
		fault  bool
	}{
		{"restore.made", 1, 9, false}, {"restore.made", 1, 1, true}, {"restore.message", 3, 2, true},
		{"restore.published", 1, 1, true}, {"restore.purged", 1, 9, true},
	} {
		t.Run(fmt.Sprint(c.point, c.erased), func(t *testing.T) {
			t.Parallel()
			w := newArchived(t)
			w.killRestore(c.point, c.n)
			w.eraseArchived(func(seq uint64) bool { return seq == c.erased })
			_, err := w.restore(RestoreOptions{To: "AGAIN"})
			if c.fault {
				w.wantFault(err, "archive_differs")
				f := outbox.FaultOf(err)
				if !strings.Contains(f.Message, "since then 1 of its messages up to") ||
					!strings.Contains(f.Hint, "`nats stream rm AGAIN`") {
					t.Error(f)
				}
				must.Succeed(t, w.js.DeleteStream(t.Context(), "AGAIN"))
				_, err = w.restore(RestoreOptions{To: "AGAIN"})
			}
			must.Succeed(t, err)
			again, err := w.js.Stream(t.Context(), "AGAIN")
			must.Succeed(t, err)
			st := again.CachedInfo().State
			if st.Msgs != 8 || st.LastSeq != 9 || (st.FirstSeq == 1) == (c.erased == 1) {
				t.Errorf("%+v", st)
			}
		})
	}
}

// newConfirmed makes a world of 20 messages, of which 12 are confirmed.
func newConfirmed(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.publish(20)
	w.confirm(12)
	return w
}

// newArchived makes one of 9 messages, which are archived.
func newArchived(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.publish(9)
	w.confirm(9)
	w.mustRun(Options{Now: true})
	return w
}

// noteErased says in the stream's metadata that messages were erased.
func (w *world) noteErased(all outbox.Sequences) {
	w.t.Helper()
	s := stream.New(jsapi.New(w.js.Conn(), ""), "OUTBOX", slog.New(slog.DiscardHandler))
	must.Succeed(w.t, s.NoteErased(w.t.Context(), all))
}

// erase erases messages from the stream.
func (w *world) erase(all outbox.Sequences) {
	w.t.Helper()
	w.noteErased(all)
	for _, r := range all {
		for seq := r.From; seq <= r.To; seq++ {
			must.Succeed(w.t, w.s.SecureDeleteMsg(w.t.Context(), seq))
		}
	}
}

// killRestore ends a restore into stream AGAIN when it comes to a point for the n-th time.
func (w *world) killRestore(point string, n int) {
	w.t.Helper()
	ctx, kill := context.WithCancel(w.t.Context())
	_, err := Restore(ctx, w.cfg, slog.New(slog.DiscardHandler), RestoreOptions{To: "AGAIN",
		Hit: func(at string) {
			if at == point {
				if n--; n == 0 {
					kill()
				}
			}
		}})
	if !errors.Is(err, context.Canceled) {
		w.t.Fatal(err)
	}
}

// eraseArchived erases messages from the archive.
func (w *world) eraseArchived(is func(seq uint64) bool) {
	w.t.Helper()
	store, err := open(w.t.Context(), w.cfg, archive.OpenThere)
	must.Succeed(w.t, err)
	defer func() { must.Succeed(w.t, store.Close()) }()
	a, _, err := find(w.t.Context(), w.cfg, store, "")
	must.Succeed(w.t, err)
	_, err = a.Erase(w.t.Context(), archive.Erasing{Request: "r",
		Is: func(m *archive.Message) (bool, error) { return is(m.Seq), nil }})
	must.Succeed(w.t, err)
}
