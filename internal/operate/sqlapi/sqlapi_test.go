package sqlapi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

const defaultTable = `CREATE TABLE outbox (
  id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL,
  counter bigint NOT NULL,
  seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20,
  '0')) STORED,
  payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now())`

// database is a database of its own in which the function is made.
type database struct {
	t    testing.TB
	url  string
	conn *pgx.Conn
	cfg  config.Config
}

func newDatabase(t testing.TB, s *pgserver.Server, table string, settings ...string) *database {
	t.Helper()
	d := &database{t: t, url: pgtest.Database(t, s)}
	d.conn = d.connect()
	if table != "" {
		d.exec(table)
	}
	d.configure(settings...)
	return d
}

// configure reads settings, path=value.
func (d *database) configure(settings ...string) {
	d.t.Helper()
	environ := []string{"OUTFLOW_POSTGRES_URL=" + d.url}
	for _, s := range settings {
		path, value, _ := strings.Cut(s, "=")
		environ = append(environ, "OUTFLOW_"+strings.ToUpper(strings.ReplaceAll(path, ".", "_"))+"="+value)
	}
	var err error
	if d.cfg, err = config.Load(nil, environ); err != nil {
		d.t.Fatal(err)
	}
}

func (d *database) connect() *pgx.Conn {
	d.t.Helper()
	conn, err := pgx.Connect(d.t.Context(), d.url)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { conn.Close(context.Background()) }) //nolint:errcheck // the test is over
	return conn
}

func (d *database) exec(statement string, args ...any) {
	d.t.Helper()
	if _, err := d.conn.Exec(d.t.Context(), statement, args...); err != nil {
		d.t.Fatalf("%s: %v", statement, err)
	}
}

func (d *database) texts(query string, args ...any) []string {
	d.t.Helper()
	r, err := d.conn.Query(d.t.Context(), query, args...)
	if err != nil {
		d.t.Fatal(err)
	}
	all, err := pgx.CollectRows(r, pgx.RowTo[string])
	if err != nil {
		d.t.Fatalf("%s: %v", query, err)
	}
	return all
}

// api makes the function, as init does.
func (d *database) api() *API {
	d.t.Helper()
	pg, err := catalog.OpenSetup(d.t.Context(), catalog.SetupConfig{Config: wiring.Catalog(d.cfg)})
	if err != nil {
		d.t.Fatal(err)
	}
	defer pg.Close()
	l, err := wiring.Apply(d.t.Context(), d.cfg, pg)
	if err != nil {
		d.t.Fatal(err)
	}
	api, err := New(d.cfg, l)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, statement := range api.Statements() {
		d.exec(statement)
	}
	return api
}

