package erase

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
	"github.com/outflowhq/outflow/sink/stream"
)

// An archived cut is of no document, and a certificate does not say that one is unknown. It names what a
// killed run has left in the archive of a stream that is gone.
func TestWhatACertificateSaysOfTheArchive(t *testing.T) {
	t.Parallel()
	store, err := archive.Open(t.Context(), "file://"+t.TempDir())
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	now := time.Now()
	a, err := archive.Load(t.Context(), store, archive.FolderOf("OUTBOX", now), nil)
	must.Succeed(t, err)
	s, err := a.NewSegment()
	must.Succeed(t, err)
	cut := outbox.Cut{SystemID: 7, LSN: 0x3000, Epoch: 2, Owner: 2}
	m := &archive.Message{Seq: 1, Time: now, Subject: outbox.CutSubject,
		Header: nats.Header{outbox.HeaderCut: {cut.String()}}}
	must.Succeed(t, s.Add(m))
	_, err = a.Append(t.Context(), s, 0)
	must.Succeed(t, err)
	left := a.ObjectName(&archive.Manifest{First: 2, Last: 9})
	must.Succeed(t, store.Create(t.Context(), left, []byte("of a run that was killed")))
	c := &command{store: store, rep: &Report{}, rec: &erasure.Record{}, doc: &erasure.Document{},
		untold: map[string]uint64{}, stays: map[string][]uint64{}}
	c.cfg.Stream = "OUTBOX"
	asked := 0
	err = c.eachFolder(t.Context(), func(_ *archive.Archive, is func(*archive.Message) (bool, error)) error {
		asked++
		goes, err := is(m)
		if goes {
			t.Error("it goes")
		}
		return err
	})
	if err != nil || asked != 1 || c.unsaid() != 0 {
		t.Errorf("asked %d times, %d unknown, %v", asked, c.unsaid(), err)
	}
	dead := &archive.Message{Seq: 2, Header: nats.Header{sink.HeaderDeadLetter: {"poison"}}}
	for range 2 { // the second time all of it again
		must.Succeed(t, c.eachFolder(t.Context(), func(_ *archive.Archive,
			is func(*archive.Message) (bool, error)) error {
			for range 2 { // somebody else has written its segment anew meanwhile
				_, err := is(dead)
				must.Succeed(t, err)
			}
			return nil
		}))
	}
	if n := c.unsaid(); n != 1 {
		t.Errorf("%d do not say their document, want 1", n)
	}
	c.limits()
	if said := strings.Join(c.rep.NotReached, "\n"); !strings.Contains(said, left) {
		t.Errorf("%s is not named: %s", left, said)
	}
	c.rd.Stream.Created = now // an archiver goes on with it, and the erasure waits for that
	all := func(*archive.Archive, func(*archive.Message) (bool, error)) error { return nil }
	must.Succeed(t, c.eachFolder(t.Context(), all))
	if len(c.leftovers) > 0 {
		t.Errorf("of the stream that there is: %q", c.leftovers)
	}
}

// TestACertificateNamesWhatTheStreamLostAndNoArchiveHas: also what was lost before it could be archived and
// the archive goes on behind, and what goes while the erasure waits. What the archive has that the stream was
// restored from is reached, but for that of a stream of another name.
func TestACertificateNamesWhatTheStreamLostAndNoArchiveHas(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.stream = stream.New(c.l.NATS.API(), "OUTBOX", c.log)
	store, err := archive.Open(t.Context(), "file://"+t.TempDir())
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	c.store = store
	archived := func(folder string, gap, last uint64) {
		t.Helper()
		a, err := archive.Load(t.Context(), store, folder, nil)
		must.Succeed(t, err)
		s, err := a.NewSegment()
		must.Succeed(t, err)
		s.Gap(outbox.Sequences{{From: 1, To: gap}}, nil)
		for seq := gap + 1; seq <= last; seq++ {
			must.Succeed(t, s.Add(&archive.Message{Seq: seq, Time: a.Created(), Subject: "outbox.other",
				Header: nats.Header{}}))
		}
		_, err = a.Append(t.Context(), s, 0)
		must.Succeed(t, err)
	}
	says := func(want string) {
		t.Helper()
		must.Succeed(t, c.messages(t.Context(), time.Now()))
		must.Succeed(t, c.eachFolder(t.Context(), func(*archive.Archive,
			func(*archive.Message) (bool, error)) error {
			return nil
		}))
		if got := c.nowhere.String(); got != want {
			t.Errorf("it names %q, want %q", got, want)
		}
		c.limits()
		said := strings.Contains(strings.Join(c.rep.NotReached, "\n"), "which the archive lacks")
		if said != (want != "") {
			t.Errorf("not reached: %q", c.rep.NotReached)
		}
	}
	for range 9 {
		c.publish("_outflow.1.", "other", 0x100)
	}
	says("")
	s, err := c.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	must.Succeed(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(6)))
	says("1+4")
	archived(archive.FolderOf("OUTBOX", c.rd.Stream.Created), 2, 7)
	says("1+1")
	before := archive.FolderOf("OUTBOX", c.rd.Stream.Created.Add(-time.Hour))
	archived(before, 1, 4)
	says("1+1") // that one had other messages
	config := s.CachedInfo().Config
	another := archive.FolderOf("ANOTHER", c.rd.Stream.Created.Add(-time.Hour))
	for _, from := range []struct{ folder, lost string }{{before, "1"}, {another, "1+1"}} {
		config.Metadata = map[string]string{stream.MetadataRestored: from.folder}
		_, err = c.js.UpdateStream(t.Context(), config)
		must.Succeed(t, err)
		says(from.lost)
		said := strings.Contains(strings.Join(c.rep.NotReached, "\n"), "folder "+from.folder)
		if said != (from.folder == another) {
			t.Errorf("restored from %s: %q", from.folder, c.rep.NotReached)
		}
	}
}

