package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestSnapshotStartsOver: where messages of a snapshot that was cut are gone, their rows can't be told from those that are missing: it
// says so, and starts over with a new stream.
func TestSnapshotStartsOver(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Server(t), ns.URL(), "over", 300)
	f.dies(t, "snapshot.row:200")
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(5)))
	f.fails(3, []string{"init", "--snapshot"}, "4 messages of stream", "nats stream rm "+f.stream)
	must(t, f.js.DeleteStream(t.Context(), f.stream))
	f.fails(4, []string{"init"}, "did not finish")
	if r := f.takes(); r.Published != 300 || r.Already != 0 {
		t.Errorf("%+v", r)
	}
	f.start()
	row(t, f.conn, "after", 1, "{}")
	f.complete(t, ns.URL(), 0)
}

// TestSnapshotPoison: a row that can't be published stops the snapshot, which names it; it goes on when the row was put right, or with a
// dead letter in its place.
func TestSnapshotPoison(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "poison", "SINK_DEAD_LETTER_SUBJECT=dead")
	mustExec(t, f.conn, `CREATE TABLE outbox (id int PRIMARY KEY, doc_id text, seq_key text, payload jsonb);
		INSERT INTO outbox SELECT n, 'd', 'k' || n, CASE WHEN n NOT IN (3, 5) THEN '{}'::jsonb END FROM generate_series(1, 9) n`)
	f.fails(5, []string{"init", "--snapshot"}, "payload", `"3"`, "`outflow init --snapshot` again")
	f.fails(5, []string{"init", "--snapshot"}, `"3"`)
	f.fails(4, []string{"run"}, "did not finish")
	mustExec(t, f.conn, "UPDATE outbox SET payload = '{}' WHERE id = 3; DELETE FROM outbox WHERE id = 7")
	f.fails(5, []string{"init", "--snapshot"}, `"5"`)
	f.set("SINK_ON_POISON=dead_letter")
	f.takes()
	var got []string
	for _, m := range messages(t, f.js, f.stream) {
		got = append(got, m.Outflow.ID+m.Header.Get("Outflow-Dead-Letter"))
	}
	if want := "1 2 3 4 5null_payload 6 8 9"; strings.Join(got, " ") != want {
		t.Errorf("%v, want %s", got, want)
	}
}

// TestSnapshotRefuses: what a snapshot must not touch, and tables that it can't go on with after a kill.
func TestSnapshotRefuses(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	refused := func(table string, code int, says ...string) *faulty {
		t.Helper()
		f := &faulty{js: js(t, ns.URL())}
		f.outflow, f.conn, f.url = installation(t, pg, ns.URL(), "refused")
		mustExec(t, f.conn, table)
		f.fails(code, []string{"init", "--snapshot"}, says...)
		return f
	}
	refused("CREATE TABLE outbox (doc_id text, seq_key text, payload jsonb)", 3, "no id column", "columns.id")
	f := refused(`CREATE TABLE outbox (id int, doc_id text, seq_key text, payload jsonb);
		INSERT INTO outbox VALUES (1, 'd', 'a', '{}'), (1, 'd', 'b', '{}'), (NULL, 'd', 'c', '{}')`,
		3, "1 rows have no id", "1 have that of another row")
	mustExec(t, f.conn, "UPDATE outbox SET id = ascii(seq_key)")
	if r := f.takes(); r.Published != 3 {
		t.Errorf("%+v", r)
	}
	f.fails(2, []string{"init", "--json"}, "--snapshot")

	f = older(t, pg, ns.URL(), "full", 3)
	f.init()
	f.start()
	row(t, f.conn, "doc", 1, "{}")
	awaitMessages(t, f.js, f.stream, 1)
	f.fails(3, []string{"init", "--snapshot"}, "is set up already") // while it runs, which goes on
	row(t, f.conn, "doc", 2, "{}")
	awaitMessages(t, f.js, f.stream, 2)
	if code := f.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	left(t, f.conn, f.slot)
	f.deleteRecord(t)
	f.fails(4, []string{"init", "--snapshot"}, "checkpoint record") // a gap
	f.dropSlot(t)
	f.fails(3, []string{"init", "--snapshot"}, "has had messages", "last sequence is 2")

	// An init without a snapshot that died before its slot was recorded is taken over.
	f = older(t, pg, ns.URL(), "half", 3)
	f.init()
	editRecord(t, f, creating)
	if r := f.takes(); r.Published != 3 {
		t.Errorf("%+v", r)
	}
	// The temporary files of the sort have no room.
	f = older(t, pg, ns.URL(), "room", 20_000)
	for _, setting := range []string{"temp_file_limit = '100kB'", "work_mem = '64kB'"} {
		mustExec(t, f.conn, "ALTER DATABASE "+f.conn.Config().Database+" SET "+setting)
	}
	f.fails(3, []string{"init", "--snapshot"}, "no room to sort", "temp_file_limit")
}

// TestSnapshotProgress: with --json each line is a document of its own. A server that ends idle sessions ends no snapshot, which waits
// for sink.durable_after.
func TestSnapshotProgress(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Server(t), ns.URL(), "progress", 10)
	mustExec(t, f.conn, "ALTER DATABASE "+f.conn.Config().Database+" SET idle_session_timeout = '1500ms'")
	f.set("SINK_DURABLE_AFTER=2s")
	_, stderr, code, _ := f.snapshot()
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
