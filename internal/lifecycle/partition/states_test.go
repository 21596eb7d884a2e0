package partition

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// TestAFenceInTheFutureStopsEverything: the database is older than its table of states, or another one.
func TestAFenceInTheFutureStopsEverything(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 2)
	w.confirm(w.Slot)
	w.Exec("UPDATE outflow_partitions SET fence = 'FFFFFF/0' WHERE name = $1", quoted("public", old(0)))
	_, err := w.try()
	if f := wantFault(t, err, outbox.Gap, "server_behind"); !strings.Contains(f.Message, old(0)) {
		t.Error(f)
	}
	if !w.exists(0) || !w.exists(1) {
		t.Error("something is gone")
	}
}

// TestAFenceOfAnotherClusterIsSetAgain: after pg_upgrade, or a dump and restore, LSNs mean something else,
// and the WAL of the new server need not have come as far.
func TestAFenceOfAnotherClusterIsSetAgain(t *testing.T) {
	t.Parallel()
	for _, fence := range []string{"0/1", "FFFFFF/0"} {
		w := newSealed(t, 1)
		w.Exec("UPDATE outflow_partitions SET system_id = '1', oid = 1, "+
			"fence = CASE WHEN fence IS NOT NULL THEN $1::text::pg_lsn END", fence)
		steps := w.apply()
		if got := of(steps, 0); got != "seal wait" {
			t.Errorf("%s: %v", got, steps)
		}
		if w.Text("SELECT (fence <> $2::text::pg_lsn AND oid = 'outbox_0'::regclass)::text FROM "+
			"outflow_partitions WHERE name = $1", quoted("public", old(0)), fence) != "true" {
			t.Error("the fence is the old one")
		}
	}
}

// TestFencesOfAPlainTableOfAnotherClusterAreSetAgain.
func TestFencesOfAPlainTableOfAnotherClusterAreSetAgain(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.mustRemove()
	w.Exec("UPDATE outflow_partitions SET fence = 'FFFFFF/0', system_id = '1', oid = 1")
	w.mustRemove()
	if n := w.Text("SELECT count(*)::text FROM outflow_partitions WHERE system_id <> '1'"); n != "2" {
		t.Errorf("%s are of this cluster: a baseline and a fence were to be set", n)
	}
}

// TestTheTableOfStatesOfSomebodyElseIsNotBelieved.
func TestTheTableOfStatesOfSomebodyElseIsNotBelieved(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	role := w.Text("SELECT quote_ident('stranger_' || current_database())")
	w.Exec("CREATE ROLE " + role)
	t.Cleanup(func() { w.Exec("DROP OWNED BY " + role); w.Exec("DROP ROLE " + role) })
	w.apply()
	w.Exec("ALTER TABLE outflow_partitions OWNER TO " + role)
	_, err := w.try()
	wantFault(t, err, outbox.Fatal, "foreign_owner")
}

// TestARunThatIsRefusedLeavesNoTableOfStates, which would be in the way when the outbox has another owner.
func TestARunThatIsRefusedLeavesNoTableOfStates(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	made := func() bool {
		return w.Text("SELECT (to_regclass('outflow_partitions') IS NOT NULL)::text") == "true"
	}
	_, err := w.try() // it is not partitioned
	wantFault(t, err, outbox.Fatal, codeKey)
	away := &outbox.Fault{Class: outbox.Gap, Code: "server_behind", Message: "m"}
	outside := w.o.Outside
	w.o.Outside = func(context.Context) (Outside, error) { return Outside{}, away }
	_, err = w.manager().Delete(outboxdb.Within(t))
	wantFault(t, err, outbox.Gap, "server_behind")
	if made() {
		t.Error("a run that was refused has made the table of states")
	}
	w.o.Outside = outside
	w.mustRemove()
	if !made() {
		t.Error("nothing was noted")
	}
}

