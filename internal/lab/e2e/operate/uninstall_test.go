package operate

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/replication/postgres"
)

// footprint lists everything that is in the database and in JetStream beside what every one has.
func footprint(t *testing.T, f *harness.Installation) (all []string) {
	t.Helper()
	all = harness.Value[[]string](t, f.Conn, `SELECT array_agg(x ORDER BY x) FROM (
		SELECT 'slot ' || slot_name FROM pg_replication_slots WHERE database = current_database()
		UNION ALL SELECT 'publication ' || pubname FROM pg_publication
		UNION ALL SELECT 'schema ' || nspname FROM pg_namespace
		UNION ALL SELECT 'relation ' || oid::regclass FROM pg_class WHERE relnamespace <> 'pg_toast'::regnamespace
		UNION ALL SELECT 'function ' || oid::regprocedure FROM pg_proc
		UNION ALL SELECT 'role ' || rolname FROM pg_roles WHERE rolname LIKE 'outflow%') x(x)`)
	names := f.JS.StreamNames(t.Context())
	for name := range names.Name() {
		if strings.HasSuffix(name, f.Stream) {
			all = append(all, "stream "+name)
		}
	}
	harness.Must(t, names.Err())
	return all
}

// left is what is there now and was not before.
func left(t *testing.T, f *harness.Installation, before []string) []string {
	t.Helper()
	return slices.DeleteFunc(footprint(t, f), func(s string) bool { return slices.Contains(before, s) })
}

// TestUninstallRemovesWhatInitHasMade: whatever init makes, a part that is made anew among them, uninstall
// removes; what stays is data. Then init makes it again.
func TestUninstallRemovesWhatInitHasMade(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "gone",
		"SINK_DURABLE_AFTER=0s")
	before := footprint(t, f)
	f.MustRun("init", "--sql-api")
	installed := footprint(t, f)
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	f.AwaitReady()
	f.MustFail(3, []string{"uninstall", "--yes"}, "slot_held",
		"slot "+f.Slot+" is held by outflow/"+f.Slot+"/")
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)

	out := f.MustRun("uninstall", "--with-stream", "--sql-api")
	f.MustContain("outflow uninstall", out, "slot "+f.Slot+": would be removed",
		"publication "+f.Slot+": would be removed", "stream "+f.Stream+": would be removed (with 1 message)",
		"function outflow.enqueue: would be removed", "table public.outbox: stays",
		"To do it: `outflow uninstall --with-stream --sql-api --yes")
	if now := footprint(t, f); !slices.Equal(now, installed) {
		t.Errorf("without --yes something was changed: %v, %v", installed, now)
	}
	var report struct {
		Done  bool
		Parts []struct{ Part, Action string }
	}
	doc := f.MustRun("uninstall", "--with-stream", "--sql-api", "--yes", "--json")
	harness.Must(t, json.Unmarshal([]byte(doc), &report))
	if !report.Done || report.Parts[0].Part != "function" || report.Parts[0].Action != "remove" {
		t.Errorf("%+v", report)
	}
	for _, s := range left(t, f, before) {
		if !strings.HasPrefix(s, "relation outbox") && !strings.HasPrefix(s, "relation outflow_counter") {
			t.Errorf("%s is left", s)
		}
	}
	if n := harness.Value[int](t, f.Conn, "SELECT count(*)::int FROM outbox"); n != 1 {
		t.Errorf("the table has %d rows, want 1", n)
	}
	f.MustContain("the second time", f.MustRun("uninstall", "--with-stream", "--sql-api", "--yes"),
		"There is nothing to remove")

	f.MustRun("init", "--sql-api")
	if now := footprint(t, f); !slices.Equal(now, installed) {
		t.Errorf("init did not make again what it had made: %v, %v", installed, now)
	}
	f.Start()
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
}

// subjects are those that the stream takes messages from.
func subjects(t *testing.T, f *harness.Installation) []string {
	t.Helper()
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	return s.CachedInfo().Config.Subjects
}

