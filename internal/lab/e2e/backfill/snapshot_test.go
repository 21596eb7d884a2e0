package backfill

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// older is an installation that is still to be made, of a table that has rows.
func older(t *testing.T, pg *pgserver.Server, natsURL, name string, rows int) *harness.Installation {
	t.Helper()
	f := harness.NewInstallation(t, pg, natsURL, name)
	harness.Exec(t, f.Conn, harness.GeneratedKey)
	harness.Exec(t, f.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'd' || n % 97, (ARRAY['bob', 'Anna', 'ö'])[n % 3 + 1], n,
		jsonb_build_object('n', n, 'x', 1.10) FROM generate_series(1, $1) n ORDER BY random()`, rows)
	return f
}

// counts are what a stream that begins with snapshots has.
type counts struct{ windows, cut, snapshot, live int }

// judgeSnapshots makes sure of what docs/format.md says: the windows of snapshots come first, each in the
// order (document, key, id), without a gap in n, and only the last one may be whole; no event is there twice.
// doc takes the document out of a message.
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
			cmp.Or(strings.Compare(doc(last), doc(m)), strings.Compare(was.Key, h.Key),
				strings.Compare(was.ID, h.ID)) >= 0 {
			fail(m, fmt.Sprintf("it does not follow %+v", was))
		}
		last = m
	}
	return c
}

func docOfSubject(m *oracle.Message) string { return strings.TrimPrefix(m.Subject, "outbox.") }

// TestASnapshotUnderLoadPublishesEachRowOnce: of a table that is written to at full rate each row is
// published once, the old ones first and in order.
func TestASnapshotUnderLoadPublishesEachRowOnce(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		const rows = 10_000
		f := older(t, pg, ns.URL(), "snap", rows)
		stop := harness.StartWriters(t, f.URL)
		defer stop()
		r := f.MustSnapshot()
		if r.Rows < rows || r.Rows != r.Published || r.Last != r.Rows || r.Order != "doc_id, seq_key, id" {
			t.Errorf("%+v", r)
		}
		f.Start()
		f.AwaitReady()
		stop()
		f.AwaitComplete(t, ns.URL(), 0)
		if c := judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject); c.windows != 1 ||
			c.cut != 0 || c.snapshot != r.Rows {
			t.Errorf("%+v of %+v", c, r)
		}
		f.AwaitHealth("ok")
		f.MustFail(3, []string{"init", "--snapshot"}, "is set up already", "outflow repair") // not once more
		f.Init()
	})
}

// TestASnapshotOfNothingIsAnOrdinarySetup: a set-up without a row, or without a table, is one as any other.
func TestASnapshotOfNothingIsAnOrdinarySetup(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "nothing")
	if r := f.MustSnapshot(); r.Published != 0 {
		t.Errorf("%+v", r)
	}
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	f.Start()
	f.AwaitComplete(t, ns.URL(), 0)
}

// TestWhatASnapshotPublishesIsNotTakenForErased: a stream that was emptied still says what was erased from
// it, and the rows come under those sequences. So the archive goes on. The cuts of requests, which lay behind
// that end, don't take the rows in either.
func TestWhatASnapshotPublishesIsNotTakenForErased(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Server(t), ns.URL(), "emptied", 10)
	f.KillSnapshotAt(t, "snapshot.begun:1")
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	cfg := s.CachedInfo().Config
	cfg.Metadata[outbox.MetadataErased] = outbox.Sequences{{From: 2, To: 3}, {From: 20, To: 20}}.String()
	_, err = f.JS.UpdateStream(t.Context(), cfg)
	harness.Must(t, err)
	l, err := erasure.Open(t.Context(), postgres.Target{URL: f.URL}, "outbox", f.Slot)
	harness.Must(t, err)
	_, err = l.Begin(t.Context(), "r", "gone", "1", f.Stream, s.CachedInfo().Created)
	harness.Must(t, err)
	l.Close()
	harness.Exec(t, f.Conn, "UPDATE outflow_erasures SET cut = '0/1', cut_sequence = 20, finished_at = now()")
	f.MustSnapshot()
	if cut := harness.Value[int64](t, f.Conn, "SELECT cut_sequence FROM outflow_erasures"); cut != 0 {
		t.Errorf("the cut is at %d", cut)
	}
	s, err = f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	if got := s.CachedInfo(); got.Config.Metadata[outbox.MetadataErased] != "" || got.State.LastSeq != 10 {
		t.Errorf("of %d messages are noted as erased: %v", got.State.LastSeq, got.Config.Metadata)
	}
	f.Set("ARCHIVE_URL=file://" + t.TempDir())
	f.MustRun("archive", "run", "--now")
}

// TestASnapshotReadsTablesOfEveryShape: tables of other shapes.
func TestASnapshotReadsTablesOfEveryShape(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	harness.RunAtOnce(t, []snapshotShape{
		{
			name: "partitioned", order: "doc_id, seq_key, id",
			table: `CREATE TABLE outbox (id bigint NOT NULL, doc_id text NOT NULL, seq_key text NOT NULL,
				payload jsonb) PARTITION BY HASH (doc_id);
				CREATE TABLE p0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2,
				REMAINDER 0); CREATE TABLE p1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1);
				INSERT INTO outbox SELECT n, 'd' || n % 3, 'k' || lpad(n::text, 9, '0'), '{}'
				FROM generate_series(60, 1, -1) n`,
			want: func(n int) (doc, id string) {
				return fmt.Sprint("d", n/20), fmt.Sprint(n%20*3 + []int{3, 1, 2}[n/20])
			}, rows: 60,
		},
		{
			name: "without a key", order: "doc_id, id", // its id is a number: 9 before 10
			table: `CREATE TABLE outbox (id bigint PRIMARY KEY, topic text NOT NULL, message jsonb NOT NULL,
				state text);
				INSERT INTO outbox SELECT n, 't' || n % 2, '{}', 'new' FROM generate_series(1, 30) n`,
			settings: []string{"COLUMNS_DOC_ID=topic", "COLUMNS_PAYLOAD=message", "SUBJECT=outbox.{topic}"},
			want: func(n int) (doc, id string) {
				return fmt.Sprint("t", n/15), fmt.Sprint(n%15*2 + 2 - n/15)
			}, rows: 30,
		},
		{
			name: "bytea id, children that inherit", order: "doc_id, seq_key, id",
			table: `CREATE TABLE outbox (id bytea UNIQUE NOT NULL, doc_id text, seq_key text,
				payload bytea); CREATE TABLE child () INHERITS (outbox);
				INSERT INTO child VALUES ('x', 'not ours', 'k', ''); INSERT INTO outbox
				VALUES ('a', 'd', 'k', '\x00'), ('b', 'd', 'k', ''), ('B', 'c', 'k', '\xff')`,
			want: func(n int) (doc, id string) {
				return []string{"c", "d", "d"}[n], []string{"B", "a", "b"}[n]
			}, rows: 3,
		},
	}, func(c snapshotShape) string { return c.name }, func(t *testing.T, _ int, c snapshotShape) {
		f := harness.NewInstallation(t, pg, ns.URL(), "shape", c.settings...)
		harness.Exec(t, f.Conn, c.table)
		f.Set("FAILPOINT=snapshot.row:2") // the second attempt knows the ids of the first
		if _, stderr, code, killed := f.Snapshot(); !killed {
			t.Fatalf("it was not killed: %d %s", code, stderr)
		}
		f.Env = f.Env[:len(f.Env)-1]
		if r := f.MustSnapshot(); r.Order != c.order || r.Already+r.Published != c.rows {
			t.Errorf("%+v", r)
		}
		all := harness.Messages(t, f.JS, f.Stream)
		if len(all) != c.rows {
			t.Fatalf("%d messages", len(all))
		}
		for n, m := range all {
			if doc, id := c.want(n); m.Outflow.ID != id || docOfSubject(m) != doc {
				t.Errorf("message %d is event %s of %s, want %s of %s", n, m.Outflow.ID, docOfSubject(m), id,
					doc)
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

// TestASnapshotWaitsForCommitsThatAreNotVisibleYet: a transaction that has its commit in the WAL, and is not
// visible because it waits for a synchronous standby, is in the snapshot or comes from the slot; so is one
// that is open.
func TestASnapshotWaitsForCommitsThatAreNotVisibleYet(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Own(t, 0), ns.URL(), "sync", 100)
	// it would wait as well
	harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Slot+
		" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	harness.Exec(t, f.Conn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
	harness.Exec(t, f.Conn, "SELECT pg_reload_conf()")
	waits, open := harness.Connect(t, f.URL), harness.Connect(t, f.URL)
	harness.Exec(t, open, "SET synchronous_commit = local")
	harness.Exec(t, open, "BEGIN")
	harness.Insert(t, open, "open", 1, "{}")
	committed := make(chan error, 1)
	pid := waits.PgConn().PID()
	go func() {
		_, err := waits.Exec(t.Context(),
			"INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('waits', 'anna', 1, '{}')")
		committed <- err
	}()
	looking := func(sql string, args ...any) {
		t.Helper()
		harness.Eventually(t, sql, func() error {
			var there bool
			if err := f.Conn.QueryRow(t.Context(), sql, args...).Scan(&there); err != nil || there {
				return err
			}
			return errors.New("not yet")
		})
	}
	looking("SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = $1", pid)
	taken := make(chan harness.SnapshotReport, 1)
	go func() {
		r, _, _, _ := f.Snapshot()
		taken <- r
	}()
	looking("SELECT count(*) = 1 FROM pg_replication_slots WHERE slot_name = $1 AND active", f.Slot)
	harness.Exec(t, open, "COMMIT")
	harness.Exec(t, f.Conn, "SELECT pg_cancel_backend($1)", pid) // it ends waiting; the commit is there
	harness.Must(t, <-committed)
	// an attempt that begins again writes, and would wait
	harness.Exec(t, f.Conn, "ALTER SYSTEM RESET synchronous_standby_names")
	harness.Exec(t, f.Conn, "SELECT pg_reload_conf()")
	if r := <-taken; !r.Finished || r.Already+r.Published != 102 {
		t.Errorf("%+v", r)
	}
	f.Start()
	harness.Insert(t, f.Conn, "after", 1, "{}")
	f.AwaitComplete(t, ns.URL(), 0)
	judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject)
}

// TestASnapshotGoesOnInARenamedDatabase: what is left of one that was killed has the former name.
func TestASnapshotGoesOnInARenamedDatabase(t *testing.T) {
	t.Parallel()
	const rows = 200
	pg := pgtest.Server(t)
	f := older(t, pg, natstest.Server(t).URL(), "renamed", rows)
	f.Set("SINK_DURABLE_AFTER=0s")
	f.KillSnapshotAt(t, fmt.Sprintf("snapshot.row:%d", rows/2))
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.RenameDatabase(t, pg)
	f.MustRun("init", "--snapshot")
	f.Start()
	harness.Insert(t, f.Conn, "now", 1, "{}")
	f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
	f.MustStop(t)
	if c := judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject); c.snapshot != rows {
		t.Errorf("%+v", c)
	}
}
