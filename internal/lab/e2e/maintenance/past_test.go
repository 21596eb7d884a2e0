package maintenance

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestStreamAndTableComeBackFromTheArchive: both are gone, the stream and the rows of the table. The archive
// brings back the messages under their sequences, and the rows as they were in all columns that messages
// carry, each time through a kill. Nothing is published a second time.
func TestStreamAndTableComeBackFromTheArchive(t *testing.T) {
	t.Parallel()
	r := &retained{t: t, Installation: harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(),
		"past", "ARCHIVE_URL=file://"+t.TempDir(), "SINK_DURABLE_AFTER=0s",
		"HEADERS=Kind=kind,Created=created_at", "SUBJECT=outbox.{tenant}.{doc_id}")}
	harness.Exec(t, r.Conn, `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
		tenant text NOT NULL DEFAULT 't', doc_id text NOT NULL, actor_id text NOT NULL,
		counter bigint NOT NULL,
		seq_key text NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED,
		kind text, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
		note text DEFAULT 'put back')`)
	r.Init()
	r.Start()
	write := func(rows int) {
		t.Helper()
		harness.Exec(t, r.Conn, `INSERT INTO outbox (tenant, doc_id, actor_id, counter, kind, payload, note)
			SELECT (ARRAY['acme', 'Käse & Co.', 'a.b*>', ''])[1 + n % 4], 'doc ' || n % 7 || E' \u00e9=~%',
				'anna:' || n % 3, n, (ARRAY['moved', NULL, 'x: y'])[1 + n % 3],
				jsonb_build_object('n', n, 'big', 9007199254740993.10, 'text', repeat(E'\u20ac"\n', n % 50)),
				'as written'
			FROM generate_series($1::int, $2::int) n`, r.counter+1, r.counter+rows)
		r.counter += rows
	}
	const rows = 1300
	write(rows)
	harness.AwaitMessages(t, r.JS, r.Stream, rows)
	var archived struct{ Archived uint64 }
	harness.Eventually(t, "all of them are archived", func() error {
		write(1) // a checkpoint is confirmed when another one follows
		r.settle()
		harness.Must(t, json.Unmarshal([]byte(r.MustRun("archive", "run", "--now", "--json")), &archived))
		if archived.Archived < rows {
			return fmt.Errorf("archived up to %d", archived.Archived)
		}
		return nil
	})
	harness.AwaitMessages(t, r.JS, r.Stream, r.counter)
	r.settle()
	r.MustStop(t)
	harness.AwaitSlotFree(t, r.Conn, r.Slot)

	want := harness.Messages(t, r.JS, r.Stream)
	var ids []string
	for _, m := range want {
		if m.Seq <= archived.Archived {
			ids = append(ids, m.Outflow.ID)
		}
	}
	rowsOf := func() []string {
		t.Helper()
		got, err := r.Conn.Query(t.Context(), `SELECT (to_jsonb(o) - 'note')::text FROM outbox o
			WHERE id = ANY ($1::uuid[]) ORDER BY id`, ids)
		harness.Must(t, err)
		all, err := pgx.CollectRows(got, pgx.RowTo[string])
		harness.Must(t, err)
		return all
	}
	before := rowsOf()
	if len(before) != int(archived.Archived) {
		t.Fatalf("%d rows of %d messages", len(before), archived.Archived)
	}
	harness.Must(t, r.JS.DeleteStream(t.Context(), r.Stream))
	harness.Exec(t, r.Conn, "DELETE FROM outbox WHERE id = ANY ($1::uuid[])", ids)

	// A snapshot would publish what the table has left, and leave out all that is in the archive alone.
	r.MustFail(3, []string{"init", "--snapshot"}, "code snapshot_archived", "outflow archive restore")

	killed := func(point string, args ...string) {
		t.Helper()
		env := r.Env
		r.Set("FAILPOINT=" + point)
		if out, _, code := r.Run(args...); code == 0 {
			t.Fatalf("%s: it was not killed: %s", point, out)
		}
		r.Env = env
	}
	killed("restore.message:700", "archive", "restore")
	r.MustContain("restore", r.MustRun("archive", "restore"), fmt.Sprintf("restored %d messages",
		archived.Archived))
	r.MustContain("dry run", r.MustRun("archive", "rows", "--dry-run"), "nothing was changed",
		"defaults note: messages do not carry them")
	killed("rows.written:1", "archive", "rows")
	var back struct{ Inserted, There uint64 }
	harness.Must(t, json.Unmarshal([]byte(r.MustRun("archive", "rows", "--json")), &back))
	if back.Inserted == 0 || back.There == 0 || back.Inserted+back.There != archived.Archived {
		t.Errorf("put back %+v of %d", back, archived.Archived)
	}
	if report, stderr, code := r.Repair("--accept", "stream_recreated"); code != 0 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	r.Start()
	write(1)
	harness.AwaitMessages(t, r.JS, r.Stream, r.counter)
	// Put back once more, while it runs: the WAL brings the rows, and they are no events.
	harness.Exec(t, r.Conn, "DELETE FROM outbox WHERE id = ANY ($1::uuid[])", ids)
	r.MustContain("put back", r.MustRun("archive", "rows"), fmt.Sprintf("%d rows put back, 0 were there",
		archived.Archived))
	write(1)
	harness.AwaitMessages(t, r.JS, r.Stream, r.counter)
	r.settle()
	r.MustStop(t)

	after := rowsOf()
	if len(after) != len(before) {
		t.Fatalf("%d rows are back of %d", len(after), len(before))
	}
	for i := range before {
		if after[i] != before[i] {
			t.Fatalf("row\n%s\nwas\n%s", after[i], before[i])
		}
	}
	var notes string
	harness.Must(t, r.Conn.QueryRow(t.Context(), `SELECT string_agg(DISTINCT note, ',') FROM outbox
		WHERE id = ANY ($1::uuid[])`, ids).Scan(&notes))
	if notes != "put back" {
		t.Errorf("notes %s", notes)
	}
	got := harness.Messages(t, r.JS, r.Stream)
	if len(got) != r.counter {
		t.Errorf("%d messages of %d rows", len(got), r.counter)
	}
	seen := map[string]bool{}
	for i, g := range got {
		if seen[g.Outflow.ID] {
			t.Errorf("event %s is twice in the stream", g.Outflow.ID)
		}
		seen[g.Outflow.ID] = true
		if g.Seq <= archived.Archived && !sameMessage(g, want[i]) {
			t.Fatalf("%+v, it was %+v", g, want[i])
		}
	}
}

