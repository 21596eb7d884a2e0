package producer

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// TestACounterOrIDThatIsTakenNamesTheEvent: where a unique constraint watches, a counter or an id that was
// taken in another transaction is an error that names the event.
func TestACounterOrIDThatIsTakenNamesTheEvent(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, defaultTable, "CREATE UNIQUE INDEX once ON outbox (doc_id, actor_id, counter)")
	d.both(t, func(t *testing.T, call inTx) {
		o := outboxOf(t, Config{})
		first := mustCall(t, call, o, Event{Document: "d, e", Actor: "a", Counter: 7, Payload: []byte("1")})
		_, err := call(t.Context(), o, Event{Document: "d, e", Actor: "a", Counter: 6, Payload: []byte("1")},
			Event{Document: "d, e", Actor: "a", Counter: 7, Payload: []byte("1")})
		wantError(t, err, `event 1 (Document "d, e", Actor "a", Counter 7`, "once", "already exists",
			"NextCounter")
		if !errors.Is(err, ErrTaken) {
			t.Error("not ErrTaken")
		}
		_, err = call(t.Context(), o, Event{Document: "d", Actor: "a", Counter: 8, ID: first[0].ID,
			Payload: []byte("1")})
		wantError(t, err, `event 0 (Document "d"`, first[0].ID, "outbox_pkey")
		if got := d.texts("SELECT counter::text FROM outbox"); len(got) != 1 {
			t.Errorf("counters %q", got)
		}
		d.exec("DELETE FROM outbox")
	})
}

func wantError(t testing.TB, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %v", part, err)
		}
	}
}

// TestWhatPostgreSQLRefusesIsReportedWithAHint: what PostgreSQL alone can refuse is reported with a hint,
// and a table that has changed is read again.
func TestWhatPostgreSQLRefusesIsReportedWithAHint(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	d.both(t, func(t *testing.T, call inTx) {
		d.exec("DROP TABLE IF EXISTS outbox")
		o := outboxOf(t, Config{})
		e := Event{Document: "d", Actor: "a", Counter: 1, Payload: []byte("1")}
		_, err := call(t.Context(), o, e)
		wantError(t, err, "table public.outbox is not there", "outflow init")
		d.exec(defaultTable)
		mustCall(t, call, o, e)

		d.exec("ALTER TABLE outbox ADD needed int, DROP seq_key, ALTER payload TYPE json, ALTER doc_id " +
			"TYPE varchar(3)")
		d.exec("UPDATE outbox SET needed = 1")
		d.exec("ALTER TABLE outbox ALTER needed SET NOT NULL")
		_, err = call(t.Context(), o, e)
		wantError(t, err, "enqueue 1 event into table public.outbox", `"needed"`, "Columns")
		e.Columns = map[string]any{"needed": 5}
		mustCall(t, call, o, e) // the table is read again

		d.exec("ALTER TABLE outbox RENAME actor_id TO author")
		e.Columns = nil
		_, err = call(t.Context(), o, e)
		wantError(t, err, `"actor_id"`, "the next call reads it again")
		e.Actor, e.Columns = "", map[string]any{"needed": 5, "author": "me"}
		mustCall(t, call, o, e)
		e.Document = "long"
		_, err = call(t.Context(), o, e)
		wantError(t, err, "event 0: Document", "3 characters")

		d.exec("ALTER TABLE outbox ADD bits bit(3)")
		cut := e
		cut.Document, cut.Columns = "yes", map[string]any{"needed": 5, "author": "me", "bits": "1011"}
		_, err = call(t.Context(), o, cut)
		wantError(t, err, "bit string length 4 does not match") // a cast to bit(3) would cut it in silence

		d.exec(
			`CREATE OR REPLACE FUNCTION pg_temp.drop_it() RETURNS trigger LANGUAGE plpgsql
				AS 'BEGIN RETURN NULL; END'`)
		d.exec("CREATE TRIGGER t BEFORE INSERT ON outbox FOR EACH ROW WHEN (new.doc_id = 'no') EXECUTE " +
			"FUNCTION pg_temp.drop_it()")
		no := e
		no.Document, no.Counter = "no", 2
		e.Document = "yes"
		_, err = call(t.Context(), o, e, no)
		wantError(t, err, "1 rows were inserted", "trigger")
	})
}