// TestUninstallNamesTheTablesOfStatesOfAMovedOutbox: that of the former schema as well, while it has rows of
// the outbox and when these have been taken along; and not that of another outbox.
func TestUninstallNamesTheTablesOfStatesOfAMovedOutbox(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "moved",
		"RETAIN_TABLE_METHOD=delete", "SINK_DURABLE_AFTER=0s")
	f.Init()
	f.Drain() // the record has a checkpoint then
	f.MustRun("partition", "apply")
	harness.Exec(t, f.Conn, "CREATE SCHEMA others; CREATE TABLE others.outflow_partitions (LIKE "+
		"outflow_partitions); INSERT INTO others.outflow_partitions SELECT * FROM outflow_partitions; "+
		"UPDATE others.outflow_partitions SET root = 'others.outbox', root_oid = 'pg_class'::regclass")
	harness.Exec(t, f.Conn, "CREATE SCHEMA notes; ALTER TABLE outbox SET SCHEMA notes")
	f.Set("TABLE=notes.outbox")
	f.Init()
	const former = `"public"."outflow_partitions"`
	f.MustContain("before a run", f.MustRun("uninstall"), "table of states "+former+": stays (")
	f.MustRun("partition", "apply")
	f.MustContain("then", f.MustRun("uninstall"), `table of states "notes"."outflow_partitions", `+former+
		": stays (", former+" is empty: it may be another outbox's")
}

// TestUninstallDoesNotWaitForALock of a table that it only names.
func TestUninstallDoesNotWaitForALock(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "movedlocked",
		"RETAIN_TABLE_METHOD=delete", "SINK_DURABLE_AFTER=0s")
	f.Init()
	f.Drain()
	f.MustRun("partition", "apply")
	harness.Exec(t, f.Conn, "CREATE SCHEMA notes; ALTER TABLE outbox SET SCHEMA notes")
	f.Set("TABLE=notes.outbox")
	f.Init()
	harness.Exec(t, f.Conn, "BEGIN; LOCK TABLE public.outflow_partitions")
	f.MustContain("while it is locked", f.MustRun("uninstall"), `"public"."outflow_partitions": stays (`,
		`"public"."outflow_partitions" is locked and was not read: it may be another outbox's`)
	harness.Exec(t, f.Conn, "ROLLBACK")
}

// TestInitGoesOnBehindAStreamThatUninstallHasLeft: the stream stays, and what is written after the next init
// follows what it has. What was written between is said not to.
func TestInitGoesOnBehindAStreamThatUninstallHasLeft(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "kept", "SINK_DURABLE_AFTER=1h")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 2)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.MustFail(3, []string{"uninstall", "--yes"}, "uninstall_unpublished", "2 messages", "sink.durable_after",
		"outflow drain")
	f.Set("SINK_DURABLE_AFTER=0s")
	f.Drain()
	ingress := subjects(t, f)
	f.MustContain("outflow uninstall", f.MustRun("uninstall"), "init goes on behind sequence 2",
		"stream "+f.Stream+": stays (it has 2 messages")
	f.MustRun("uninstall", "--yes")
	if now := subjects(t, f); slices.Equal(now, ingress) {
		t.Errorf("an outflow that was asleep can still publish to %v", now)
	}
	f.MustFail(3, []string{"init", "--snapshot"}, "outflow uninstall has removed slot", "outflow init")
	f.MustContain("the second time", f.MustRun("uninstall", "--yes"), "There is nothing to remove")
	f.MustFail(3, []string{"run"}, "outflow uninstall has removed slot "+f.Slot, "outflow init")
	harness.Insert(t, f.Conn, "doc", 3, "{}")
	f.MustContain("outflow init", f.MustRun("init"), "has 3 rows", "behind sequence 2 of the stream")
	f.Start()
	harness.Insert(t, f.Conn, "doc", 4, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 3)
	all := harness.Messages(t, f.JS, f.Stream)
	if got := all[2]; got.Seq != 3 || !strings.Contains(string(got.Data), "{}") {
		t.Errorf("behind the old messages is %+v", got)
	}
	f.AwaitReady()
	f.MustStop(t)
	f.Start() // once more, from the record that a run has written
	harness.Insert(t, f.Conn, "doc", 5, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 4)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.MustRun("uninstall", "--with-stream", "--yes")
}

