package e2e

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// generatedKey is the table that outflow init would make.
const generatedKey = `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
	seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED, payload jsonb NOT NULL)`

// older is an installation that is still to be made, of a table that has rows.
func older(t *testing.T, pg *pgserver.Server, natsURL, name string, rows int) *faulty {
	t.Helper()
	f := &faulty{js: js(t, natsURL)}
	f.outflow, f.conn, f.url = installation(t, pg, natsURL, name)
	mustExec(t, f.conn, generatedKey)
	mustExec(t, f.conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'd' || n % 97, (ARRAY['bob', 'Anna', 'ö'])[n % 3 + 1], n,
		jsonb_build_object('n', n, 'x', 1.10) FROM generate_series(1, $1) n ORDER BY random()`, rows)
	return f
}

// snapshotReport is what outflow init --snapshot --json prints, as far as tests look at it.
type snapshotReport struct {
	At                             string
	Already, Published, Rows, Last int
	Order                          string
	Finished                       bool
}

// snapshot runs outflow init --snapshot. killed: a failpoint, or somebody, has ended it.
// One that gave up because a server did not answer is run again.
func (o *outflow) snapshot() (r snapshotReport, stderr string, code int, killed bool) {
	o.t.Helper()
	for try := 1; ; try++ {
		r, stderr, code, killed = o.snapshotOnce()
		if killed || code != 1 || try == tries || !unanswered(o.t, "init --snapshot", stderr) {
			return r, stderr, code, killed
		}
	}
}

func (o *outflow) snapshotOnce() (r snapshotReport, stderr string, code int, killed bool) {
	o.t.Helper()
	cmd := exec.CommandContext(o.t.Context(), program(o.env), "init", "--snapshot", "--json")
	var out, errOut strings.Builder
	cmd.Env, cmd.Stdout, cmd.Stderr = o.env, &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		o.t.Fatal(err)
	}
	if exit != nil && exit.Sys().(syscall.WaitStatus).Signaled() {
		return r, errOut.String(), -1, true
	}
	if err := json.Unmarshal([]byte(out.String()), &r); err != nil && out.Len() > 0 {
		o.t.Fatalf("%v in %s", err, out.String())
	}
	return r, errOut.String(), cmd.ProcessState.ExitCode(), false
}

// takes takes the snapshot, which must come to its end.
func (o *outflow) takes() snapshotReport {
	o.t.Helper()
	r, stderr, code, _ := o.snapshot()
	if code != 0 || !r.Finished {
		o.t.Fatalf("outflow init --snapshot: exit code %d, %+v\n%s", code, r, stderr)
	}
	return r
}

// counts are what a stream that begins with snapshots has.
type counts struct{ windows, cut, snapshot, live int }

// judgeSnapshots makes sure of what docs/format.md says: the windows of snapshots come first, each in the order (document, key, id), without
// a gap in n, and only the last one may be whole; no event is there twice. doc takes the document out of a message.
func judgeSnapshots(t *testing.T, all []*oracle.Message, doc func(*oracle.Message) string) (c counts) {
	t.Helper()
	seen := map[string]bool{}
	var last *oracle.Message
	fail := func(m *oracle.Message, what string) {
		t.Helper()
		t.Fatalf("message %d (%+v): %s", m.Seq, m.Outflow, what)
	}
	for _, m := range all {
		h := m.Outflow
		if seen[h.ID] {
			fail(m, "its event is there before")
		}
		seen[h.ID] = true
		switch {
		case h.Pos.Index < 1<<30:
			c.live++
			continue
		case c.live > 0:
			fail(m, "behind what came from the WAL")
		case h.Due != h.Thru || h.Pos.LSN != h.Due || h.Pull != 0:
			fail(m, "its position is no snapshot's")
		}
		if c.snapshot++; last == nil || last.Outflow.Due != h.Due {
			if c.windows++; last != nil && last.Outflow.N+1 != last.Outflow.Of {
				c.cut++
			}
			if h.N != 0 || last != nil && h.Pos.LSN <= last.Outflow.Pos.LSN {
				fail(m, "no window begins so")
			}
		} else if was := last.Outflow; h.N != was.N+1 || h.Of != was.Of || h.Pos.Index != was.Pos.Index+1 ||
			cmp.Or(strings.Compare(doc(last), doc(m)), strings.Compare(was.Key, h.Key), strings.Compare(was.ID, h.ID)) >= 0 {
			fail(m, fmt.Sprintf("it does not follow %+v", was))
		}
		last = m
	}
	return c
}

func docOfSubject(m *oracle.Message) string { return strings.TrimPrefix(m.Subject, "outbox.") }

// TestSnapshot: of a table that is written to at full rate each row is published once, the old ones first and in order.
func TestSnapshot(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		const rows = 10_000
		f := older(t, pg, ns.URL(), "snap", rows)
		stop := writing(t, f.url)
		defer stop()
		r := f.takes()
		if r.Rows < rows || r.Rows != r.Published || r.Last != r.Rows || r.Order != "doc_id, seq_key, id" {
			t.Errorf("%+v", r)
		}
		f.start()
		f.ready()
		stop()
		f.complete(t, ns.URL(), 0)
		if c := judgeSnapshots(t, messages(t, f.js, f.stream), docOfSubject); c.windows != 1 || c.cut != 0 || c.snapshot != r.Rows {
			t.Errorf("%+v of %+v", c, r)
		}
		f.healthy("ok")
		f.fails(3, []string{"init", "--snapshot"}, "is set up already", "outflow repair") // not once more
		f.init()
	})
}

// TestSnapshotOfNothing: a set-up without a row, or without a table, is one as any other.
func TestSnapshotOfNothing(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "nothing")
	if r := f.takes(); r.Published != 0 {
		t.Errorf("%+v", r)
	}
	row(t, f.conn, "doc", 1, "{}")
	f.start()
	f.complete(t, ns.URL(), 0)
}

// TestSnapshotShapes: tables of other shapes.
func TestSnapshotShapes(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	together(t, []snapshotShape{
		{
			name: "partitioned", order: "doc_id, seq_key, id",
			table: `CREATE TABLE outbox (id bigint NOT NULL, doc_id text NOT NULL, seq_key text NOT NULL, payload jsonb) PARTITION BY HASH (doc_id);
				CREATE TABLE p0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0); CREATE TABLE p1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1);
				INSERT INTO outbox SELECT n, 'd' || n % 3, 'k' || lpad(n::text, 9, '0'), '{}' FROM generate_series(60, 1, -1) n`,
			want: func(n int) (doc, id string) { return fmt.Sprint("d", n/20), fmt.Sprint(n%20*3 + []int{3, 1, 2}[n/20]) }, rows: 60,
		},
		{
			name: "without a key", order: "doc_id, id", // its id is a number: 9 before 10
			table: `CREATE TABLE outbox (id bigint PRIMARY KEY, topic text NOT NULL, message jsonb NOT NULL, state text);
				INSERT INTO outbox SELECT n, 't' || n % 2, '{}', 'new' FROM generate_series(1, 30) n`,
			settings: []string{"COLUMNS_DOC_ID=topic", "COLUMNS_PAYLOAD=message", "SUBJECT=outbox.{topic}"},
			want:     func(n int) (doc, id string) { return fmt.Sprint("t", n/15), fmt.Sprint(n%15*2 + 2 - n/15) }, rows: 30,
		},
		{
			name: "bytea id, children that inherit", order: "doc_id, seq_key, id",
			table: `CREATE TABLE outbox (id bytea UNIQUE NOT NULL, doc_id text, seq_key text, payload bytea); CREATE TABLE child () INHERITS (outbox);
				INSERT INTO child VALUES ('x', 'not ours', 'k', ''); INSERT INTO outbox VALUES ('a', 'd', 'k', '\x00'), ('b', 'd', 'k', ''), ('B', 'c', 'k', '\xff')`,
			want: func(n int) (doc, id string) { return []string{"c", "d", "d"}[n], []string{"B", "a", "b"}[n] }, rows: 3,
		},
	}, func(c snapshotShape) string { return c.name }, func(t *testing.T, _ int, c snapshotShape) {
		f := &faulty{js: js(t, ns.URL())}
		f.outflow, f.conn, f.url = installation(t, pg, ns.URL(), "shape", c.settings...)
		mustExec(t, f.conn, c.table)
		f.set("FAILPOINT=snapshot.row:2") // the second attempt knows the ids of the first
		if _, stderr, code, killed := f.snapshot(); !killed {
			t.Fatalf("it was not killed: %d %s", code, stderr)
		}
		f.env = f.env[:len(f.env)-1]
		if r := f.takes(); r.Order != c.order || r.Already+r.Published != c.rows {
			t.Errorf("%+v", r)
		}
		all := messages(t, f.js, f.stream)
		if len(all) != c.rows {
			t.Fatalf("%d messages", len(all))
		}
		for n, m := range all {
			if doc, id := c.want(n); m.Outflow.ID != id || docOfSubject(m) != doc {
				t.Errorf("message %d is event %s of %s, want %s of %s", n, m.Outflow.ID, docOfSubject(m), id, doc)
			}
		}
	})
}

type snapshotShape struct {
	name, table, order string
	settings           []string
	rows               int
	want               func(n int) (doc, id string) // of the n-th message
}

// TestSnapshotWaitsForCommits: a transaction that has its commit in the WAL, and is not visible because it waits for a synchronous
// standby, is in the snapshot or comes from the slot; so is one that is open.
func TestSnapshotWaitsForCommits(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Own(t, 0), ns.URL(), "sync", 100)
	mustExec(t, f.conn, "CREATE PUBLICATION "+f.slot+" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)") // it would wait as well
	mustExec(t, f.conn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
	mustExec(t, f.conn, "SELECT pg_reload_conf()")
	waits, open := db(t, f.url), db(t, f.url)
	mustExec(t, open, "SET synchronous_commit = local")
	mustExec(t, open, "BEGIN")
	row(t, open, "open", 1, "{}")
	committed := make(chan error, 1)
	pid := waits.PgConn().PID()
	go func() {
		_, err := waits.Exec(t.Context(), "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('waits', 'anna', 1, '{}')")
		committed <- err
	}()
	looking := func(sql string, args ...any) {
		t.Helper()
		eventually(t, sql, func() error {
			var there bool
			if err := f.conn.QueryRow(t.Context(), sql, args...).Scan(&there); err != nil || there {
				return err
			}
			return errors.New("not yet")
		})
	}
	looking("SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = $1", pid)
	taken := make(chan snapshotReport, 1)
	go func() {
		r, _, _, _ := f.snapshot()
		taken <- r
	}()
	looking("SELECT count(*) = 1 FROM pg_replication_slots WHERE slot_name = $1 AND active", f.slot)
	mustExec(t, open, "COMMIT")
	mustExec(t, f.conn, "SELECT pg_cancel_backend($1)", pid) // it ends waiting; the commit is there
	must(t, <-committed)
	mustExec(t, f.conn, "ALTER SYSTEM RESET synchronous_standby_names") // an attempt that begins again writes, and would wait
	mustExec(t, f.conn, "SELECT pg_reload_conf()")
	if r := <-taken; !r.Finished || r.Already+r.Published != 102 {
		t.Errorf("%+v", r)
	}
	f.start()
	row(t, f.conn, "after", 1, "{}")
	f.complete(t, ns.URL(), 0)
	judgeSnapshots(t, messages(t, f.js, f.stream), docOfSubject)
}
