package archive

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// stored are the messages of a stream, by sequence, without when they were stored and how they were
// published.
func (w *world) stored(name string) map[uint64]archive.Message {
	w.t.Helper()
	all := map[uint64]archive.Message{}
	s, err := w.js.Stream(w.t.Context(), name)
	must.Succeed(w.t, err)
	info, err := s.Info(w.t.Context())
	must.Succeed(w.t, err)
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
		m, err := s.GetMsg(w.t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		must.Succeed(w.t, err)
		all[seq] = archive.Message{Seq: seq, Subject: m.Subject, Header: published(m.Header), Data: m.Data}
	}
	return all
}

func (w *world) restore(o RestoreOptions) (*Restored, error) {
	w.t.Helper()
	return Restore(w.t.Context(), w.cfg, slog.New(slog.DiscardHandler), o)
}

// restoring is what the stream's metadata say.
func (w *world) restoring() string {
	w.t.Helper()
	nc, _ := natstest.Connect(w.t, w.cfg.NATS.URL)
	st, err := stream.New(jsapi.New(nc, ""), "OUTBOX", slog.New(slog.DiscardHandler)).Tail(w.t.Context())
	must.Succeed(w.t, err)
	return st.Restoring
}

// archive makes an archive of two segments with messages that are missing: at the beginning if front is set,
// and one and three within.
func (w *world) archive(front bool) {
	w.t.Helper()
	w.publish(30)
	_, err := w.js.PublishMsg(w.t.Context(), &nats.Msg{Subject: "outbox.raw", Data: []byte{0xff, 0},
		Header: nats.Header{outbox.HeaderOrigin: {"3"}}}, jetstream.WithMsgID("an id"))
	must.Succeed(w.t, err)
	for _, seq := range []uint64{12, 20, 21, 22} {
		must.Succeed(w.t, w.s.DeleteMsg(w.t.Context(), seq))
	}
	var o Options
	if front {
		must.Succeed(w.t, w.s.Purge(w.t.Context(), jetstream.WithPurgeSequence(5)))
		o.AcceptGap = archive.Range{From: 1, To: 4}
	}
	o.Now = true
	w.confirm(21) // the segment ends with message 19
	w.mustRun(o)
	w.confirm(31)
	w.mustRun(o)
}

// killed restores the stream, which is deleted first, up to a step. It is false where there are not as many.
func (w *world) killed(at int) (killed bool) {
	w.t.Helper()
	must.Succeed(w.t, w.js.DeleteStream(w.t.Context(), "OUTBOX"))
	defer func() {
		if r := recover(); r != nil && !killed {
			panic(r)
		}
	}()
	_, err := w.restore(RestoreOptions{Hit: func(string) {
		if at--; at == 0 {
			killed = true
			panic("killed")
		}
	}})
	must.Succeed(w.t, err)
	return false
}

// TestAStreamIsRestoredAsItWas: under the same sequences, with what is missing still missing; killed at any
// point and run again.
func TestAStreamIsRestoredAsItWas(t *testing.T) {
	t.Parallel()
	for _, front := range []bool{false, true} {
		t.Run(fmt.Sprintf("front removed %v", front), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.archive(front)
			want := w.stored("OUTBOX")
			for at := 1; w.killed(at); at += 1 + at/8 {
				if w.restoring() == "" {
					t.Fatalf("killed at its step %d, and the stream says that it is whole", at)
				}
				r, err := w.restore(RestoreOptions{})
				must.Succeed(t, err)
				if got := w.stored("OUTBOX"); !reflect.DeepEqual(got, want) || w.restoring() != "" {
					t.Fatalf("killed at its step %d: %+v\n%v\n%v", at, r, got, want)
				}
			}
			if got := w.stored("OUTBOX"); !reflect.DeepEqual(got, want) {
				t.Fatalf("%v\n%v", got, want)
			}
			r, err := w.restore(RestoreOptions{}) // killed when all was done
			must.Succeed(t, err)
			if got := w.stored("OUTBOX"); !reflect.DeepEqual(got, want) || !r.Before ||
				r.Messages != uint64(len(want)) {
				t.Errorf("%+v\n%v\n%v", r, got, want)
			}
			r, err = w.restore(RestoreOptions{To: "PAST"})
			must.Succeed(t, err)
			if r.Before {
				t.Error("it was not there")
			}
			if got := w.stored("PAST"); !reflect.DeepEqual(got, want) || r.Messages != uint64(len(want)) {
				t.Errorf("%+v\n%v\n%v", r, got, want)
			}
		})
	}
}

