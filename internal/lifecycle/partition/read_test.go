package partition

import (
	"context"
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// TestASnapshotHasEveryRowOnceWhateverThePartitionsState: attached, half detached, detached; and while it is
// open no partition is dropped.
func TestASnapshotHasEveryRowOnceWhateverThePartitionsState(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		w := newWorld(t, srv, 2)
		w.insert(0, 30, true)
		w.insert(1, 12, true)
		open := func() *tablesnapshot.Snapshot {
			t.Helper()
			s, err := tablesnapshot.Open(outboxdb.Within(t), catalog.Config{URL: w.URL, Table: "outbox",
				Slot: w.Slot, Publication: w.Slot}, "")
			must.Succeed(t, err)
			t.Cleanup(s.Close)
			return s
		}
		rows := func(when string, s *tablesnapshot.Snapshot) {
			t.Helper()
			q := tablesnapshot.Query{Mapping: outboxdb.Mapping, ID: "id"}
			q.Mapping.Key = ""
			n, err := s.Count(outboxdb.Within(t), q)
			if err != nil || n != 42 {
				t.Errorf("%s: %d rows, %v", when, n, err)
			}
			ids := map[string]bool{}
			q.Columns, q.Sorted = []string{"id", "doc_id"}, true
			err = s.Rows(outboxdb.Within(t), q,
				func(v [][]byte) error { ids[string(v[0])] = true; return nil })
			if err != nil || len(ids) != 42 {
				t.Errorf("%s: %d ids, %v", when, len(ids), err)
			}
			none, double, err := s.CheckIDs(outboxdb.Within(t), "id")
			if err != nil || none != 0 || double != 0 {
				t.Errorf("%s: %d without an id, %d twice, %v", when, none, double, err)
			}
		}
		s := open()
		rows("attached", s)
		s.Close()
		tx, err := w.other().Begin(context.Background())
		must.Succeed(t, err)
		_, err = tx.Exec(outboxdb.Within(t), "SELECT FROM outbox LIMIT 1")
		must.Succeed(t, err)
		w.apply()
		if w.Text("SELECT bool_or(inhdetachpending)::text FROM pg_inherits") != "true" {
			t.Fatal("nothing is half detached")
		}
		s = open()
		rows("half detached", s)
		must.Succeed(t, tx.Rollback(context.Background()))
		w.confirm(w.Slot)
		w.apply() // it waits for the snapshot
		rows("half detached, and waited for", s)
		s.Close()
		for range 2 {
			w.apply()
		}
		w.want(0, Sealed)
		w.want(1, Sealed)
		s = open()
		rows("detached", s)
		w.confirm(w.Slot)
		wantWhy(t, w.apply(), 0, "server process "+fmt.Sprint(w.Text(
			"SELECT pid::text FROM pg_locks WHERE relation = 'outbox_0'::regclass AND mode = "+
				"'AccessShareLock'")))
		rows("detached, and about to be dropped", s)
		s.Close()
		w.apply()
		if w.exists(0) || w.exists(1) {
			t.Error("it is still there")
		}
	})
}