// TestAMappingThatTheTableLacksIsRefused: a mapping that the table does not have, and a table that nobody
// publishes.
func TestAMappingThatTheTableLacksIsRefused(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, "CREATE TABLE outbox (id int, doc_id text, payload text)",
		"CREATE TABLE other (doc_id text, payload text)",
		"CREATE PUBLICATION one FOR TABLE outbox WITH (publish = 'insert')",
		"CREATE PUBLICATION updates FOR TABLE outbox WITH (publish = 'update')")
	for _, c := range []struct {
		cfg  Config
		want []string
	}{
		{Config{Columns: Columns{Document: "topic"}}, []string{`no column "topic" (Columns.Document)`,
			"id, doc_id, payload"}},
		{Config{Columns: Columns{Actor: "who"}}, []string{`no column "who" (Columns.Actor)`}},
		{Config{Columns: Columns{Payload: "-"}}, []string{"Columns.Payload"}},
		{Config{NextCounter: true}, []string{"no column for the counter"}},
		{Config{Table: "other", Publication: "one"}, []string{`publication "one" does not publish`,
			"skipped in silence"}},
		{Config{Publication: "updates"}, []string{`publication "updates"`}},
		{Config{Publication: "none"}, []string{`publication "none"`}},
		{Config{Publication: "one"}, nil},
	} {
		_, err := d.pgx(t.Context(), outboxOf(t, c.cfg),
			Event{Document: "d", Payload: []byte("1"), ID: ""}.orID(c.want == nil))
		if c.want == nil {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		wantError(t, err, c.want...)
	}
	for _, cfg := range []Config{
		{Table: "a.b.c"}, {Table: `"a`}, {Table: "a."}, {Table: ".a"}, {Table: `"a"b`}, {Table: "a\x00"},
		{CounterTable: "x.y.z"}, {MaxPayload: 100},
		{MaxPayload: 65 << 20}, {Headers: map[string]string{"A": ""}},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v passed", cfg)
		}
	}
	for text, want := range map[string]name{
		"a": {"", "a"}, "a.b": {"a", "b"}, `"a.b".c`: {"a.b", "c"}, `a."b""c."`: {"a", `b"c.`},
		"Über.Maß": {"Über", "Maß"},
	} {
		if got, err := parseName("Table", text); err != nil || got != want {
			t.Errorf("%s is %v, %v", text, got, err)
		}
	}
}

// orID gives the event the id that the table of TestAMappingThatTheTableLacksIsRefused wants.
func (e Event) orID(give bool) Event {
	if give {
		e.ID = "1"
	}
	return e
}

// turns counts how often the server said on a connection that it is ready for a query: once for each round
// trip.
type turns struct {
	net.Conn
	n    *atomic.Int64
	head []byte // of the message that is being read: type and length
	rest int    // what is left of it
}

func (c *turns) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	for b := b[:n]; len(b) > 0; {
		skip := min(c.rest, len(b))
		if b, c.rest = b[skip:], c.rest-skip; len(b) == 0 {
			break
		}
		if c.head, b = append(c.head, b[0]), b[1:]; len(c.head) < 5 {
			continue
		}
		if c.head[0] == 'Z' {
			c.n.Add(1)
		}
		c.head, c.rest = c.head[:0], int(binary.BigEndian.Uint32(c.head[1:]))-4
	}
	return n, err
}

