package archive

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// A cut has no row.
func TestACutIsNotPutBack(t *testing.T) {
	t.Parallel()
	store, err := archive.Open(t.Context(), "file://"+t.TempDir())
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	a, err := archive.Load(t.Context(), store, archive.FolderOf("OUTBOX", time.Now()), nil)
	must.Succeed(t, err)
	s, err := a.NewSegment()
	must.Succeed(t, err)
	c := outbox.Cut{SystemID: 7, LSN: 0x3000, Epoch: 2, Owner: 2}
	must.Succeed(t, s.Add(&archive.Message{Seq: 1, Time: time.Now(), Subject: outbox.CutSubject,
		Header: nats.Header{outbox.HeaderCut: {c.String()}}}))
	_, err = a.Append(t.Context(), s, 0)
	must.Succeed(t, err)
	w := &rowWriter{rep: &Rows{First: 1, Last: 1}, carry: &carrier{}}
	if err := w.run(t.Context(), a); err != nil || w.rep.Inserted+w.rep.DeadLetters > 0 {
		t.Errorf("%+v, %v", w.rep, err)
	}
}

// TestADryRunSaysNothingOfTheTable, at which it has not looked.
func TestADryRunSaysNothingOfTheTable(t *testing.T) {
	t.Parallel()
	r := &Rows{Table: "outbox", Inserted: 7, First: 1, Last: 9, dry: true}
	if said := r.String(); strings.Contains(said, "put back") ||
		!strings.Contains(said, "7 rows in messages 1 to 9") {
		t.Error(said)
	}
}