// TestTheFunctionWritesEveryShapeOfTable calls the function for each shape of table that a mapping can
// describe.
func TestTheFunctionWritesEveryShapeOfTable(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgserver.Server) {
		t.Parallel()
		for _, c := range []struct {
			name, table string
			settings    []string
			calls       []string // the arguments
			read        string
			want        []string
			ids         string
			needs       []string
		}{
			{
				"default", defaultTable, nil,
				[]string{`'d', 'a', NULL, '{"n": 1.10}'`, `'d', 'a', NULL, '[]'`, `'d', '', 7, 'null', '{}'`,
					`'d', NULL, NULL, jsonb_build_array(1)`},
				"SELECT concat_ws('|', doc_id, seq_key, payload) FROM outbox ORDER BY ctid",
				[]string{`d|a:00000000000000000001|{"n": 1.10}`, "d|a:00000000000000000002|[]",
					"d|:00000000000000000007|null", "d|:00000000000000000001|[1]"},
				"SELECT id::text FROM outbox ORDER BY ctid", nil,
			},
			{
				"default, with further columns", defaultTable, nil,
				[]string{`'d', 'a', 1, '1', '{"id": "6f1c7a52-0b5e-4d7c-8f7e-0123456789ab", "created_at": "2026-01-02T03:04:05Z"}'`},
				"SELECT concat_ws('|', doc_id, seq_key, payload, created_at AT TIME ZONE 'UTC') FROM outbox",
				[]string{"d|a:00000000000000000001|1|2026-01-02 03:04:05"}, "SELECT id::text FROM outbox",
				nil,
			},
			{
				"plain key", `CREATE TABLE "Out'box\" (id bigint GENERATED ALWAYS AS IDENTITY, doc_id uuid NOT NULL, "n" char(4) NOT NULL, counter int NOT NULL,
					seq_key text NOT NULL, body json NOT NULL, a int, c int, "odd ""'\" text)`,
				[]string{`table=public.Out'box\`, "columns.actor_id=n", "columns.payload=body"},
				[]string{`'6F1C7A52-0B5E-4D7C-8F7E-0123456789AB', 'x', NULL, '{ "a" :	1.10 }'`,
					`'6f1c7a52-0b5e-4d7c-8f7e-0123456789ab', 'x ', NULL, '1', '{"a": 5, "odd \"''\\": "it''s"}'`,
					`'6f1c7a52-0b5e-4d7c-8f7e-0123456789ab', 'x', 3, '1', '{"seq_key": "given", "c": null}'`},
				`SELECT concat_ws('|', seq_key, body, a, c, "odd ""'\") FROM "Out'box\" ORDER BY id`,
				[]string{"x:00000000000000000001|{ \"a\" :\t1.10 }", "x:00000000000000000002|1|5|it's",
					"given|1"}, `SELECT id::text FROM "Out'box\" ORDER BY id`, nil,
			},
			{
				"topic and message", `CREATE TABLE outbox (id bigint GENERATED BY DEFAULT
					AS IDENTITY PRIMARY KEY, topic text NOT NULL, message bytea NOT NULL,
					state text NOT NULL DEFAULT 'pending')`, []string{"columns.doc_id=topic", "columns.payload=message"},
				[]string{`'orders', NULL, NULL, '\x00ff'`, `'orders', '', NULL, '', '{"state": "new"}'`},
				"SELECT concat_ws('|', topic, encode(message, 'hex'), state) FROM outbox ORDER BY id",
				[]string{"orders|00ff|pending", "orders||new"},
				"SELECT id::text FROM outbox ORDER BY id", nil,
			},
			{
				"aggregate, partitioned", `CREATE TABLE events (event_id bigint NOT NULL,
					aggregate_type varchar(8) NOT NULL, event_type text, payload text NOT NULL,
					partition_key varchar(4) NOT NULL,
					created_at timestamptz NOT NULL DEFAULT '2026-02-02') PARTITION BY RANGE (created_at);
					CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')`,
				[]string{"table=public.events", "columns.id=event_id", "columns.doc_id=partition_key"},
				[]string{`'k', NULL, NULL, '', '{"event_id": 5, "aggregate_type": "order"}'`},
				"SELECT concat_ws('|', event_id, aggregate_type, payload, partition_key) FROM events",
				[]string{"5|order||k"},
				"SELECT event_id::text FROM events", []string{"event_id", "aggregate_type"},
			},
			{
				"no id, no actor",
				`CREATE TABLE outbox (doc_id text, counter bigint, seq_key text NOT NULL, payload jsonb)`,
				nil,
				[]string{`'d', NULL, NULL, '1', '{"seq_key": "x"}'`,
					`'d', NULL, NULL, '1', '{"seq_key": "w"}'`},
				"SELECT concat_ws('|', doc_id, counter, seq_key) FROM outbox", []string{"d|1|x", "d|2|w"}, "",
				[]string{"seq_key"},
			},
		} {
			t.Run(c.name, func(t *testing.T) {
				d := newDatabase(t, s, c.table, c.settings...)
				d.api()
				if api := d.api(); !slices.Equal(api.Needs, c.needs) { // again is the same
					t.Errorf("needs %q", api.Needs)
				}
				var ids []string
				for _, call := range c.calls {
					ids = append(ids, d.texts("SELECT coalesce(outflow.enqueue("+call+"), '')")...)
				}
				if got := d.texts(c.read); !slices.Equal(got, c.want) {
					t.Errorf("the table has\n%q, want\n%q", got, c.want)
				}
				if c.ids != "" && !slices.Equal(ids, d.texts(c.ids)) {
					t.Errorf("ids %q", ids)
				}
			})
		}
	})
}

// A column's name, which whoever owns the table has chosen, stays a name in the function: it does not end its
// text.
func TestAHostileColumnNameStaysAName(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"x$outflow$; DROP TABLE outbox; --", "$outflow$", "$outflow1$ $outflow$",
		"$$", "a'; $q$"} {
		d := newDatabase(t, pgtest.Server(t), "CREATE TABLE outbox (doc_id text, payload text, "+quote(name)+
			" text NOT NULL)")
		if api := d.api(); !slices.Equal(api.Needs, []string{name}) {
			t.Errorf("%q: needs %q", name, api.Needs)
		}
		d.exec("SELECT outflow.enqueue('d', NULL, NULL, 'p', jsonb_build_object($1::text, 'v'))", name)
		if got := d.texts("SELECT " + quote(name) + " FROM outbox"); !slices.Equal(got, []string{"v"}) {
			t.Errorf("%q: %q", name, got)
		}
	}
}

