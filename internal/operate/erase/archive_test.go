package erase

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
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
		untold: map[string]uint64{}}
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
