package partition

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// TestWhatAPartitionWaitsForBeforeItIsDetached: the range, the slack behind it, inserts, and how much is to
// go.
func TestWhatAPartitionWaitsForBeforeItIsDetached(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 3)
	for i := range 3 {
		w.insert(i, 1000, true)
	}
	w.Exec("ANALYZE outbox")
	w.flushed(0, 1000)
	w.flushed(2, 1000)
	w.cfg.Slack = 1000000 * time.Hour
	wantWhy(t, w.apply(), 0, "retain.table.slack")
	w.cfg.Slack = time.Hour
	wantWhy(t, w.apply(), 0, "rows were written", "retain.table.slack")
	// the clock was ahead
	w.Exec("UPDATE outflow_partitions SET quiet_since = quiet_since + interval '1 year'")
	wantWhy(t, w.apply(), 0, "rows were written", time.Now().UTC().Format("2006-01-02 "))
	w.Exec("UPDATE outflow_partitions SET quiet_since = quiet_since - interval '2 h'")
	w.insert(1, 1, true)
	w.flushed(1, 1001)
	w.cfg.Rows = 2500
	steps := w.apply()
	if got := of(steps, 0); !strings.HasPrefix(got, "detach seal") {
		t.Errorf("the oldest: %s", got)
	}
	wantWhy(t, steps, 1, "within retain.table")
	wantWhy(t, steps, 2, "within retain.table")
	w.cfg.Rows = 0
	steps = w.apply()
	wantWhy(t, steps, 1, "rows were written") // the insert above
	if got := of(steps, 2); !strings.HasPrefix(got, "detach seal") {
		t.Errorf("the third: %s", got)
	}
}

// flushed waits until the statistics say that so many rows were inserted.
func (w *world) flushed(i, rows int) {
	w.T.Helper()
	outboxdb.Eventually(w.T, "the statistics know the rows", func() bool {
		return w.Text("SELECT n_tup_ins::text FROM pg_stat_user_tables WHERE relname = "+
			"$1", old(i)) == fmt.Sprint(rows)
	})
}

// TestADefaultPartitionIsKeptAndDetachesTheOthersPlainly: CONCURRENTLY is refused beside it.
func TestADefaultPartitionIsKeptAndDetachesTheOthersPlainly(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		w := newWorld(t, srv, 1)
		w.Exec("CREATE TABLE rest PARTITION OF outbox DEFAULT")
		w.insert(0, 5, true)
		w.cfg.Slack = time.Hour
		w.apply()
		w.cfg.Slack = 0
		planned := w.plan()
		wantWhy(t, planned, 0, "not CONCURRENTLY")
		if of(planned, 0) != "detach" {
			t.Errorf("planned: %v", planned)
		}
		// a writer is in the way at first
		tx, err := w.other().Begin(outboxdb.Within(t))
		must.Succeed(t, err)
		_, err = tx.Exec(outboxdb.Within(t), "SELECT FROM outbox LIMIT 1")
		must.Succeed(t, err)
		wantWhy(t, w.apply(), 0, "open transactions hold it", "server process")
		must.Succeed(t, tx.Rollback(outboxdb.Within(t)))
		w.apply()
		w.want(0, Sealed)
		w.confirm(w.Slot)
		w.apply()
		if w.exists(0) || w.Text("SELECT count(*)::text FROM rest") != "0" {
			t.Errorf("it is %s", w.state(0))
		}
	})
}

