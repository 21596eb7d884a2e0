package publish

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestTransactionsOfEveryShapeArePublishedExactly holds transactions that others read wrongly: those that the
// server decodes with very little memory, so that it would stream or spill them, with parts that are rolled
// back; rows that share an LSN; transactions that overlap; rows that change afterwards; other tables and
// other messages between them.
func TestTransactionsOfEveryShapeArePublishedExactly(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		o, conn, url := harness.Install(t, pg, ns.URL(), "shapes", harness.InCommitOrder...)
		name := harness.Value[string](t, conn, "SELECT current_database()")
		harness.Exec(t, conn, "ALTER DATABASE "+name+" SET logical_decoding_work_mem = '64kB'")
		o.Init()
		o.Start()
		o.AwaitReady()
		s := &shapes{t: t, conn: conn, other: harness.Connect(t, url), o: o}
		for _, shape := range []func(){s.savepoint, s.exceptionBlock, s.copy, s.overlapping, s.changedLater,
			s.otherTables} {
			shape()
		}
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, s.rows)
		s.check(ns.URL())

		// The whole once more, read by one that has to find its place in the middle of it.
		o.Kill()
		s.savepoint()
		s.exceptionBlock()
		s.copy()
		o.Start()
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, s.rows-1000)
		o.Kill()
		o.Start()
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, s.rows)
		s.check(ns.URL())
		// the statistics come later
		harness.Eventually(t, "a transaction was too large for the server's memory", func() error {
			var spilled int
			err := conn.QueryRow(t.Context(), "SELECT spill_txns FROM pg_stat_replication_slots WHERE "+
				"slot_name = $1", o.Slot).Scan(&spilled)
			if err == nil && spilled == 0 {
				err = errors.New("none: the case was not tested")
			}
			return err
		})
	})
}

// shapes writes transactions.
type shapes struct {
	t           *testing.T
	conn, other *pgx.Conn
	o           *harness.Outflow
	rows        int   // that are committed
	counter     int64 // the last
	copied      []int64
}

// insert writes n rows on a connection and returns the counter of the first one.
func (s *shapes) insert(conn *pgx.Conn, n int64) int64 {
	s.t.Helper()
	from := s.counter + 1
	s.counter += n
	harness.Exec(s.t, conn, harness.InsertNumbered, from, s.counter)
	return from
}

// savepoint rolls back a part in the middle, and parts within parts.
func (s *shapes) savepoint() {
	s.t.Helper()
	harness.Exec(s.t, s.conn, "BEGIN")
	s.insert(s.conn, 3000)
	harness.Exec(s.t, s.conn, "SAVEPOINT a")
	s.insert(s.conn, 2000)
	harness.Exec(s.t, s.conn, "ROLLBACK TO SAVEPOINT a")
	s.insert(s.conn, 1500)
	harness.Exec(s.t, s.conn, "SAVEPOINT b")
	harness.Exec(s.t, s.conn, "SAVEPOINT c")
	s.insert(s.conn, 1500)
	harness.Exec(s.t, s.conn, "RELEASE SAVEPOINT c")
	harness.Exec(s.t, s.conn, "SAVEPOINT d")
	s.insert(s.conn, 1000)
	harness.Exec(s.t, s.conn, "RELEASE SAVEPOINT d")
	harness.Exec(s.t, s.conn, "ROLLBACK TO SAVEPOINT b") // with what was released in it
	s.insert(s.conn, 1500)
	harness.Exec(s.t, s.conn, "COMMIT")
	s.rows += 6000
	harness.Exec(s.t, s.conn, "BEGIN") // and one that leaves nothing
	s.insert(s.conn, 2000)
	harness.Exec(s.t, s.conn, "ROLLBACK")
}

// exceptionBlock is a savepoint in disguise, once for each row.
func (s *shapes) exceptionBlock() {
	s.t.Helper()
	harness.Exec(s.t, s.conn, fmt.Sprintf(`DO $$ BEGIN
		FOR n IN 1 .. 3000 LOOP
			BEGIN
				INSERT INTO outbox (doc_id, actor_id, counter, payload)
				VALUES ('exception', 'a', %d + n, jsonb_build_object('n', n, 'text', repeat('y', 60)));
				IF n %% 3 = 0 THEN RAISE EXCEPTION 'no'; END IF;
			EXCEPTION WHEN raise_exception THEN NULL;
			END;
		END LOOP; END $$`, s.counter))
	s.counter += 3000
	s.rows += 2000
}

// copy writes rows that share an LSN: a COPY puts many of them into one record of the WAL.
func (s *shapes) copy() {
	s.t.Helper()
	const n = 3000
	var lines strings.Builder
	for range n {
		s.counter++
		s.copied = append(s.copied, s.counter)
		fmt.Fprintf(&lines, "copied\ta\t%d\t{}\n", s.counter)
	}
	_, err := s.conn.PgConn().CopyFrom(s.t.Context(), strings.NewReader(lines.String()),
		"COPY outbox (doc_id, actor_id, counter, payload) FROM STDIN")
	harness.Must(s.t, err)
	s.rows += n
}

