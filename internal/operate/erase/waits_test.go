package erase

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TestWhatAnErasureWaitsForSaysHowLongThatTakes: of the slot of outflow run, which confirms nothing sooner.
func TestWhatAnErasureWaitsForSaysHowLongThatTakes(t *testing.T) {
	t.Parallel()
	db := outboxdb.New(t, pgtest.Server(t))
	db.Exec(outboxdb.PlainTable)
	other := db.Slot + "_other"
	for _, slot := range []string{db.Slot, other} {
		db.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
		t.Cleanup(func() { db.Exec("SELECT pg_drop_replication_slot($1)", slot) })
	}
	l, err := erasure.Open(t.Context(), postgres.Target{URL: db.URL}, "outbox", db.Slot)
	must.Succeed(t, err)
	defer l.Close()
	c := &command{ledger: l, rec: &erasure.Record{Cut: 1 << 60}, rep: &Report{}}
	c.cfg.Sink.DurableAfter = 150 * time.Second
	confirmed, err := c.slots(t.Context(), time.Now())
	if err != nil || confirmed || len(c.rep.Waiting) != 2 {
		t.Fatalf("confirmed %v, %v, waiting for %q", confirmed, err, c.rep.Waiting)
	}
	for _, w := range c.rep.Waiting {
		if says := strings.HasSuffix(w, "(outflow run takes 2m30s at least: sink.durable_after)"); says !=
			!strings.HasPrefix(w, "slot "+other) {
			t.Error(w)
		}
	}
}

// TestAnErasureDoesNotAskForASecondArchive: where the archive has nothing, its volume may not be mounted.
func TestAnErasureDoesNotAskForASecondArchive(t *testing.T) {
	t.Parallel()
	c := &command{rep: &Report{}}
	c.behind(0, 5)
	c.behind(4, 5)
	for i, w := range c.rep.Waiting {
		if says := strings.Contains(w, "mounted"); says != (i == 0) {
			t.Error(w)
		}
	}
}