// other is a further connection.
func (w *world) other() *pgx.Conn {
	w.T.Helper()
	conn, err := pgx.Connect(outboxdb.Within(w.T), w.URL)
	must.Succeed(w.T, err)
	w.T.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// TestAnOpenWriterIsWaitedFor: a transaction that wrote to the partition is open, or prepared, when it is to
// be detached: that does not begin, for the next insert would fail. Or it writes when the DETACH has just
// begun. The fence lies behind its commit, and its row is verified.
func TestAnOpenWriterIsWaitedFor(t *testing.T) {
	t.Parallel()
	for n := range 4 {
		prepared, late := n%2 == 1, n >= 2
		t.Run(fmt.Sprintf("prepared=%v late=%v", prepared, late), func(t *testing.T) {
			t.Parallel()
			for _, major := range pgtest.Majors(t) {
				srv := pgtest.Own(t, major, "max_prepared_transactions=5", "wal_level=logical")
				w := newWorld(t, srv, 1)
				w.insert(0, 5, true)
				const id = "11111111-1111-4111-8111-111111111111"
				writer := w.other()
				run := func(sql string) {
					t.Helper()
					_, err := writer.Exec(outboxdb.Within(t), sql)
					must.Succeed(t, err)
				}
				write := func() {
					run("BEGIN")
					run("INSERT INTO outbox (id, doc_id, actor_id, counter, payload, created_at) VALUES ('" +
						id + "', 'd', 'a', 1, '{}', '2024-05-01 01:00:00Z')")
					if prepared {
						run("PREPARE TRANSACTION 'late'")
					}
				}
				who, state, does := "server process", Attached, "detach"
				if prepared {
					who = "prepared transaction 'late'"
				}
				if late {
					state, does = Detaching, "finalize"
					w.o.Hit = func(point string) {
						if point == "partition.detaching" {
							write()
							w.o.Hit = nil
						}
					}
				} else {
					write()
				}
				wantWhy(t, w.apply(), 0, who)
				w.want(0, state)
				if w.Text("SELECT inhdetachpending::text FROM pg_inherits WHERE inhrelid = "+
					"$1::regclass", old(0)) != fmt.Sprint(late) {
					t.Fatalf("the DETACH is pending, or not: %v is expected", late)
				}
				if got := of(w.plan(), 0); got != does {
					t.Errorf("planned: %s", got)
				}
				if prepared {
					run("COMMIT PREPARED 'late'")
				} else {
					run("COMMIT")
				}
				committed := w.Text("SELECT pg_current_wal_insert_lsn()::text")
				steps := w.apply()
				if got := of(steps, 0); got != does+" seal wait" {
					t.Errorf("then: %s: %v", got, steps)
				}
				if w.Text("SELECT (fence >= $1::text::pg_lsn)::text FROM outflow_partitions WHERE state = "+
					"'sealed'",
					committed) != "true" {
					t.Error("the fence lies before the commit")
				}
				w.confirm(w.Slot)
				_, err := w.try() // its row is in no message yet
				wantFault(t, err, outbox.Gap, codeUnpublished)
				w.published[id] = true
				w.apply()
				if w.exists(0) {
					t.Errorf("it is %s", w.state(0))
				}
			}
		})
	}
}

// TestADetachDoesNotWaitForWhoComesLater: of two writers that update rows by id, which locks all partitions,
// one has always a transaction open.
func TestADetachDoesNotWaitForWhoComesLater(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.insert(0, 5, true)
	w.insert(1, 5, true)
	stop, ended := make(chan struct{}), make(chan error, 1)
	writers := []*pgx.Conn{w.other(), w.other()}
	within := outboxdb.Within(t)
	begin := func(c *pgx.Conn) error {
		_, err := c.Exec(within, "BEGIN; UPDATE outbox SET counter = 0 WHERE id = gen_random_uuid()")
		return err
	}
	must.Succeed(t, begin(writers[0]))
	go func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			err := begin(writers[(n+1)%2])
			if err == nil {
				_, err = writers[n%2].Exec(within, "COMMIT")
			}
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	outboxdb.Eventually(t, "both are detached", func() bool {
		w.apply()
		return w.state(0) == string(Sealed) && w.state(1) == string(Sealed)
	})
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestRowsThatAreWrittenWhileADetachWaitsAreNotTakenForPublished: PostgreSQL 16 and later never sends them.
// Outflow has made the partition, and the stream's oldest messages are gone; or there is no id column.
func TestRowsThatAreWrittenWhileADetachWaitsAreNotTakenForPublished(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"id", ""} {
		pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
			t.Parallel()
			w := newWorld(t, srv, 1)
			w.cfg.ID = id
			w.insert(0, 5, true)
			w.cfg.Slack = 1000000 * time.Hour
			w.apply()
			w.Exec("UPDATE outflow_partitions SET made = true")
			w.seen.Removed, w.seen.Oldest = true, time.Now()
			w.cfg.Slack = 0
			within := outboxdb.Within(t)
			writer, err := w.other().BeginTx(within, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
			must.Succeed(t, err)
			_, err = writer.Exec(within, "SELECT FROM outbox LIMIT 1")
			must.Succeed(t, err)
			wantWhy(t, w.apply(), 0, "open transactions hold it")
			_, err = writer.Exec(within, `INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at)
				VALUES ('d', 'a', 6, '{}', '2024-05-01 01:00:00Z')`)
			must.Succeed(t, err)
			must.Succeed(t, writer.Commit(within))
			w.apply()
			w.confirm(w.Slot)
			for range 2 {
				_, err = w.try()
				wantFault(t, err, outbox.Gap, codeUnpublished)
			}
			if w.Text("SELECT count(*)::text FROM outbox_0") != "6" {
				t.Error("a row is gone")
			}
		})
	}
}

