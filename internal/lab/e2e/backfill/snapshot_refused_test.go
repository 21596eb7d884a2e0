package backfill

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestASnapshotWhoseMessagesAreGoneStartsOver: where messages of a snapshot that was cut are gone, their rows
// can't be told from those that are missing: it says so, and starts over with a new stream.
func TestASnapshotWhoseMessagesAreGoneStartsOver(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Server(t), ns.URL(), "over", 300)
	f.KillSnapshotAt(t, "snapshot.row:200")
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(5)))
	f.MustFail(3, []string{"init", "--snapshot"}, "4 messages of stream", "nats stream rm "+f.Stream)
	harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
	f.MustFail(4, []string{"init"}, "did not finish")
	if r := f.MustSnapshot(); r.Published != 300 || r.Already != 0 {
		t.Errorf("%+v", r)
	}
	f.Start()
	harness.Insert(t, f.Conn, "after", 1, "{}")
	f.AwaitComplete(t, ns.URL(), 0)
}

// TestPoisonStopsASnapshotUntilItIsCured: a row that can't be published stops the snapshot, which names it;
// it goes on when the row was put right, or with a dead letter in its place.
func TestPoisonStopsASnapshotUntilItIsCured(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "poison",
		"SINK_DEAD_LETTER_SUBJECT=dead")
	harness.Exec(t, f.Conn, `CREATE TABLE outbox (id int PRIMARY KEY, doc_id text, seq_key text,
		payload jsonb);
		INSERT INTO outbox SELECT n, 'd', 'k' || n, CASE WHEN n NOT IN (3, 5) THEN '{}'::jsonb END
		FROM generate_series(1, 9) n`)
	f.MustFail(5, []string{"init", "--snapshot"}, "payload", `"3"`, "`outflow init --snapshot` again")
	f.MustFail(5, []string{"init", "--snapshot"}, `"3"`)
	f.MustFail(4, []string{"run"}, "did not finish")
	harness.Exec(t, f.Conn, "UPDATE outbox SET payload = '{}' WHERE id = 3; DELETE FROM outbox WHERE id = 7")
	f.MustFail(5, []string{"init", "--snapshot"}, `"5"`)
	f.Set("SINK_ON_POISON=dead_letter")
	f.MustSnapshot()
	var got []string
	for _, m := range harness.Messages(t, f.JS, f.Stream) {
		got = append(got, m.Outflow.ID+m.Header.Get("Outflow-Dead-Letter"))
	}
	if want := "1 2 3 4 5null_payload 6 8 9"; strings.Join(got, " ") != want {
		t.Errorf("%v, want %s", got, want)
	}
}

// TestASnapshotRefusesWhatItMustNotTouch: what a snapshot must not touch, and tables that it can't go on with
// after a kill.
func TestASnapshotRefusesWhatItMustNotTouch(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	refused := func(table string, code int, says ...string) *harness.Installation {
		t.Helper()
		f := harness.NewInstallation(t, pg, ns.URL(), "refused")
		harness.Exec(t, f.Conn, table)
		f.MustFail(code, []string{"init", "--snapshot"}, says...)
		return f
	}
	refused("CREATE TABLE outbox (doc_id text, seq_key text, payload jsonb)", 3, "no id column", "columns.id")
	f := refused(`CREATE TABLE outbox (id int, doc_id text, seq_key text, payload jsonb);
		INSERT INTO outbox VALUES (1, 'd', 'a', '{}'), (1, 'd', 'b', '{}'), (NULL, 'd', 'c', '{}')`,
		3, "1 row has no id", "1 has that of another row")
	harness.Exec(t, f.Conn, "UPDATE outbox SET id = ascii(seq_key)")
	if r := f.MustSnapshot(); r.Published != 3 {
		t.Errorf("%+v", r)
	}
	f.MustFail(2, []string{"init", "--json"}, "--snapshot")

	f = older(t, pg, ns.URL(), "full", 3)
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	f.MustFail(3, []string{"init", "--snapshot"}, "is set up already") // while it runs, which goes on
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 2)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.DeleteRecord(t)
	f.MustFail(4, []string{"init", "--snapshot"}, "checkpoint record") // a gap
	f.DropSlot(t)
	f.MustFail(3, []string{"init", "--snapshot"}, "has had messages", "last sequence is 2")

	// An init without a snapshot that died before its slot was recorded is taken over.
	f = older(t, pg, ns.URL(), "half", 3)
	f.Init()
	harness.EditRecord(t, f, harness.BeforeTheFirstCheckpoint)
	if r := f.MustSnapshot(); r.Published != 3 {
		t.Errorf("%+v", r)
	}
	// The temporary files of the sort have no room.
	f = older(t, pg, ns.URL(), "room", 20_000)
	for _, setting := range []string{"temp_file_limit = '100kB'", "work_mem = '64kB'"} {
		harness.Exec(t, f.Conn, "ALTER DATABASE "+f.Conn.Config().Database+" SET "+setting)
	}
	f.MustFail(3, []string{"init", "--snapshot"}, "no room to sort", "temp_file_limit")
}

// TestASnapshotReportsItsProgressAsJSON: with --json each line is a document of its own. A server that ends
// idle sessions ends no snapshot, which waits for sink.durable_after.
func TestASnapshotReportsItsProgressAsJSON(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Server(t), ns.URL(), "progress", 10)
	harness.Exec(t, f.Conn, "ALTER DATABASE "+f.Conn.Config().Database+" SET idle_session_timeout = '1500ms'")
	f.Set("SINK_DURABLE_AFTER=2s")
	_, stderr, code, _ := f.Snapshot()
	steps := 0
	for line := range strings.Lines(stderr) {
		var step map[string]any
		if err := json.Unmarshal([]byte(line), &step); err != nil {
			t.Errorf("%v: %s", err, line)
		}
		if step["step"] != nil {
			steps++
		}
	}
	if code != 0 || steps < 5 {
		t.Errorf("exit code %d, %d steps\n%s", code, steps, stderr)
	}
}