// TestTheFunctionRefusesWhatTheProducerRefuses: the same is refused as in package producer, with what, value
// and cure.
func TestTheFunctionRefusesWhatTheProducerRefuses(t *testing.T) {
	t.Parallel()
	s := pgtest.Server(t)
	d := newDatabase(t, s, defaultTable, "sink.max_payload=1KiB")
	d.api()
	topic := newDatabase(t, s, "CREATE TABLE outbox (id int NOT NULL, doc_id varchar(3) NOT NULL, payload "+
		"text NOT NULL)")
	topic.api()
	message := newDatabase(t, s, "", "source=message", "sink.max_payload=1KiB")
	message.api()
	for _, c := range []struct {
		d    *database
		call string
		want []string
	}{
		{d, "'', 'a', 1, '1'", []string{"doc_id ''", "empty", "Give"}},
		{d, "NULL, 'a', 1, '1'", []string{"doc_id NULL", "empty"}},
		{d, "'d', 'a', -1, '1'", []string{"counter '-1'", "below 0", "NULL for the next"}},
		{d, "'d', 'a', 1, NULL", []string{"payload NULL", "missing"}},
		{d, "'d', 'a', 1, '1', '[]'", []string{"columns '[]'", "no JSON object"}},
		{d, "'d', 'a', 1, '{'", []string{"json"}},
		{d, "'d', 'a', 1, to_jsonb(repeat('x', 800))", []string{"payload", "more than sink.max_payload, 1024",
			"--sql-api again"}},
		{d, "'d', 'a', 1, '1', '{\"typ\": 1}'", []string{`"typ"`}},
		{d, "'d', 'a', 1, '1', '{\"doc_id\": \"e\"}'", []string{`"doc_id"`}},
		{topic, "'d', 'a', NULL, '1', '{\"id\": 1}'",
			[]string{"actor_id 'a'", "public.outbox has no column"}},
		{topic, "'d', NULL, 1, '1', '{\"id\": 1}'", []string{"counter '1'", "public.outbox has no column"}},
		{topic, "'d', NULL, NULL, '1'", []string{"columns NULL", "must be given: id"}},
		{topic, "'d', NULL, NULL, '1', '{\"x\": 1}'", []string{"must be given: id"}},
		{topic, "'long', NULL, NULL, '1', '{\"id\": 1}'", []string{"varying(3)"}},
		{message, "'', 'a', 1, '1'", []string{"doc_id ''", "empty"}},
		{message, "'d', 'a', 1, to_jsonb(repeat('x', 800))", []string{"more than sink.max_payload, 1024"}},
		{message, "'d', 'a', 1, (repeat('[', 1000) || repeat(']', 1000))::jsonb",
			[]string{"nested deeper than 999"}},
		{message, "'d', 'a', 1, (repeat('{\"a\":', 1000) || '1' || repeat('}', 1000))::jsonb",
			[]string{"nested deeper than 999"}},
		{message, "'d', 'a', 1, (repeat('[', 999) || repeat(']', 999))::jsonb",
			[]string{"more than sink.max_payload"}},
		{message, "'d', 'a', 1, '1', (SELECT jsonb_object_agg(i, i) FROM generate_series(1, 257) i)",
			[]string{"more than 256 names"}},
	} {
		_, err := c.d.conn.Exec(t.Context(), "SELECT outflow.enqueue("+c.call+")")
		if err == nil {
			t.Errorf("enqueue(%s) passed", c.call)
			continue
		}
		text := err.Error()
		if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) {
			text += ". " + pgErr.Hint
		}
		for _, part := range c.want {
			if !strings.Contains(text, part) {
				t.Errorf("enqueue(%s): %q is not in %s", c.call, part, text)
			}
		}
	}
}