// TestWhatIsAttachedAgainMayHaveOtherRows: it is detached, written to and attached again between two runs, or
// while it is just to be detached.
func TestWhatIsAttachedAgainMayHaveOtherRows(t *testing.T) {
	t.Parallel()
	for _, state := range []State{Ahead, Attached, Detaching} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, pgtest.Server(t), 0)
			w.cfg.Every, w.cfg.Ahead = time.Hour, 1
			w.apply() // makes partitions
			name := w.Text("SELECT name FROM outflow_partitions WHERE made ORDER BY lower LIMIT 1")
			w.Exec("UPDATE outflow_partitions SET state = $1 WHERE name = $2", string(state), name)
			bound := w.Text("SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = $1::regclass",
				name)
			w.Exec("ALTER TABLE outbox DETACH PARTITION " + name)
			w.Exec("INSERT INTO " + name + ` (doc_id, actor_id, counter, payload, created_at) SELECT 'd', 'a', 1,
				'{}', lower FROM outflow_partitions WHERE name = '` + name + "'")
			w.Exec("ALTER TABLE outbox ATTACH PARTITION " + name + " " + bound)
			w.apply()
			if w.Text("SELECT made::text FROM outflow_partitions WHERE name = $1", name) != "false" {
				t.Error("its rows still count as written to the outbox")
			}
			w.apply()
			if w.Text("SELECT count(*)::text FROM outflow_partitions WHERE made") == "0" {
				t.Error("the others count as attached again, too")
			}
		})
	}
}

// TestAnOlderTableOfStatesGetsItsColumns: by apply. Who only reads it goes without them.
func TestAnOlderTableOfStatesGetsItsColumns(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.cfg.Slack = 1000000 * time.Hour
	w.apply()
	w.Exec("ALTER TABLE outflow_partitions DROP COLUMN attach_xid, DROP COLUMN detach_xmin")
	w.plan()
	w.apply()
	if got := w.Text("SELECT count(attach_xid)::text FROM outflow_partitions WHERE NOT made"); got != "1" {
		t.Errorf("of %s partitions that somebody made it is noted who attached them", got)
	}
}

// TestWhatSomebodyElseDetachedIsTheirs, and what they attach again begins anew.
func TestWhatSomebodyElseDetachedIsTheirs(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.insert(0, 5, true)
	w.cfg.Slack = 1000000 * time.Hour
	w.apply()
	w.Exec("ALTER TABLE outbox DETACH PARTITION outbox_0")
	w.Exec("DROP TABLE outbox_1")
	w.cfg.Slack = 0
	wantWhy(t, w.apply(), 0, "somebody else detached it")
	w.want(0, Kept)
	if got := w.state(1); got != "none" {
		t.Errorf("the one that was dropped is %s", got)
	}
	w.confirm(w.Slot)
	w.apply()
	if !w.exists(0) {
		t.Fatal("it was dropped")
	}
	w.Exec("ALTER TABLE outbox ATTACH PARTITION outbox_0 FOR VALUES FROM ('2024-05-01') TO ('2024-05-02')")
	w.apply()
	w.want(0, Sealed)
}

// TestADetachThatWasCutIsFinalized: the session ends while DETACH waits for an open writer.
func TestADetachThatWasCutIsFinalized(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		w := newWorld(t, srv, 1)
		w.insert(0, 5, true)
		// what is counted later would be watched for more
		outboxdb.Eventually(t, "PostgreSQL counts the rows", func() bool {
			return w.Text("SELECT pg_stat_get_tuples_inserted('outbox_0'::regclass)::text") == "5"
		})
		within := outboxdb.Within(t)
		tx, err := w.other().Begin(within)
		must.Succeed(t, err)
		_, err = tx.Exec(within, "SELECT FROM outbox LIMIT 1")
		must.Succeed(t, err)
		w.cfg.LockTimeout = time.Hour
		m := w.manager()
		ended := make(chan error, 1)
		go func() {
			_, err := m.Apply(context.Background())
			ended <- err
		}()
		w.detachWaits()
		w.terminate(fmt.Sprint(m.conn.PgConn().PID()))
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "detach partition") ||
			!strings.Contains(err.Error(), "administrator command") {
			t.Errorf("it does not say what ended it: %v", err)
		}
		must.Succeed(t, tx.Rollback(within))
		w.cfg.LockTimeout = 0
		if got := of(w.apply(), 0); got != "finalize seal wait" {
			t.Errorf("then: %s", got)
		}
	})
}