// TestACertificateNamesAnArchiveThatHasNothing: that of a former stream may be on a volume that is not
// mounted, and the stream that there is says nothing of what that one had.
func TestACertificateNamesAnArchiveThatHasNothing(t *testing.T) {
	t.Parallel()
	store, err := archive.Open(t.Context(), "file://"+t.TempDir())
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	c := &command{store: store, rep: &Report{}, doc: &erasure.Document{}, untold: map[string]uint64{},
		stays: map[string][]uint64{}, l: &backfill.Conns{Conns: &conns.Conns{}}}
	c.cfg.Stream = "OUTBOX"
	for _, has := range []bool{false, true} {
		if has {
			name := "v1/" + archive.FolderOf("OUTBOX", time.Now().Add(-time.Hour)) + "/of-a-former-stream"
			must.Succeed(t, store.Create(t.Context(), name, []byte("something")))
		}
		must.Succeed(t, c.eachFolder(t.Context(), func(*archive.Archive,
			func(*archive.Message) (bool, error)) error {
			return nil
		}))
		c.limits()
		said := strings.Contains(strings.Join(c.rep.NotReached, "\n"), "has nothing of a stream OUTBOX")
		if said == has {
			t.Errorf("the archive has something: %v; not reached: %q", has, c.rep.NotReached)
		}
	}
}

// TestNoFolderWaitsForOneThatIsDamaged: an object of it is lost, or a manifest.
func TestNoFolderWaitsForOneThatIsDamaged(t *testing.T) {
	t.Parallel()
	for _, lost := range []string{"00000000000000000001-00000000000000000001.jsonl.zst",
		"00000000000000000001.json"} {
		dir, now := t.TempDir(), time.Now()
		store, err := archive.Open(t.Context(), "file://"+dir)
		must.Succeed(t, err)
		t.Cleanup(func() { must.Succeed(t, store.Close()) })
		folders := []string{archive.FolderOf("OUTBOX", now.Add(-time.Hour)), archive.FolderOf("OUTBOX", now)}
		for _, folder := range folders {
			a, err := archive.Load(t.Context(), store, folder, nil)
			must.Succeed(t, err)
			for seq := uint64(1); seq <= 2; seq++ {
				s, err := a.NewSegment()
				must.Succeed(t, err)
				must.Succeed(t, s.Add(&archive.Message{Seq: seq, Time: now, Subject: "outbox.other",
					Header: nats.Header{}}))
				_, err = a.Append(t.Context(), s, 0)
				must.Succeed(t, err)
			}
		}
		must.Succeed(t, os.Remove(filepath.Join(dir, "v1", folders[0], lost)))
		c := &command{store: store, rep: &Report{}, doc: &erasure.Document{}, untold: map[string]uint64{},
			stays: map[string][]uint64{}}
		c.cfg.Stream = "OUTBOX"
		var whole []string
		err = c.eachFolder(t.Context(), func(a *archive.Archive,
			_ func(*archive.Message) (bool, error)) error {
			err := a.Read(t.Context(), 1, func(*archive.Message) error { return nil })
			if err == nil {
				whole = append(whole, archive.FolderOf("OUTBOX", a.Created()))
			}
			return err
		})
		if !archive.IsDamaged(err) || !slices.Equal(whole, folders[1:]) {
			t.Errorf("without %s: %v, whole are %q", lost, err, whole)
		}
	}
}
