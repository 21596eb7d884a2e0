package replication

import (
	"sync/atomic"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// A new slot's snapshot and its stream share no row and leave out none, while writers write.
func TestSnapshotEndsWhereTheSlotBegins(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := newDatabase(t, srv)
		s := d.setup()
		defer s.Close()
		if _, err := s.EnsureTable(within(t)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.EnsurePublication(within(t)); err != nil {
			t.Fatal(err)
		}
		d.Insert(outboxdb.Ops(t, 5))
		var stopped atomic.Bool // not in the middle of an insert
		ended := make(chan error, 1)
		ctx := within(t)
		go func() {
			conn, err := postgres.Connect(ctx, d.URL)
			for n := 0; err == nil && !stopped.Load(); n++ {
				_, err = conn.Exec(ctx, "INSERT INTO public.outbox (doc_id, actor_id, counter, payload) "+
					"VALUES ('w', 'w', $1, '{}')", n)
			}
			if conn != nil {
				postgres.Close(conn)
			}
			ended <- err
		}()
		rows := func() (n int) {
			must.Succeed(t, d.Conn.QueryRow(within(t), "SELECT count(*) FROM outbox").Scan(&n))
			return n
		}
		eventually(t, "rows are written", func() bool { return rows() > 20 })
		made, err := catalog.CreateSlotWithSnapshot(within(t), d.cfg, false)
		must.Succeed(t, err)
		defer made.Close()
		snap, err := tablesnapshot.Open(within(t), d.cfg.Config, made.Snapshot)
		must.Succeed(t, err)
		defer snap.Close()
		at := rows()
		eventually(t, "more rows are written", func() bool { return rows() > at+20 })
		stopped.Store(true)
		must.Succeed(t, <-ended)
		var seen int
		if err := snap.Rows(within(t), tablesnapshot.Query{Mapping: outboxdb.Mapping, ID: "id",
			Columns: []string{"id"}}, func([][]byte) error { seen++; return nil }); err != nil {
			t.Fatal(err)
		}
		total := rows()
		if got := read(t, d.start(made.At), inserts(total-seen)); len(got.inserts) != total-seen ||
			seen < 20 || seen > total-20 {
			t.Errorf("%d rows, %d in the snapshot, %d from the slot", total, seen, len(got.inserts))
		}
	})
}
