package tablesnapshot

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/postgres"
)

func idSum(id string) (s IDHash) {
	sum := sha256.Sum256([]byte(id))
	copy(s[:], sum[:])
	return s
}

// A reader that knows ids leaves their rows out, whatever type the id has.
func TestKnownRowsAreLeftOut(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	for _, c := range []struct {
		kind, values string
		known        []string
		want         []string
	}{
		{"bigint", "(1), (2), (10)", []string{"2", "3"}, []string{"1", "10"}},
		{"uuid", "('00000000-0000-0000-0000-00000000000a'), ('00000000-0000-0000-0000-00000000000b')",
			[]string{"00000000-0000-0000-0000-00000000000a"},
			[]string{"00000000-0000-0000-0000-00000000000b"}},
		{"text", "('ü'), (''), (repeat('x', 999)), ('=')", []string{"ü", ""},
			[]string{"=", fmt.Sprintf("%0999d", 0)}},
		{"bytea", `('\x00ff'), ('\x5c'), ('')`, []string{"\x00\xff", ""}, []string{`\x5c`}},
		{"timestamptz", "('2024-02-29 23:59:59.5+02')", []string{"2024-02-29 21:59:59.5+00"}, nil},
	} {
		d.Exec("DROP TABLE IF EXISTS outbox")
		d.Exec("CREATE TABLE outbox (id " + c.kind + ", doc_id text, seq_key text, payload text)")
		d.Exec("INSERT INTO outbox (id) VALUES " + c.values)
		r, err := OpenReader(within(t), d.cfg)
		must.Succeed(t, err)
		defer r.Close()
		if err := r.LoadKnown(within(t), func(add func(...IDHash) error) error {
			for _, id := range c.known {
				if err := add(idSum(id)); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		snap, err := r.Snapshot(within(t), "")
		must.Succeed(t, err)
		q := Query{Mapping: relay.Mapping{Doc: "doc_id", Payload: "payload"}, ID: "id",
			Columns: []string{"id"}, SkipKnown: true, Sorted: true}
		var got []string
		if err := snap.Rows(within(t), q, func(v [][]byte) error {
			got = append(got, string(v[0]))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		n, err := snap.Count(within(t), q)
		if err != nil || n != len(c.want) || len(got) != n || c.kind != "text" && !slices.Equal(got, c.want) {
			t.Errorf("%s: %d rows, %q, want %q, %v", c.kind, n, got, c.want, err)
		}
		snap.Close()
	}
}

// An error of what fills it, or of the server, ends it.
func TestAnErrorEndsTheReadingOfKnownRows(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	open := func() *Reader {
		r, err := OpenReader(within(t), d.cfg)
		must.Succeed(t, err)
		t.Cleanup(r.Close)
		return r
	}
	broken := errors.New("broken")
	if err := open().LoadKnown(within(t), func(add func(...IDHash) error) error {
		return errors.Join(add(IDHash{}), broken)
	}); !errors.Is(err, broken) {
		t.Error(err)
	}
	r := open()
	err := r.LoadKnown(within(t), func(add func(...IDHash) error) error {
		for n := range 1_000_000 {
			if n == 100_000 { // the server goes away in the middle
				d.Exec(fmt.Sprintf("SELECT pg_terminate_backend(%d)", r.conn.PgConn().PID()))
			}
			if err := add(IDHash{byte(n), byte(n >> 8), byte(n >> 16)}); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		t.Error("it knows them")
	}
}

// TestOneThatStopsWhileItLoadsLosesItsSession: between ids PostgreSQL waits for it no longer than for any
// session that is silent. Within a COPY it would wait for ever.
func TestOneThatStopsWhileItLoadsLosesItsSession(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	r, err := OpenReader(within(t), d.cfg)
	must.Succeed(t, err)
	t.Cleanup(r.Close)
	_, err = r.conn.Exec(within(t), "SET idle_session_timeout = 500")
	must.Succeed(t, err)
	pid := fmt.Sprint(r.conn.PgConn().PID())
	err = loadKnown(within(t), r.conn, time.Hour, none, func(add func(...IDHash) error) error {
		for range knownBatch + 1 {
			must.Succeed(t, add(IDHash{}))
		}
		outboxdb.Eventually(t, "the server ends the session", func() bool {
			return d.Text("SELECT count(*)::text FROM pg_stat_activity WHERE pid = $1::text::int", pid) == "0"
		})
		return nil
	})
	if err == nil {
		t.Error("it knows them")
	}
}

// TestIDsThatComeSlowlyAreWaitedFor: PostgreSQL hears of a process that waits for ids, whether or not it has
// some to send.
func TestIDsThatComeSlowlyAreWaitedFor(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	r, err := OpenReader(within(t), d.cfg)
	must.Succeed(t, err)
	t.Cleanup(r.Close)
	said := func() string {
		return d.Text("SELECT state_change::text FROM pg_stat_activity WHERE pid = $1::text::int",
			fmt.Sprint(r.conn.PgConn().PID()))
	}
	must.Succeed(t, loadKnown(within(t), r.conn, time.Millisecond, none, func(add func(...IDHash) error,
	) error {
		for n := range 3 {
			for range 2 { // one of them with the id
				before := said()
				outboxdb.Eventually(t, "it says that it is there", func() bool { return said() != before })
			}
			must.Succeed(t, add(IDHash{byte(n)}))
		}
		return nil
	}))
	n := 0
	must.Succeed(t, r.conn.QueryRow(within(t), "SELECT count(DISTINCT sum) FROM "+KnownTable).Scan(&n))
	if n != 3 {
		t.Errorf("it knows %d", n)
	}
}

func TestIDsThatAreNullOrDoubleAreCounted(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	for _, c := range []struct {
		table        string
		none, double int
	}{
		{"(id int PRIMARY KEY); INSERT INTO outbox VALUES (1), (2)", 0, 0},
		{"(id int, part int, PRIMARY KEY (id, part)); INSERT INTO outbox VALUES (1, 1), (1, 2), (2, 1)", 0,
			1},
		{"(id int UNIQUE); INSERT INTO outbox VALUES (1), (NULL), (NULL)", 2, 0},
		{"(id text); CREATE UNIQUE INDEX ON outbox (id) WHERE id <> ''; INSERT INTO outbox VALUES ('a'), " +
			"(''), (''), ('')", 0, 2},
		{"(id text); CREATE UNIQUE INDEX ON outbox (lower(id)); INSERT INTO outbox VALUES ('a'), ('b')", 0,
			0},
	} {
		d.Exec("DROP TABLE IF EXISTS outbox")
		d.Exec("CREATE TABLE outbox " + c.table)
		s, err := Open(within(t), d.cfg, "")
		must.Succeed(t, err)
		none, double, err := s.CheckIDs(within(t), "id")
		if err != nil || none != c.none || double != c.double {
			t.Errorf("%s: %d without, %d twice, %v", c.table, none, double, err)
		}
		s.Close()
	}
}

// Under the lock rows are written; a statement that makes the table anew, whose rows an older snapshot would
// not see, waits.
func TestTheTableLockLetsRowsBeWritten(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	l, err := LockTable(within(t), d.cfg)
	must.Succeed(t, err)
	defer l.Close()
	d.Insert(outboxdb.Ops(t, 3))
	if len(l.Table().Columns) == 0 {
		t.Error("it does not know the table")
	}
	done := make(chan error, 1)
	ctx := within(t)
	go func() {
		conn, err := postgres.Connect(ctx, d.URL)
		if err == nil {
			_, err = conn.Exec(ctx, "ALTER TABLE public.outbox ALTER payload TYPE text")
			postgres.Close(conn)
		}
		done <- err
	}()
	eventually(t, "it waits", func() bool {
		var waits bool
		err := d.Conn.QueryRow(within(t), "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = "+
			"'outbox'::regclass AND NOT granted)").Scan(&waits)
		return err == nil && waits
	})
	l.Close()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(outboxdb.Patience):
		t.Error("it waits for ever")
	}
}

// What a reader knows is no matter of synchronous standbys: it waits for none.
func TestKnownRowsWaitForNoStandby(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Own(t, 0, "synchronous_standby_names=nobody", "synchronous_commit=local"))
	d.Exec("CREATE TABLE outbox (id bigint)")
	d.Exec("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = on', " +
		"current_database()); END $$")
	r, err := OpenReader(within(t), d.cfg)
	must.Succeed(t, err)
	defer r.Close()
	if err := r.LoadKnown(within(t), func(add func(...IDHash) error) error {
		return add(idSum("1"))
	}); err != nil {
		t.Fatal(err)
	}
}

// none is what is done between the statements.
func none() error { return nil }