// TestUninstallRefusesWhatNobodyHasRead: each with its code and the way out, and nothing is changed.
func TestUninstallRefusesWhatNobodyHasRead(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "unread", "SINK_DURABLE_AFTER=0s")
	f.Init()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	installed := footprint(t, f)
	refused := func(code string, args []string, says ...string) {
		t.Helper()
		f.MustFail(3, append([]string{"uninstall", "--yes"}, args...), append(says, code)...)
		if now := footprint(t, f); !slices.Equal(now, installed) {
			t.Errorf("refused, and changed all the same: %v, %v", installed, now)
		}
	}
	refused("uninstall_unpublished", nil, "1 event in slot "+f.Slot+" is not published", "outflow drain",
		"--accept uninstall_unpublished")
	f.MustFail(2, []string{"uninstall", "--accept", "slot_held"}, "uninstall_unpublished")
	f.Drain()
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	harness.Exec(t, f.Conn, "BEGIN")
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	refused("uninstall_unpublished", nil, "server process", "may not be committed yet")
	harness.Exec(t, f.Conn, "ROLLBACK")

	// a role that may drop the slot and not the publication
	refused("no_right", []string{"--postgres.url", role(t, f, "REPLICATION")}, "may not drop publication")

	js, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	_, err = js.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "search"})
	harness.Must(t, err)
	stream := []string{"--with-stream"}
	refused("uninstall_unread", stream, "1 consumer has not read all", "search (1 message)")
	harness.Must(t, js.DeleteConsumer(t.Context(), "search"))

	harness.Exec(t, f.Conn, `CREATE TABLE outflow_consumer (name text, stream text)`)
	harness.Exec(t, f.Conn, `CREATE TABLE outflow_parked (name text)`)
	harness.Exec(t, f.Conn, `INSERT INTO outflow_consumer VALUES ('billing', $1), ('other', 'OTHER')`,
		f.Stream)
	harness.Exec(t, f.Conn, `INSERT INTO outflow_parked VALUES ('billing'), ('other')`)
	installed = footprint(t, f)
	refused("uninstall_unread", stream, "1 event of stream "+f.Stream+" is parked", "outflow parked retry")
	harness.Exec(t, f.Conn, `DELETE FROM outflow_parked`)

	harness.EditRecord(t, f, func(record map[string]any) { record["system_id"] = "1" })
	refused("uninstall_server", nil, "of server 1", "postgres.url")
	f.DeleteRecord(t)
	refused("uninstall_unknown", nil, "nothing shows that the slot is Outflow's")
	f.MustRun("uninstall", "--yes", "--with-stream", "--accept", "uninstall_unknown")
}

// TestNobodyWritesBetweenTheCheckAndTheDropOfTheSlot: what is committed then would be in no message. It is
// stopped before it drops the slot, and goes on when an insert has been refused.
func TestNobodyWritesBetweenTheCheckAndTheDropOfTheSlot(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "locked", "SINK_DURABLE_AFTER=0s")
	f.Init()
	var log harness.Log
	env := append(slices.Clone(f.Env), "OUTFLOW_FAILPOINT=stop.uninstall.slot:1")
	cmd := exec.Command(harness.Program(env), "uninstall", "--yes", "--with-stream")
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &log, &log
	p, err := process.Start(cmd, syscall.SIGKILL)
	harness.Must(t, err)
	harness.Eventually(t, "it is stopped", func() error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
		if err == nil && !strings.Contains(string(stat), ") T ") {
			err = errors.New("it runs")
		}
		return err
	}, p)
	_, err = f.Conn.Exec(t.Context(), `SET lock_timeout = '100ms'`)
	harness.Must(t, err)
	_, err = f.Conn.Exec(t.Context(), `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		VALUES ('doc', 'ann', 1, '{}')`)
	if postgres.SQLState(err) != postgres.StateLockNotAvailable {
		t.Errorf("an insert before the slot is dropped: %v", err)
	}
	harness.Must(t, p.Resume())
	if err := p.Wait(); err != nil {
		t.Errorf("%v\n%s", err, log.String())
	}
	harness.Insert(t, f.Conn, "doc", 1, "{}") // the lock is gone

	f.Init()
	harness.Exec(t, f.Conn, "BEGIN; LOCK TABLE outbox IN SHARE UPDATE EXCLUSIVE MODE")
	f.MustFail(
		3,
		[]string{"uninstall", "--yes"},
		"uninstall_unpublished",
		"could not be locked against writing",
	)
	harness.Exec(t, f.Conn, "ROLLBACK")
}