// TestATableOfStatesThatIsMadeMeanwhileIsTheOwnersOrRefused: between the look for one and its making another
// run makes it, or a stranger, who has not committed it yet.
func TestATableOfStatesThatIsMadeMeanwhileIsTheOwnersOrRefused(t *testing.T) {
	t.Parallel()
	for _, stranger := range []bool{true, false} {
		for _, open := range []bool{false, true} {
			w := newWorld(t, pgtest.Server(t), 1)
			role := w.Text("SELECT quote_ident('stranger_' || current_database())")
			w.Exec("CREATE ROLE " + role)
			t.Cleanup(func() { w.Exec("DROP OWNED BY " + role); w.Exec("DROP ROLE " + role) })
			m, within := w.manager(), outboxdb.Within(t)
			if known, err := m.readLedger(within); len(known) > 0 || err != nil || m.hasLedger {
				t.Fatal(known, err)
			}
			tx, err := w.other().Begin(within)
			must.Succeed(t, err)
			_, err = tx.Exec(within, "CREATE TABLE outflow_partitions ("+ledgerColumns+")")
			must.Succeed(t, err)
			if stranger {
				_, err = tx.Exec(within, "ALTER TABLE outflow_partitions OWNER TO "+role)
				must.Succeed(t, err)
			}
			taken := make(chan error)
			if !open {
				must.Succeed(t, tx.Commit(within))
			}
			go func() { taken <- m.takeUp(within) }()
			if open {
				outboxdb.Eventually(t, "it waits for who makes one", func() bool {
					return w.Text("SELECT (coalesce(wait_event_type, '') = 'Lock')::text FROM "+
						"pg_stat_activity WHERE pid = $1::text::int",
						fmt.Sprint(m.conn.PgConn().PID())) == "true"
				})
				must.Succeed(t, tx.Commit(within))
			}
			if err = <-taken; stranger {
				wantFault(t, err, outbox.Fatal, "foreign_owner")
			} else if err != nil || !m.hasLedger {
				t.Errorf("that of another run is not used: %v", err)
			}
		}
	}
}

// TestAPartitionThatIsGoneIsForgottenAndNotTheNextOneOfItsName.
func TestAPartitionThatIsGoneIsForgottenAndNotTheNextOneOfItsName(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.want(0, Sealed)
	w.Exec("DROP TABLE outbox_0")
	w.Exec("CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES FROM ('2024-05-01') TO ('2024-05-02')")
	w.cfg.Slack = 1000000 * time.Hour
	w.apply()
	w.want(0, Attached)
	w.Exec("DROP TABLE outbox_0")
	w.apply()
	w.want(0, "none")
}

// TestWhoeverMakesASlotMayWriteTheStates, or is told before the slot is made.
func TestWhoeverMakesASlotMayWriteTheStates(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	check := func() error {
		m, err := Open(outboxdb.Within(t), w.target(), w.cfg, w.o)
		must.Succeed(t, err)
		defer m.Close()
		return m.CheckForget(outboxdb.Within(t))
	}
	must.Succeed(t, check()) // there are no states yet
	w.apply()
	role := w.Text("SELECT quote_ident('maker_' || current_database())")
	w.Exec("CREATE ROLE " + role)
	t.Cleanup(func() { w.Exec("DROP OWNED BY " + role); w.Exec("DROP ROLE " + role) })
	m := w.manager()
	_, err := m.conn.Exec(outboxdb.Within(t), "SET ROLE "+role)
	must.Succeed(t, err)
	wantFault(t, m.CheckForget(outboxdb.Within(t)), outbox.Fatal, "no_right")
	wantFault(t, m.Forget(outboxdb.Within(t)), outbox.Fatal, "no_right")
	w.Exec("GRANT UPDATE ON outflow_partitions TO " + role)
	must.Succeed(t, m.CheckForget(outboxdb.Within(t)))
	must.Succeed(t, m.Forget(outboxdb.Within(t)))
	// where rows have fences, a shard that is set up later needs a baseline
	w.Exec("INSERT INTO outflow_partitions (root, root_oid, name, oid, state, horizon, system_id) SELECT " +
		"root, root_oid, 'fence', root_oid, 'sealed', 1, system_id FROM outflow_partitions LIMIT 1")
	f := wantFault(t, m.CheckForget(outboxdb.Within(t)), outbox.Fatal, "no_right")
	_, grant, _ := strings.Cut(f.Hint, "or GRANT ")
	grant, _, _ = strings.Cut(grant, " TO this role")
	w.Exec("GRANT " + grant + " TO " + role)
	must.Succeed(t, m.CheckForget(outboxdb.Within(t)))
	must.Succeed(t, m.Forget(outboxdb.Within(t)))
}