// overlapping: the transaction that begins first and writes first commits last, and outflow is killed and
// confirms while it is open.
func (s *shapes) overlapping() {
	s.t.Helper()
	harness.Exec(s.t, s.other, "BEGIN")
	s.long("overlap-last")
	for i := range 20 {
		harness.Insert(s.t, s.conn, "overlap-short", int(s.counter)+i+1, "{}")
	}
	s.counter += 20
	s.rows += 20
	short := harness.WALEnd(s.t, s.conn)
	harness.Eventually(s.t, "the short ones confirmed", func() error {
		if c := s.o.ConfirmedLSN(s.conn); c < short {
			return fmt.Errorf("confirmed %v, want %v", c, short)
		}
		return nil
	})
	s.o.Kill()
	s.long("overlap-last")
	harness.Insert(s.t, s.conn, "overlap-short", int(s.counter)+1, "{}")
	s.counter++
	s.rows++
	s.o.Start()
	s.long("overlap-last")
	harness.Exec(s.t, s.other, "COMMIT")
}

// long writes a part of the long transaction.
func (s *shapes) long(doc string) {
	s.t.Helper()
	harness.Exec(s.t, s.other, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT $1, 'a', "+
		"$2::bigint + n, '{}' FROM generate_series(1, 400) n", doc, s.counter)
	s.counter += 400
	s.rows += 400
}

// changedLater: an UPDATE that leaves a large value alone carries no value for it, and is no event anyway.
func (s *shapes) changedLater() {
	s.t.Helper()
	harness.Exec(s.t, s.conn, "ALTER TABLE outbox ADD COLUMN IF NOT EXISTS published_at timestamptz")
	harness.Exec(s.t, s.conn, "ALTER TABLE outbox ALTER COLUMN payload SET STORAGE EXTERNAL")
	s.counter++
	harness.Insert(s.t, s.conn, "toasted", int(s.counter), `"`+strings.Repeat("t", 500_000)+`"`)
	s.rows++
	harness.Exec(s.t, s.conn, "UPDATE outbox SET published_at = now() WHERE doc_id = 'toasted'")
	harness.Exec(s.t, s.conn, "BEGIN")
	s.counter++
	harness.Insert(s.t, s.conn, "toasted", int(s.counter), `"`+strings.Repeat("u", 500_000)+`"`)
	s.rows++
	// of a row of the same transaction, too
	harness.Exec(s.t, s.conn, "UPDATE outbox SET published_at = now() WHERE doc_id = 'toasted'")
	harness.Exec(s.t, s.conn, "COMMIT")
}

// otherTables: one publication with several tables, changes of both in one transaction, and other programs'
// logical messages.
func (s *shapes) otherTables() {
	s.t.Helper()
	harness.Exec(s.t, s.conn, "CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, payload text)")
	harness.Exec(s.t, s.conn, "ALTER PUBLICATION "+s.o.Publication()+" ADD TABLE orders")
	for i := range 5 {
		harness.Exec(s.t, s.conn, "BEGIN")
		harness.Exec(s.t, s.conn, "INSERT INTO orders SELECT n, repeat('z', 100) FROM "+
			"generate_series($1::int * 1000, $1::int * 1000 + 999) n", i)
		harness.Exec(s.t, s.conn, "SELECT pg_logical_emit_message(true, 'somebody.else', 'x'), "+
			"pg_logical_emit_message(false, 'somebody.else', 'y')")
		s.insert(s.conn, 300)
		s.rows += 300
		harness.Exec(s.t, s.conn, "UPDATE orders SET payload = 'changed' WHERE id % 2 = 0")
		harness.Exec(s.t, s.conn, "COMMIT")
		harness.Exec(s.t, s.conn, "DELETE FROM orders")
	}
}

// check compares everything.
func (s *shapes) check(natsURL string) {
	s.t.Helper()
	all := s.o.MustBeExact(s.conn, natsURL)
	if len(all) != s.rows {
		s.t.Errorf("%d messages, want %d", len(all), s.rows)
	}
	keys := map[string]bool{}
	for _, c := range s.copied {
		keys[fmt.Sprintf("a:%020d", c)] = true
	}
	var last, overlap oracle.LSN
	for _, m := range all {
		doc := strings.TrimPrefix(m.Subject, "outbox.")
		switch {
		case doc == "overlap-short":
			last = m.Outflow.Pos.LSN
		case doc == "overlap-last":
			overlap = m.Outflow.Pos.LSN
		case doc == "copied" && !keys[m.Outflow.Key]:
			s.t.Errorf("a copied row with key %s", m.Outflow.Key)
		}
	}
	if overlap <= last {
		s.t.Errorf("the transaction that committed last is at %v, the others end at %v", overlap, last)
	}
}

// TestBusyNeighboursOfASilentTablePileUpNoWAL: the outbox is silent while other tables are written to. WAL
// must not pile up for a slot that has nothing to publish, and nobody has to set up a heartbeat for that.
func TestBusyNeighboursOfASilentTablePileUpNoWAL(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		o, conn, _ := harness.Install(t, pg, ns.URL(), "idle")
		o.Init()
		o.Start()
		o.AwaitReady()
		harness.Insert(t, conn, "doc", 1, "{}")
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
		harness.Exec(t, conn, "CREATE TABLE neighbours (id bigint, payload text)")
		for i := range 3 {
			harness.Exec(t, conn, "INSERT INTO neighbours SELECT n, repeat('n', 200) FROM "+
				"generate_series(1, 20000) n")
			end := harness.WALEnd(t, conn)
			harness.Eventually(t, fmt.Sprintf("round %d: what the neighbours wrote is confirmed", i),
				func() error {
					if c := o.ConfirmedLSN(conn); c < end {
						return fmt.Errorf("confirmed %v, want %v", c, end)
					}
					return nil
				})
		}
		o.Kill() // a checkpoint that was made by nothing but the neighbours
		harness.Insert(t, conn, "doc", 2, "{}")
		o.Start()
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 2)
		o.MustBeComplete(conn, ns.URL())
	})
}