// TestADetachThatSomebodyFinalizesIsStillOutflows, while Outflow waits for the same reader.
func TestADetachThatSomebodyFinalizesIsStillOutflows(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		w := newWorld(t, srv, 1)
		w.insert(0, 5, true)
		outboxdb.Eventually(t, "PostgreSQL counts the rows", func() bool {
			return w.Text("SELECT pg_stat_get_tuples_inserted('outbox_0'::regclass)::text") == "5"
		})
		within := outboxdb.Within(t)
		tx, err := w.other().Begin(within)
		must.Succeed(t, err)
		_, err = tx.Exec(within, "SELECT FROM outbox LIMIT 1")
		must.Succeed(t, err)
		w.cfg.LockTimeout = time.Hour
		m := w.manager()
		ended, finalized := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := m.Apply(context.Background())
			ended <- err
		}()
		w.detachWaits()
		person := w.other()
		go func() {
			_, err := person.Exec(context.Background(),
				"ALTER TABLE outbox DETACH PARTITION outbox_0 FINALIZE")
			finalized <- err
		}()
		outboxdb.Eventually(t, "FINALIZE waits", func() bool {
			return w.Text("SELECT (count(*) > 0)::text FROM pg_locks WHERE NOT granted AND "+
				"pid = $1::text::int", fmt.Sprint(person.PgConn().PID())) == "true"
		})
		must.Succeed(t, tx.Rollback(within))
		must.Succeed(t, <-finalized)
		must.Succeed(t, <-ended)
		w.want(0, Sealed)
		w.confirm(w.Slot)
		if w.apply(); w.exists(0) {
			t.Errorf("it stays: %s", w.state(0))
		}
	})
}

// TestSomebodyElsesDetachIsLeftAlone: a person detaches a partition that Outflow is to keep, maybe one that
// is partitioned itself. While that waits for a reader, Outflow does not end it, and the table is not its to
// drop afterwards.
func TestSomebodyElsesDetachIsLeftAlone(t *testing.T) {
	t.Parallel()
	for _, parted := range []bool{false, true} {
		t.Run(fmt.Sprintf("parted=%v", parted), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
			if parted {
				w.Exec("DROP TABLE outbox_0")
				w.Exec("CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES FROM ('2024-05-01') TO " +
					"('2024-05-02') PARTITION BY HASH (id)")
				w.Exec("CREATE TABLE part_0 PARTITION OF outbox_0 FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
			}
			w.insert(0, 6, !parted)
			w.cfg.Age = 100 * 365 * 24 * time.Hour // everything is to stay
			w.apply()
			within := outboxdb.Within(t)
			reader, err := w.other().Begin(within)
			must.Succeed(t, err)
			_, err = reader.Exec(within, "SELECT FROM outbox LIMIT 1")
			must.Succeed(t, err)
			person := w.other()
			ended := make(chan error, 1)
			go func() {
				_, err := person.Exec(within, "ALTER TABLE outbox DETACH PARTITION outbox_0 CONCURRENTLY")
				ended <- err
			}()
			w.detachWaits()
			wantWhy(t, w.apply(), 0, "somebody else detaches it")
			must.Succeed(t, reader.Rollback(within))
			if err := <-ended; err != nil {
				t.Error(err)
			}
			for range 4 {
				w.confirm(w.Slot)
				w.apply()
			}
			if !w.exists(0) {
				t.Error("it was dropped")
			}
		})
	}
}

// detachWaits waits until a DETACH waits for others.
func (w *world) detachWaits() {
	w.T.Helper()
	outboxdb.Eventually(w.T, "the DETACH is pending", func() bool {
		return w.Text("SELECT count(*)::text FROM pg_inherits WHERE inhdetachpending") == "1"
	})
}

// TestALongTransactionElsewhereMakesNoRowsLate: a transaction that is open since before a partition's last
// rows, in another table, is no reason to miss messages that the stream's limits took.
func TestALongTransactionElsewhereMakesNoRowsLate(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"id", ""} {
		w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
		w.cfg.ID = id
		w.cfg.Slack = 1000000 * time.Hour
		w.apply()
		w.Exec("UPDATE outflow_partitions SET made = true WHERE name = $1", quoted("public", old(0)))
		w.cfg.Slack = 0
		w.Exec("CREATE TABLE elsewhere (n int)")
		within := outboxdb.Within(t)
		long, err := w.other().Begin(within)
		must.Succeed(t, err)
		_, err = long.Exec(within, "INSERT INTO elsewhere VALUES (1)")
		must.Succeed(t, err)
		w.insert(0, 5, true)
		clear(w.published) // by the stream's limits, long after the slot had confirmed them
		w.seen.Removed, w.seen.Oldest = true, time.Now()
		for range 4 {
			w.confirm(w.Slot)
			_, err := w.try()
			if err != nil {
				t.Errorf("id %q: %v", id, err)
				break
			}
		}
		must.Succeed(t, long.Rollback(within))
		for range 4 {
			w.confirm(w.Slot)
			_, _ = w.try()
		}
		if w.exists(0) {
			t.Errorf("id %q: the partition does not go: %s", id, why(w.plan(), 0))
		}
	}
}