// TestCountersHaveNoGapAfterRollbacks: calls without a counter from many transactions, half of them rolled
// back.
func TestCountersHaveNoGapAfterRollbacks(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t), defaultTable)
	d.exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d0', 'a', 7, '1'), ('d0', " +
		"'a', 3, '1')")
	d.api()
	var all sync.WaitGroup
	failed := make([]error, 4)
	for w := range failed {
		conn := d.connect()
		all.Go(func() {
			for i := range 50 {
				_, err := conn.Exec(t.Context(), fmt.Sprintf("BEGIN; SELECT outflow.enqueue('d%d', 'a', "+
					"NULL, '1'); %s", i%2, []string{"COMMIT", "ROLLBACK"}[(i/2+w)%2]))
				if err != nil {
					failed[w] = err
				}
			}
		})
	}
	all.Wait()
	for _, err := range failed {
		if err != nil {
			t.Fatal(err)
		}
	}
	got := d.texts(`SELECT concat_ws(' ', doc_id, min(counter), max(counter), count(DISTINCT counter),
		count(*)) FROM outbox
		WHERE payload = '1' AND NOT (doc_id = 'd0' AND counter < 8) GROUP BY doc_id ORDER BY doc_id`)
	if want := []string{"d0 8 57 50 50", "d1 1 50 50 50"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q: the first are taken by rows from before", got, want)
	}
}

// TestItHasTheRightsOfTheCaller: EXECUTE alone lets nobody write.
func TestItHasTheRightsOfTheCaller(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t), defaultTable)
	d.api()
	role := "caller_" + d.texts("SELECT current_database()::text")[0]
	d.exec("CREATE ROLE " + role)
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), d.url)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close(context.Background()) //nolint:errcheck // the test is over
		if _, err := conn.Exec(context.Background(), "RESET ROLE; DROP SCHEMA evil CASCADE; DROP OWNED BY "+
			role+"; DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	d.exec("GRANT USAGE ON SCHEMA outflow TO " + role)
	d.exec("SET ROLE " + role)
	call := "SELECT outflow.enqueue('d', 'a', NULL, '1')"
	if _, err := d.conn.Exec(t.Context(), call); err == nil ||
		!strings.Contains(err.Error(), "permission denied") {
		t.Errorf("without rights on the table: %v", err)
	}
	d.exec("RESET ROLE")
	d.exec("GRANT INSERT, SELECT (id) ON outbox TO " + role)
	d.exec("GRANT SELECT, INSERT, UPDATE ON outflow_counter TO " + role)
	// Nobody's objects stand in for PostgreSQL's own.
	d.exec("CREATE SCHEMA evil AUTHORIZATION " + role)
	d.exec("CREATE FUNCTION evil.octet_length(text) RETURNS int LANGUAGE sql AS 'SELECT 2000000000'")
	d.exec("SET search_path = evil, pg_catalog")
	d.exec("SET ROLE " + role)
	d.exec(call)
	d.exec("RESET ROLE")
	if got := d.texts("SELECT seq_key FROM public.outbox"); !slices.Equal(got,
		[]string{"a:00000000000000000001"}) {
		t.Errorf("keys %q", got)
	}
}

// TestAFunctionMadeAgainReplacesTheOld: made again for another table, the function is the only one of its
// name.
func TestAFunctionMadeAgainReplacesTheOld(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t), defaultTable)
	d.api()
	d.exec("ALTER TABLE outbox ALTER payload TYPE text, DROP seq_key, ADD kind text NOT NULL")
	d.api()
	d.exec(`SELECT outflow.enqueue('d', 'a', NULL, 'no JSON', '{"kind": "k"}')`)
	d.configure("source=message")
	d.api()
	d.exec("SELECT outflow.enqueue('d', 'a', NULL, '1')")
	got := d.texts("SELECT oid::regprocedure::text || provolatile::text || prosecdef::text FROM pg_proc " +
		"WHERE proname = 'enqueue'")
	if want := []string{"outflow.enqueue(text,text,bigint,jsonb,jsonb)vfalse"}; !slices.Equal(got, want) {
		t.Errorf("functions %q", got)
	}
	if got := d.texts("SELECT counter::text FROM outflow_counter"); !slices.Equal(got, []string{"2"}) {
		t.Errorf("counters %q: both sources count on", got)
	}
}

// TestAMappingWithNothingToFillInIsRefused: a mapping that leaves nothing to fill in.
func TestAMappingWithNothingToFillInIsRefused(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t), "CREATE TABLE outbox (id int, x text, doc_id text GENERATED "+
		"ALWAYS AS (x || '!') STORED, payload text)")
	pg, err := catalog.OpenSetup(t.Context(), catalog.SetupConfig{Config: wiring.Catalog(d.cfg)})
	if err != nil {
		t.Fatal(err)
	}
	defer pg.Close()
	l, err := wiring.Apply(t.Context(), d.cfg, pg)
	if err != nil {
		t.Fatal(err)
	}
	_, err = New(d.cfg, l)
	if f := outbox.FaultOf(err); f == nil || f.Class != outbox.Fatal ||
		!strings.Contains(err.Error(), `column "doc_id"`) {
		t.Errorf("got %v", err)
	}
}