// TestAFenceOfAFormerStreamShowsNothingOfANewOne: its oldest messages are removed, and the rows of a
// partition that Outflow made are older. They were in the stream that is gone, and in no message now.
func TestAFenceOfAFormerStreamShowsNothingOfANewOne(t *testing.T) {
	t.Parallel()
	for _, after := range []State{Sealed, Verified, "looked"} {
		w := newWorld(t, pgtest.Server(t), 1)
		w.insert(0, 5, true)
		w.apply()
		w.Exec("UPDATE outflow_partitions SET made = true WHERE name = $1", quoted("public", old(0)))
		w.cfg.Keep = time.Hour
		w.confirm(w.Slot)
		if after == Verified {
			w.apply()
			w.want(0, Verified)
		}
		w.cfg.Keep = 0
		clear(w.published)
		renewed := Stream{Created: w.out.Stream.Created.Add(time.Minute), LastSeq: 1000}
		w.seen = Seen{Stream: renewed, Removed: true, Oldest: time.Now()}
		if read := w.o.Published; after == "looked" { // while a run reads it
			w.o.Published = func(ctx context.Context, in Period, add func([16]byte) error) (Seen, error) {
				w.out.Stream = renewed
				return read(ctx, in, add)
			}
		} else {
			w.out.Stream = renewed
		}
		for range 2 {
			_, err := w.try()
			wantFault(t, err, outbox.Gap, codeUnpublished)
		}
		if !w.exists(0) {
			t.Errorf("after it was %s it is gone", after)
		}
	}
}

// TestAVerifiedPartitionIsComparedWithANewStreamAtOnce: a repair has made that. When retain.table.keep has
// passed, the stream's own limits may have removed what it published.
func TestAVerifiedPartitionIsComparedWithANewStreamAtOnce(t *testing.T) {
	t.Parallel()
	for _, others := range []bool{false, true} {
		w := newWorld(t, pgtest.Server(t), 1)
		w.insert(0, 5, true)
		w.apply()
		w.Exec("UPDATE outflow_partitions SET made = true WHERE name = $1", quoted("public", old(0)))
		if others {
			w.slot(w.Slot + "_other")
			w.out.Others = []string{w.Slot + "_other"}
			w.confirm(w.Slot + "_other")
		}
		w.cfg.Keep = time.Hour
		w.confirm(w.Slot)
		w.apply()
		w.want(0, Verified)
		read := len(w.reads)
		w.out.Stream = Stream{Created: w.out.Stream.Created.Add(time.Minute), LastSeq: 1000}
		w.seen = Seen{Stream: w.out.Stream}
		w.out.Repairing = "outflow repair --accept stream_recreated"
		wantWhy(t, w.apply(), 0, "has not finished")
		w.out.Repairing = ""
		for range 2 {
			w.apply()
			w.want(0, Verified)
		}
		if again := len(w.reads) - read; again != 1 {
			t.Errorf("others read the table: %v, and the stream was read %d times again", others, again)
		}
		w.cfg.Keep = 0
		clear(w.published)
		w.seen.Removed, w.seen.Oldest = true, time.Now()
		if w.apply(); w.exists(0) {
			t.Errorf("others read the table: %v, and it stays: %s", others, w.state(0))
		}
	}
}

// TestTheSlotOfARepairThatHasNotFinishedConfirmsNothing: it was made behind the fence. If somebody gives the
// repair up, by uninstall and init, nobody has read the rows.
func TestTheSlotOfARepairThatHasNotFinishedConfirmsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 5, false)
	w.apply()
	w.Exec("UPDATE outflow_partitions SET made = true WHERE name = $1", quoted("public", old(0)))
	w.seen.Removed, w.seen.Oldest = true, time.Now()
	w.out.Repairing = "outflow repair --accept slot_lost"
	w.confirm(w.Slot)
	wantWhy(t, w.apply(), 0, "has not finished")
	w.want(0, Sealed)
	w.out.Repairing = ""
	w.anew(func() {})
	for range 2 {
		w.confirm(w.Slot)
		if _, err := w.try(); !w.exists(0) {
			t.Fatalf("it is gone: %v", err)
		}
	}
	_, err := w.try()
	wantFault(t, err, outbox.Gap, codeUnpublished)
}