// TestAStreamThatExistsIsNotRestored: the one that was archived, and one with as many messages that are
// others.
func TestAStreamThatExistsIsNotRestored(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(3)
	w.confirm(3)
	w.mustRun(Options{Now: true})
	must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
	_, err := w.restore(RestoreOptions{})
	must.Succeed(t, err)
	w.s, err = w.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	w.confirm(3)
	w.mustRun(Options{Now: true})
	_, err = w.restore(RestoreOptions{})
	w.wantFault(err, "restore_exists")
	cfg := w.s.CachedInfo().Config
	must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
	_, err = w.js.CreateStream(t.Context(), cfg)
	must.Succeed(t, err)
	ingress := cfg.Subjects[0]
	for seq := range 3 {
		_, err = w.js.Publish(t.Context(), ingress[:len(ingress)-1]+fmt.Sprintf("outbox.doc%d", seq+1),
			[]byte("another"))
		must.Succeed(t, err)
	}
	_, err = w.restore(RestoreOptions{})
	w.wantFault(err, "restore_exists")
}

// TestOfTwoRestoresAtOnceNoneForgetsWhatTheStreamIs: an erasure knows it as a copy by its metadata. One
// finishes while the other one is about to, and the stream is used at once.
func TestOfTwoRestoresAtOnceNoneForgetsWhatTheStreamIs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.archive(false)
	_, err := w.restore(RestoreOptions{To: "PAST", Hit: func(point string) {
		if point == "restore.purged" {
			_, err := w.restore(RestoreOptions{To: "PAST"})
			must.Succeed(t, err)
			s, err := w.js.Stream(t.Context(), "PAST")
			must.Succeed(t, err)
			ingress := s.CachedInfo().Config.Subjects[0]
			_, err = w.js.Publish(t.Context(), ingress[:len(ingress)-1]+"outbox.doc1", nil)
			must.Succeed(t, err)
		}
	}})
	must.Succeed(t, err)
	past := stream.New(jsapi.New(w.js.Conn(), ""), "PAST", slog.New(slog.DiscardHandler))
	must.Succeed(t, past.Restored(t.Context())) // of one that had looked before
	s, err := w.js.Stream(t.Context(), "PAST")
	must.Succeed(t, err)
	meta := s.CachedInfo().Config.Metadata
	want := archive.FolderOf("OUTBOX", w.s.CachedInfo().Created)
	if _, under := meta[stream.MetadataRestoring]; under || meta[stream.MetadataRestored] != want {
		t.Errorf("%v, want %s", meta, want)
	}
}

// TestARestoreIntoAStreamOfOthersIsNoticed: somebody publishes to it meanwhile.
func TestARestoreIntoAStreamOfOthersIsNoticed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.archive(false)
	must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Restore(ctx, w.cfg, slog.New(slog.DiscardHandler), RestoreOptions{Hit: func(p string) {
		if p == "restore.made" {
			cancel()
		}
	}})
	if err == nil {
		t.Fatal("it was canceled")
	}
	s, err := w.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	ingress := s.CachedInfo().Config.Subjects[0]
	_, err = w.js.Publish(t.Context(), ingress[:len(ingress)-1]+"outbox.doc1", []byte("a stranger's"))
	must.Succeed(t, err)
	_, err = w.restore(RestoreOptions{})
	w.wantFault(err, archive.CodeDiffers)
}