// TestACallIsOneRoundTrip: a call is one round trip, whatever the number of events, with NextCounter too:
// once pgx has prepared the statement on a connection, and from the first on where it prepares none.
func TestACallIsOneRoundTrip(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, defaultTable)
	counting := outboxOf(t, Config{NextCounter: true})
	d.exec(counting.Schema())
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol} {
		cfg, err := pgx.ParseConfig(d.url)
		if err != nil {
			t.Fatal(err)
		}
		cfg.DefaultQueryExecMode = mode
		var n atomic.Int64
		dial := cfg.DialFunc
		cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial(ctx, network, addr)
			return &turns{Conn: c, n: &n}, err
		}
		for _, o := range []*Outbox{outboxOf(t, Config{}), counting,
			messageOf(t, Config{NextCounter: true})} {
			// the columns are read once for all connections
			mustCall(t, d.pgx, o, many(1, o.cfg.NextCounter)...)
			conn, err := pgx.ConnectConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			tx, err := conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for call, size := range []int{1, 2, 10_000} {
				before := n.Load()
				if _, err := o.Enqueue(t.Context(), tx, many(size, o.cfg.NextCounter)...); err != nil {
					t.Fatal(err)
				}
				if got := n.Load() - before; got != 1 &&
					(call > 0 || mode != pgx.QueryExecModeCacheStatement) {
					t.Errorf("mode %v: %d events took %d round trips", mode, size, got)
				}
			}
			conn.Close(t.Context()) //nolint:errcheck // nothing is kept
		}
	}
}

// many are events of ten documents.
func many(n int, nextCounter bool) []Event {
	all := make([]Event, n)
	for i := range all {
		all[i] = Event{Document: "doc-" + string(rune('0'+i%10)), Actor: "alice",
			Payload: []byte(`{"op": "insert", "at": 17, "text": "x"}`)}
		if !nextCounter {
			all[i].Counter = int64(i)
		}
	}
	return all
}

// TestOnlyATransactionTakesEvents: a pool and a connection without a transaction are refused before anything
// is sent, as the events would be published without the caller's change; a transaction that was begun by hand
// on a connection is one.
func TestOnlyATransactionTakesEvents(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, defaultTable)
	o := outboxOf(t, Config{})
	e := Event{Document: "d", Actor: "a", Counter: 1, Payload: []byte("1")}
	pool, err := pgxpool.New(t.Context(), d.url)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	pooled, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer pooled.Release()
	const refused = "no transaction is open"
	for _, q := range []Querier{pool, pooled, d.conn} {
		_, err := o.Enqueue(t.Context(), q, e)
		wantError(t, err, refused, fmt.Sprintf("%T", q))
	}
	_, err = o.EnqueueSQL(t.Context(), d.sql, e)
	wantError(t, err, refused, "*sql.DB")
	if got := d.texts("SELECT doc_id FROM outbox"); len(got) > 0 {
		t.Fatalf("the table has %q", got)
	}
	for _, q := range []interface {
		Querier
		Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	}{pooled, d.conn} {
		for _, end := range []string{"ROLLBACK", "COMMIT"} {
			if _, err := q.Exec(t.Context(), "BEGIN"); err != nil {
				t.Fatal(err)
			}
			if _, err := o.Enqueue(t.Context(), q, e); err != nil {
				t.Fatal(err)
			}
			if _, err := q.Exec(t.Context(), end); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := d.texts("SELECT doc_id FROM outbox"); len(got) != 2 {
		t.Errorf("%d events are there, want 2", len(got))
	}
}

// TestAValueThatIsNoJSONMakesNoEvent: the error names the document, and is that of encoding/json.
func TestAValueThatIsNoJSONMakesNoEvent(t *testing.T) {
	t.Parallel()
	e, err := JSONEvent("d", func() {})
	wantError(t, err, `document "d"`, "func()")
	if other := (*json.UnsupportedTypeError)(nil); !errors.As(err, &other) || e.Payload != nil {
		t.Errorf("%v, %+v", err, e)
	}
}