// TestUninstallRemovesWhatOneSideHasWhenTheOtherIsGone: the other side must not answer, and what can't be
// told any more has to be accepted.
func TestUninstallRemovesWhatOneSideHasWhenTheOtherIsGone(t *testing.T) {
	t.Parallel()
	ns, s := natstest.Server(t), pgtest.Server(t)
	nowhere := "127.0.0.1:1"
	f := harness.NewInstallation(t, s, ns.URL(), "halved", "SINK_DURABLE_AFTER=0s")
	before := append(footprint(t, f), "relation outbox", "relation outbox_pkey")
	f.Init()
	f.MustFail(2, []string{"uninstall", "--gone", "nats"}, "it answers", "Leave --gone out")
	f.MustFail(2, []string{"uninstall", "--gone", "postgres"}, "it answers")
	f.MustFail(2, []string{"uninstall", "--gone", "both"}, "neither nats nor postgres")
	args := []string{"uninstall", "--gone", "nats", "--nats.url", "nats://" + nowhere}
	f.MustFail(3, args, "uninstall_unknown", "the checkpoint record is gone with NATS")
	args = append(args, "--accept", "uninstall_unknown")
	f.MustContain(
		"what would be done",
		f.MustRun(args...),
		"slot "+f.Slot+": would be removed",
		"stream: not there (NATS is gone)",
		"nats is taken to be gone",
		"--gone nats --accept uninstall_unknown --yes",
	)
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	f.MustFail(3, append(args, "--yes"), "uninstall_unpublished", "1 event in slot")
	f.MustContain(
		"outflow uninstall",
		f.MustRun(append(args, "--accept", "uninstall_unpublished", "--yes")...),
		"is uninstalled",
	)
	stays := "stream " + f.Stream
	if all := left(t, f, before); !slices.ContainsFunc(all, func(s string) bool { return s == stays }) ||
		slices.ContainsFunc(all, func(s string) bool { return !strings.HasPrefix(s, "stream ") }) {
		t.Errorf("with NATS gone %v is left", all)
	}

	f.MustContain("outflow uninstall", f.MustRun("uninstall", "--gone", "postgres", "--with-stream", "--yes",
		"--postgres.url", "postgres://postgres@"+nowhere+"/outflow"), "slot: not there (PostgreSQL is gone)",
		"is uninstalled")
	if all := left(t, f, before); len(all) > 0 {
		t.Errorf("with PostgreSQL gone %v is left", all)
	}

	// the server is there, and the database is gone
	f.Init()
	f.DropSlot(t)
	harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Publication())
	f.MustRun("uninstall", "--gone", "postgres", "--with-stream", "--yes", "--postgres.url",
		strings.Replace(f.URL, "/"+f.Conn.Config().Database, "/nobody_made_it", 1))
	if all := left(t, f, before); len(all) > 0 {
		t.Errorf("with the database gone %v is left", all)
	}
}

// TestUninstallLeavesWhatOthersUse: the publication that another slot reads, or that init would have made
// otherwise, and a slot that is somebody else's.
func TestUninstallLeavesWhatOthersUse(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "shared", "SINK_DURABLE_AFTER=0s")
	f.Init()
	second := harness.New(t, f.URL, ns.URL(), f.Slot+"_b", "STREAM="+f.Stream+"B",
		"PUBLICATION="+f.Publication())
	second.Init()
	f.MustContain("outflow uninstall", f.MustRun("uninstall", "--yes"), "is uninstalled")
	if n := harness.Value[int](t, f.Conn, "SELECT count(*)::int FROM pg_publication"); n != 1 {
		t.Error("the publication that another slot reads was dropped")
	}
	f.MustContain("outflow uninstall", second.MustRun("uninstall"), "publication "+f.Publication()+
		": would be removed")
	harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.Slot)
	f.MustContain("beside a slot of which nothing is known", second.MustRun("uninstall"),
		"publication "+f.Publication()+": stays (slot "+f.Slot+" may read it")
	harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", f.Slot)
	harness.Exec(t, f.Conn, "SELECT pg_create_physical_replication_slot($1)", f.Slot)
	f.MustContain("somebody else's slot", f.MustRun("uninstall", "--yes"), "slot "+f.Slot+": stays",
		"physical", "There is nothing to remove")
	harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", f.Slot)
	harness.Exec(t, f.Conn, "CREATE TABLE more ()")
	harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Publication()+" ADD TABLE more")
	f.MustContain("a publication that init did not make", second.MustRun("uninstall"),
		"publishes public.more", "--with-publication")
	out := second.MustRun("uninstall", "--with-publication", "--with-stream", "--yes")
	f.MustContain("with the flag", out, "is uninstalled")
}