// TestThereMustBeSomethingToRestore: wrong options and an empty archive.
func TestThereMustBeSomethingToRestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for code, o := range map[string]RestoreOptions{"archive_empty": {}, "flags": {Folder: "elsewhere"}} {
		_, err := w.restore(o)
		w.wantFault(err, code)
	}
	_, err := w.restore(RestoreOptions{To: "a.b"})
	w.wantFault(err, "flags")
}

// TestOfTwoFoldersTheOneWithMoreIsAskedFor: the stream was restored, its new archive has only begun, and it
// is deleted again.
func TestOfTwoFoldersTheOneWithMoreIsAskedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish(30)
	w.confirm(30)
	older := w.mustRun(Options{Now: true}).Folder
	must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
	_, err := w.restore(RestoreOptions{})
	must.Succeed(t, err)
	w.s, err = w.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	w.confirm(10)
	w.mustRun(Options{Now: true})
	must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
	_, err = w.restore(RestoreOptions{})
	w.wantFault(err, "flags")
	r, err := w.restore(RestoreOptions{Folder: older})
	must.Succeed(t, err)
	if r.Messages != 30 {
		t.Errorf("restored %d messages", r.Messages)
	}
}

// fill makes an archive of a stream that is gone, of one segment.
func (w *world) fill(write func(s *archive.Segment)) {
	w.t.Helper()
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	must.Succeed(w.t, w.js.DeleteStream(w.t.Context(), "OUTBOX"))
	store, err := archive.Open(w.t.Context(), w.cfg.Archive.URL)
	must.Succeed(w.t, err)
	defer func() { must.Succeed(w.t, store.Close()) }()
	a, err := archive.Load(w.t.Context(), store, archive.FolderOf("OUTBOX", info.Created), nil)
	must.Succeed(w.t, err)
	s, err := a.NewSegment()
	must.Succeed(w.t, err)
	write(s)
	_, err = a.Append(w.t.Context(), s, 0)
	must.Succeed(w.t, err)
}

// TestMessagesWithTheSameIDAreAllRestored: the server would take the later ones for duplicates. When they
// were published, the earlier ones had been forgotten.
func TestMessagesWithTheSameIDAreAllRestored(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fill(func(s *archive.Segment) {
		for seq := uint64(1); seq <= 600; seq++ {
			must.Succeed(t, s.Add(&archive.Message{Seq: seq, Time: time.Unix(int64(seq)*1000, 0),
				Subject: "outbox.doc", Header: nats.Header{jetstream.MsgIDHeader: {fmt.Sprint(seq % 200)}},
				Data: fmt.Append(nil, seq)}))
		}
	})
	_, err := w.restore(RestoreOptions{})
	must.Succeed(t, err)
	got := w.stored("OUTBOX")
	for seq := uint64(1); seq <= 600; seq++ {
		if m := got[seq]; string(m.Data) != fmt.Sprint(seq) ||
			m.Header.Get(jetstream.MsgIDHeader) != fmt.Sprint(seq%200) {
			t.Fatalf("message %d is %v", seq, m)
		}
	}
	s, err := w.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	if got := s.CachedInfo().Config.Duplicates; got != 2*time.Minute {
		t.Errorf("afterwards the stream remembers ids for %v", got)
	}
}