// TestLateRowsOfOtherShardsStay: rows that come while a DETACH waits are in no stream, of whatever shard they
// are. Where an earlier build began it, nobody knows which came then.
func TestLateRowsOfOtherShardsStay(t *testing.T) {
	t.Parallel()
	for _, noted := range []bool{true, false} {
		w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
		w.cfg.Own = "counter % 2 = 0"
		within := outboxdb.Within(t)
		writer, err := w.other().BeginTx(within, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		must.Succeed(t, err)
		_, err = writer.Exec(within, "SELECT FROM outbox LIMIT 1")
		must.Succeed(t, err)
		wantWhy(t, w.apply(), 0, "open transactions hold it")
		if !noted {
			w.Exec("UPDATE outflow_partitions SET detach_xmin = NULL")
		}
		_, err = writer.Exec(within, `INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at)
			VALUES ('d', 'a', 7, '{}', '2024-05-01 01:00:00Z')`)
		must.Succeed(t, err)
		must.Succeed(t, writer.Commit(within))
		for err == nil && w.exists(0) { // it may have to wait for a lock
			_, err = w.try()
			w.confirm(w.Slot)
		}
		if !w.exists(0) {
			t.Fatalf("noted %v: a row of another shard, which no slot was sent, is gone", noted)
		}
		wantFault(t, err, outbox.Gap, codeUnpublished)
		w.o.AcceptUnpublished = 1
		for w.exists(0) {
			w.apply()
		}
	}
}

// TestWhoDetachesAPartitionThatCouldNotBeDetachedKeepsIt: a run did not get its lock, or PostgreSQL refused
// it, and somebody else detaches the partition before the next one.
func TestWhoDetachesAPartitionThatCouldNotBeDetachedKeepsIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 5, true)
	w.Exec("CREATE TABLE refers (id uuid, at timestamptz, FOREIGN KEY (id, at) REFERENCES outbox)")
	w.Exec("INSERT INTO refers SELECT id, created_at FROM outbox LIMIT 1")
	_, err := w.try()
	wantFault(t, err, outbox.Fatal, codeNeeded)
	w.Exec("DROP TABLE refers")
	w.Exec("ALTER TABLE outbox DETACH PARTITION outbox_0")
	w.apply()
	w.want(0, Kept)

	w = newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 5, true)
	w.cfg.Slack = 1000000 * time.Hour
	w.apply()
	w.cfg.Slack = 0
	tx, err := w.other().Begin(outboxdb.Within(t))
	must.Succeed(t, err)
	// as VACUUM does
	_, err = tx.Exec(outboxdb.Within(t), "LOCK TABLE outbox_0 IN SHARE UPDATE EXCLUSIVE MODE")
	must.Succeed(t, err)
	wantWhy(t, w.apply(), 0, "open transactions hold it")
	must.Succeed(t, tx.Rollback(outboxdb.Within(t)))
	w.Exec("ALTER TABLE outbox DETACH PARTITION outbox_0")
	for range 2 {
		w.apply()
		w.confirm(w.Slot)
	}
	if !w.exists(0) {
		t.Error("a partition that somebody else detached is gone")
	}
	w.want(0, Kept)
}

// TestWhatWasWrittenSinceATransactionIsFound, from the first one on, however long ago or far ahead that is.
func TestWhatWasWrittenSinceATransactionIsFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 3, true)
	id, err := strconv.ParseInt(w.Text("SELECT max(xmin::text::bigint) FROM outbox"), 10, 64)
	must.Succeed(t, err)
	for range 20 { // the rows are older than some that are asked for
		w.Exec("SELECT pg_current_xact_id()")
	}
	m := w.manager()
	for since, want := range map[int64]bool{
		id - 1<<32 - 5: true, id - 1<<32 + 5: true,
		id - 1<<31 - 5: true, id - 1<<31 + 5: true, 1: true, id - 1: true, id: true,
		id + 1: false, id + 5: false, id + 1<<31 - 5: false, id + 1<<31 + 5: false,
	} {
		got, err := m.written(outboxdb.Within(t), w.Conn, &Partition{Name: "outbox_0", DetachXmin: since})
		must.Succeed(t, err)
		if got != want {
			t.Errorf("since %d: %v, and rows are of %d", since, got, id)
		}
	}
}