// TestRowsArePutBackBesideDetachedPartitions: those that are in a partition which waits for its end are
// there. The subjects were made by another template at first: then the rows of each come back with its own.
func TestRowsArePutBackBesideDetachedPartitions(t *testing.T) {
	t.Parallel()
	r := newRetained(t, pgtest.Server(t), "putback", "ARCHIVE_URL=file://"+t.TempDir())
	const then, now = "SUBJECT=outbox.{doc_id}", "SUBJECT=outbox.v2.{doc_id}"
	r.Set(then)
	r.Init()
	r.Start()
	r.day(5) // it is detached, and waits for the archive
	archived(t, r.Installation, 5)
	r.MustStop(t)
	harness.AwaitSlotFree(t, r.Conn, r.Slot)
	old := ends(r.Installation)
	r.Set(now)
	r.Start()
	archived(t, r.Installation, old+1)
	if in := harness.Value[int](t, r.Conn, "SELECT count(*) FROM outbox WHERE doc_id <> 'now'"); in > 0 {
		t.Fatalf("%d rows are in attached partitions", in)
	}
	rows := func() int {
		return harness.Value[int](t, r.Conn,
			"SELECT count(*) FROM (SELECT id FROM outbox UNION ALL SELECT id FROM day_1) r")
	}
	before := rows()
	harness.Exec(t, r.Conn, "DELETE FROM day_1 WHERE counter < 3")
	r.MustStop(t)
	r.MustFail(3, []string{"archive", "rows"}, "rows_columns", "that of message 1:", "--from 1.")
	r.Set(then)
	r.MustFail(3, []string{"archive", "rows"}, "rows_columns", fmt.Sprintf("--from %d.", old+1))
	if n := rows(); n != before {
		t.Errorf("%d rows of %d", n, before)
	}
	r.Set(now)
	r.MustContain("rows", r.MustRun("archive", "rows", "--from", fmt.Sprint(old+1)), " 0 rows put back")
	if n := rows(); n != before {
		t.Errorf("%d rows of %d", n, before)
	}

	// one at a time, of all databases of the server
	other := harness.Connect(t, pgtest.Database(t, pgtest.Server(t)))
	harness.Eventually(t, "nobody else puts rows back", func() error {
		_, err := other.Exec(t.Context(), "SELECT pg_replication_origin_session_setup('outflow_restore')")
		return err
	})
	waits := r.runs([]string{"archive", "rows", "--from", fmt.Sprint(old + 1)})
	waits.says("waiting for another outflow archive rows")
	harness.Must(t, other.Close(t.Context()))
	if err := waits.child.Wait(); err != nil {
		t.Errorf("%v: %s", err, waits.log.String())
	}
}

// sameMessage reports whether a restored message is what it was: all but the headers that the server checked
// when it was published.
func sameMessage(a, b *oracle.Message) bool {
	return a.Seq == b.Seq && a.Subject == b.Subject && bytes.Equal(a.Data, b.Data) &&
		maps.EqualFunc(headers(a), headers(b), slices.Equal)
}