// TestARestoreWithTooMuchErasedMakesNothing: the stream's metadata have no room for all that was erased. What
// is behind some of it is restored.
func TestARestoreWithTooMuchErasedMakesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const last = 130_001
	w.fill(func(s *archive.Segment) {
		var erased outbox.Sequences
		for seq := uint64(2); seq < last; seq += 2 {
			erased = append(erased, outbox.SequenceRange{From: seq, To: seq})
		}
		s.Gap(nil, erased)
		for seq := uint64(1); seq <= last; seq += 2 {
			must.Succeed(t, s.Add(&archive.Message{Seq: seq, Time: time.Unix(int64(seq), 0),
				Subject: "outbox.doc", Data: []byte("{}")}))
		}
	})
	_, err := w.restore(RestoreOptions{})
	w.wantFault(err, "erase_room")
	if hint := outbox.FaultOf(err).Hint; !strings.Contains(hint, "--from 27605`") {
		t.Error(hint)
	}
	_, err = w.js.Stream(t.Context(), "OUTBOX")
	if !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Fatalf("it was made: %v", err)
	}
	_, err = w.restore(RestoreOptions{From: last + 1})
	w.wantFault(err, "flags")
	const from = last - 201 // an even one, which was erased
	r, err := w.restore(RestoreOptions{From: from})
	must.Succeed(t, err)
	if got := w.stored("OUTBOX"); len(got) != 101 || r.Messages != 101 || r.First != from+1 ||
		r.Missing != 100 || got[from+1].Seq != from+1 {
		t.Errorf("%+v; %d messages", r, len(got))
	}
	s, err := w.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	all, err := outbox.ParseSequences(s.CachedInfo().Config.Metadata[outbox.MetadataErased])
	if err != nil || all.Count() != 101 || !all.Has(from) {
		t.Errorf("erased are %d, %v", all.Count(), err)
	}
}

// TestOfTwoStreamsInOneArchiveNoneIsChosen: clusters that share nothing may have been given one archive, and
// their streams have one name.
func TestOfTwoStreamsInOneArchiveNoneIsChosen(t *testing.T) {
	t.Parallel()
	w, other := newWorld(t), newWorld(t)
	other.cfg.Archive.URL = w.cfg.Archive.URL
	_, err := w.js.Publish(t.Context(), "outbox.doc1", []byte("of the one place")) // at its first sequence
	must.Succeed(t, err)
	for n, of := range []*world{other, w} {
		of.publish(20 - 11*n)
		of.confirm(uint64(20 - 10*n))
		of.mustRun(Options{Now: true})
	}
	_, err = w.restore(RestoreOptions{To: "PAST"})
	w.wantFault(err, "flags")
	r, err := w.restore(RestoreOptions{To: "PAST",
		Folder: archive.FolderOf("OUTBOX", w.s.CachedInfo().Created)})
	must.Succeed(t, err)
	if r.Messages != 10 {
		t.Errorf("%+v", r)
	}
}

// TestAStreamThatGoesOnIsNoSecondOne: it has the messages of the older folder under their sequences. That it
// was made before they were stored, is what the broker's clock says, which was set back.
func TestAStreamThatGoesOnIsNoSecondOne(t *testing.T) {
	t.Parallel()
	former, w := newWorld(t), newWorld(t)
	former.cfg.Archive.URL = w.cfg.Archive.URL
	var object string
	for n, of := range []*world{former, w} {
		of.publish(10 + 5*n)
		of.confirm(uint64(10 + 5*n))
		if r := of.mustRun(Options{Now: true}); n == 0 {
			object = r.Segments[0].Object
		}
	}
	r, err := w.restore(RestoreOptions{To: "PAST"})
	must.Succeed(t, err)
	if r.Messages != 15 || r.Folder != archive.FolderOf("OUTBOX", w.s.CachedInfo().Created) {
		t.Errorf("%+v", r)
	}
	must.Succeed(t, os.Remove(filepath.Join(strings.TrimPrefix(w.cfg.Archive.URL, "file://"), object)))
	_, err = w.restore(RestoreOptions{To: "PAST2"})
	w.wantFault(err, "flags")
}

// TestARestoreDoesNotRememberDocuments: of an archive of years they are most of its manifests.
func TestARestoreDoesNotRememberDocuments(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.archive(false)
	store, err := open(t.Context(), w.cfg, archive.OpenThere)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, store.Close()) }()
	a, _, err := find(t.Context(), w.cfg, store, "")
	must.Succeed(t, err)
	for _, m := range a.Segments {
		if m.Count == 0 || m.Docs != nil {
			t.Errorf("segment %d has %d messages, and %d documents in memory", m.First, m.Count, len(m.Docs))
		}
	}
}
