package archive

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"testing"

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
	s := stream.New(jsapi.New(w.js.Conn(), ""), "OUTBOX", slog.New(slog.DiscardHandler))
	erase := func(all outbox.Sequences) {
		t.Helper()
		must.Succeed(t, s.NoteErased(t.Context(), all))
		for _, r := range all {
			for seq := r.From; seq <= r.To; seq++ {
				must.Succeed(t, w.s.SecureDeleteMsg(t.Context(), seq))
			}
		}
	}
	erase(outbox.Sequences{{From: 1, To: 2}, {From: 5, To: 5}})
	erase(outbox.Sequences{{From: 7, To: 8}})
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

	erase(outbox.Sequences{{From: 14, To: 14}})
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

// TestWhatIsErasedFromTheArchiveDuringARestoreIsNoGap: the run that made the stream knew nothing of it, and
// the one that goes on says it.
func TestWhatIsErasedFromTheArchiveDuringARestoreIsNoGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(9)
	w.confirm(9)
	w.mustRun(Options{Now: true})
	made, kill := context.WithCancel(t.Context())
	_, err := Restore(made, w.cfg, slog.New(slog.DiscardHandler), RestoreOptions{To: "AGAIN",
		Hit: func(string) { kill() }})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	store, err := open(t.Context(), w.cfg)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, store.Close()) }()
	a, _, err := find(t.Context(), w.cfg, store, "")
	must.Succeed(t, err)
	_, err = a.Erase(t.Context(), archive.Erasing{Request: "r", Is: func(m *archive.Message) (bool, error) {
		return m.Seq == 5, nil
	}})
	must.Succeed(t, err)
	_, err = w.restore(RestoreOptions{To: "AGAIN"})
	must.Succeed(t, err)
	restored, err := w.js.Stream(t.Context(), "AGAIN")
	must.Succeed(t, err)
	info := restored.CachedInfo()
	if info.Config.Metadata[outbox.MetadataErased] != "5" || info.State.Msgs != 8 || info.State.LastSeq != 9 {
		t.Errorf("restored as %+v, %v", info.State, info.Config.Metadata)
	}
}