// TestUninstallKnowsARenamedDatabase: the records have its former name. What is of this database is removed,
// also after a kill, and what another slot of it reads stays.
func TestUninstallKnowsARenamedDatabase(t *testing.T) {
	t.Parallel()
	pg, ns := pgtest.Server(t), natstest.Server(t)
	f := harness.NewInstallation(t, pg, ns.URL(), "moved", "SINK_DURABLE_AFTER=0s")
	f.MustRun("init", "--sql-api")
	second := harness.New(t, f.URL, ns.URL(), f.Slot+"_b", "STREAM="+f.Stream+"B",
		"PUBLICATION="+f.Publication(), "SINK_DURABLE_AFTER=0s")
	second.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	second.Start()
	second.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
	second.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, second.Slot)
	f.RenameDatabase(t, pg)
	second.Set("POSTGRES_URL=" + f.URL)
	all := []string{"uninstall", "--with-publication", "--sql-api", "--yes"}
	f.Set("FAILPOINT=uninstall.record:1")
	if out, _, code := f.Run(all...); code == 0 {
		t.Fatalf("it was not killed: %s", out)
	}
	f.Env = f.Env[:len(f.Env)-1]
	f.MustContain("outflow uninstall", f.MustRun(all...), "slot "+f.Slot+": not there",
		"publication "+f.Publication()+": stays (slot "+second.Slot+" reads it)",
		"function outflow.enqueue: stays (slot "+second.Slot+" reads the same table)", "is uninstalled")
	f.MustContain("the other", second.MustRun(all...), "is uninstalled")
	if got := harness.Value[string](t, f.Conn, `SELECT concat_ws(' ', (SELECT count(*) FROM pg_publication),
		(SELECT count(*) FROM pg_proc WHERE proname = 'enqueue'), (SELECT count(*) FROM pg_replication_slots
		WHERE database = current_database()))`); got != "0 0 0" {
		t.Errorf("publications, functions and slots that are left: %s", got)
	}
}

// TestUninstallCanBeKilledAnywhere: the next run finishes it, whatever is gone by then, and init works.
func TestUninstallCanBeKilledAnywhere(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "killed", "SINK_DURABLE_AFTER=0s")
	before := append(footprint(t, f), "relation outbox", "relation outbox_pkey")
	args := []string{"uninstall", "--yes", "--with-stream"}
	for _, point := range []string{"slot", "publication", "stream", "record", "bucket"} {
		f.Init()
		f.Set("FAILPOINT=uninstall." + point + ":1")
		cmd := exec.CommandContext(t.Context(), harness.Program(f.Env), args...)
		cmd.Env = f.Env
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != -1 {
			t.Errorf("%s: not killed: %v\n%s", point, err, out)
		}
		f.Env = f.Env[:len(f.Env)-1]
		if len(left(t, f, before)) == 0 {
			t.Errorf("%s: nothing is left when it is killed", point)
		}
		f.MustContain(point, f.MustRun(args...), "is uninstalled")
		if all := left(t, f, before); len(all) > 0 {
			t.Errorf("%s: %v is left", point, all)
		}
	}
	// one side is gone, and the table
	f.Init()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.Exec(t, f.Conn, "DROP TABLE outbox")
	harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Publication())
	harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
	f.MustFail(3, args, "uninstall_unpublished", f.Slot) // the WAL has it all the same
	f.MustRun(append(args, "--accept", "uninstall_unpublished")...)
	if all := left(t, f, before); len(all) > 0 {
		t.Errorf("of a half: %v is left", all)
	}
	f.Init()
	f.DropSlot(t)
	f.MustRun(args...)
	if all := left(t, f, before); len(all) > 0 {
		t.Errorf("without a slot: %v is left", all)
	}
}
