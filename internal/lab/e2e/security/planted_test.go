package security

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	consume "github.com/outflowhq/outflow/consumer" // consumer is a helper of these tests
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// plant makes a twin of what pg_catalog has, in the schema public, and the operators and functions that
// pg_catalog lacks for names, text and jsonb, which win even behind it. All of them write down who has called
// them. The role that plants may only log in, and create in the schema public: PostgreSQL 14's default, which
// an upgraded database keeps.
const plant = `
CREATE TABLE public.planted_ran (who text, what text);
GRANT INSERT ON public.planted_ran TO PUBLIC;
GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC;
SET ROLE %[1]s;
CREATE FUNCTION public.planted() RETURNS boolean LANGUAGE plpgsql SECURITY INVOKER
SET search_path = pg_catalog AS $$
BEGIN INSERT INTO public.planted_ran VALUES (current_user, 'planted'); RETURN true; END $$;
CREATE DOMAIN public.text AS pg_catalog.text;
CREATE DOMAIN public.name AS pg_catalog.text;
CREATE TYPE public.mood AS ENUM ('good', 'bad');
CREATE FUNCTION public.of_mood(public.mood) RETURNS pg_catalog.text LANGUAGE plpgsql
SET search_path = pg_catalog AS
	$$BEGIN PERFORM public.planted(); RETURN 'd'; END$$;
CREATE CAST (public.mood AS pg_catalog.text) WITH FUNCTION public.of_mood(public.mood) AS IMPLICIT;
CREATE VIEW public.pg_class AS SELECT c.*, public.planted() FROM pg_catalog.pg_class c;
CREATE VIEW public.pg_replication_slots AS SELECT c.*, public.planted()
FROM pg_catalog.pg_replication_slots c;
DO $do$
DECLARE r record; n int := 0; f text;
	body text := ' LANGUAGE plpgsql SET search_path = pg_catalog AS $$BEGIN PERFORM public.planted(); RETURN NULL; END$$';
BEGIN
	FOR r IN SELECT p.proname, pg_get_function_identity_arguments(p.oid)
	AS arguments, format_type(p.prorettype, NULL) AS returns
		FROM pg_proc p WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind IN ('f', 'a')
		AND NOT proretset AND provariadic = 0
			AND proargmodes IS NULL AND pronargs > 0 AND NOT prorettype::regtype::text = ANY
			('{internal,cstring,trigger,void}')
			AND NOT EXISTS (SELECT FROM unnest(proargtypes) t
			WHERE format_type(t, NULL) ~ 'internal|cstring|"any"|handler|pg_')
			AND proname IN (%[2]s)
	LOOP
		EXECUTE format('CREATE FUNCTION public.%%I(%%s) RETURNS %%s', r.proname, r.arguments,
		r.returns) || body;
	END LOOP;
	FOR r IN SELECT format_type(t,
	NULL) AS t FROM unnest('{text,name,jsonb,bigint,int,oid}'::regtype[]) t LOOP
		FOREACH f IN ARRAY '{concat,coalesce,hashtext,to_regclass,jsonb_agg,jsonb_array_elements,format_type,host,min,max}'::text[] LOOP
			BEGIN
				EXECUTE format('CREATE FUNCTION public.%%I(%%s) RETURNS text', f, r.t) || body;
			EXCEPTION WHEN duplicate_function OR invalid_function_definition THEN NULL;
			END;
		END LOOP;
	END LOOP;
	FOR r IN SELECT DISTINCT oprname AS op, format_type(oprleft, NULL) AS lt, format_type(oprright, NULL)
	AS rt, format_type(oprresult, NULL) AS returns
		FROM pg_operator WHERE oprleft <> 0 AND oprright <> 0 AND oprnamespace = 'pg_catalog'::regnamespace
			AND oprname IN ('=', '<>', '<', '>', '<=', '>=', '||', '->', '->>', '+', '-', '/', '%%', '&')
			AND oprleft::regtype::text !~ 'any|reg|pg_' AND oprright::regtype::text !~ 'any|reg|pg_'
		UNION
		SELECT o, lt, rt, CASE WHEN o IN ('||', '->>') THEN 'text' ELSE 'boolean' END
		FROM unnest('{||,=,<>,<,>,->>}'::text[]) o,
		unnest('{text,name,jsonb,oid,bigint,integer,"\"char\"",uuid}'::text[]) lt,
			unnest('{text,name,jsonb,oid,bigint,integer,"\"char\"",uuid}'::text[]) rt
	LOOP
		BEGIN
			n := n + 1;
			EXECUTE format('CREATE FUNCTION public.planted_%%s(%%s, %%s) RETURNS %%s', n, r.lt, r.rt,
			r.returns) || body;
			EXECUTE format('CREATE OPERATOR public.%%s (LEFTARG = %%s, RIGHTARG = %%s, FUNCTION = public.planted_%%s)', r.op, r.lt, r.rt, n);
		EXCEPTION WHEN duplicate_function THEN NULL;
		END;
	END LOOP;
END $do$;
CREATE FUNCTION public.planted_state(state text, value text) RETURNS text
AS $$BEGIN PERFORM public.planted(); RETURN NULL; END$$
	LANGUAGE plpgsql SET search_path = pg_catalog;
CREATE AGGREGATE public.array_agg(pg_catalog.text) (SFUNC = public.planted_state, STYPE = pg_catalog.text);
CREATE AGGREGATE public.first_value(pg_catalog.text) (SFUNC = public.planted_state, STYPE = pg_catalog.text);
RESET ROLE`

// called are functions of pg_catalog that the program uses.
var called = strings.Fields(
	`array_agg array_position coalesce concat count current_database current_schemas current_setting encode format_type get_byte
	hash_array hashtext host json_object_agg jsonb_agg jsonb_array_elements jsonb_array_elements_text left length lower lpad max min
	octet_length pg_advisory_xact_lock pg_current_wal_lsn pg_get_expr pg_has_role pg_get_userbyid
	pg_is_in_recovery pg_logical_emit_message pg_partition_ancestors pg_table_is_visible pg_walfile_name quote_ident
	set_config sha256 sum textcat textsend to_json to_jsonb to_regclass upper`,
)

// trapped makes a database in which a stranger has planted what it could, and a superuser whose search_path
// is as given. The function that it returns fails the test if any of it was called.
func trapped(t *testing.T, srv *pgserver.Server, path string) (conn *pgx.Conn, victim string,
	untouched func(after string)) {
	t.Helper()
	raw := pgtest.Database(t, srv)
	conn = harness.Connect(t, raw)
	database := harness.Value[string](t, conn, "SELECT current_database()")
	mallory, role := "mallory_"+database, "victim_"+database
	harness.Exec(t, conn, "CREATE ROLE "+mallory+" LOGIN")
	harness.Exec(t, conn, "CREATE ROLE "+role+" LOGIN SUPERUSER")
	t.Cleanup(func() { dropRole(t, raw, mallory); dropRole(t, raw, role) })
	harness.Exec(t, conn, fmt.Sprintf(plant, mallory, "'"+strings.Join(called, "', '")+"'"))
	harness.Exec(t, conn, "ALTER ROLE "+role+" IN DATABASE "+database+" SET search_path = "+path)
	u, err := url.Parse(raw)
	harness.Must(t, err)
	u.User = url.User(role)
	untouched = func(after string) {
		t.Helper()
		rows, err := conn.Query(t.Context(),
			"SELECT DISTINCT who FROM public.planted_ran WHERE who <> $1::pg_catalog.text", "postgres")
		harness.Must(t, err)
		who, err := pgx.CollectRows(rows, pgx.RowTo[string])
		harness.Must(t, err)
		if len(who) > 0 {
			t.Errorf("after outflow %s: planted code ran as %v", after, who)
			harness.Exec(t, conn, "TRUNCATE public.planted_ran")
		}
	}
	// It works: who is careless calls it.
	careless := harness.Connect(t, u.String())
	harness.Exec(t, careless, "SELECT 'a'::pg_catalog.text || 'b'::pg_catalog.name")
	harness.Value[int](t, conn, "SELECT 1 FROM public.planted_ran WHERE who "+
		"OPERATOR(pg_catalog.=) $1 LIMIT 1", role)
	harness.Exec(t, conn, "TRUNCATE public.planted_ran")
	return conn, u.String(), untouched
}

// dropRole drops a role with all that it owns in the database.
func dropRole(t *testing.T, url, role string) {
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	harness.Must(t, err)
	defer conn.Close(ctx) //nolint:errcheck // the test is over
	if _, err := conn.Exec(ctx, "DROP OWNED BY "+role+" CASCADE; DROP ROLE "+role); err != nil {
		t.Error(err)
	}
}

// TestNothingPlantedIsCalled: who may create operators, functions and casts in a schema of the search_path
// gets none of them called by any command, with whatever rights it runs.
func TestNothingPlantedIsCalled(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		conn, url, untouched := trapped(t, srv, "public, pg_catalog")
		ns := natstest.Server(t)
		o := harness.New(t, url, ns.URL(), harness.SlotName("planted"), "REORDER_HORIZON=0s")
		o.UseStream(strings.ToUpper(o.Slot))
		o.Set("SINK_DURABLE_AFTER=0s")
		run := func(args ...string) {
			t.Helper()
			o.MustRun(args...)
			untouched(strings.Join(args, " "))
			if t.Failed() {
				t.FailNow()
			}
		}
		run("init", "--sql-api")
		o.Start()
		o.AwaitReady()
		for i := range 3 {
			harness.Insert(t, conn, "doc", i, `{}`)
		}
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 3)
		run("status")
		o.MustStop(t)
		untouched("run")
		run("inspect")
		run("drain")
		run("repair")
		run("replay", "--from", "table", "--doc", "doc", "--to", "stdout")
	})
}

// TestNothingPlantedIsCalledForConsumers: a consumer's SQL runs in the application's own sessions, and that
// of the commands in such as lead through poolers; there nobody pins a search_path.
func TestNothingPlantedIsCalledForConsumers(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		conn, url, untouched := trapped(t, srv, `"$user", public`)
		ns := natstest.Server(t)
		o := harness.New(t, url, ns.URL(), harness.SlotName("planted"), "REORDER_HORIZON=0s",
			"CONSUMER_DATABASE="+url)
		o.UseStream(strings.ToUpper(o.Slot))
		o.Init()
		o.Start()
		o.AwaitReady()
		pool, err := pgxpool.New(t.Context(), url)
		harness.Must(t, err)
		t.Cleanup(pool.Close)
		database := harness.Value[string](t, conn, "SELECT current_database()")
		harness.Exec(t, conn, "SET ROLE mallory_"+database)
		harness.Exec(t, conn, consume.Tables("public"))
		harness.Exec(t, conn, "RESET ROLE")
		foreign, err := consume.New(harness.JetStream(t, ns.URL()), consume.Postgres(pool),
			consume.Config{Name: "orders", Stream: o.Stream})
		harness.Must(t, err)
		err = foreign.Run(t.Context(), func(context.Context, pgx.Tx, *consume.Event) error { return nil })
		if err == nil || !strings.Contains(err.Error(), "mallory_"+database) {
			t.Fatalf("tables that a stranger has prepared: %v", err)
		}
		harness.Exec(t, conn,
			"DROP TABLE public.outflow_consumer, public.outflow_member, public.outflow_mark, "+
				"public.outflow_parked")
		until := func(enough func() bool, handler consume.Handler) {
			t.Helper()
			c, err := consume.New(harness.JetStream(t, ns.URL()), consume.Postgres(pool), consume.Config{
				Name: "orders", Stream: o.Stream, MaxAttempts: 1, ParkAfter: 1,
				Backoff: consume.Backoff{First: time.Millisecond, Max: time.Millisecond},
			})
			harness.Must(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- c.Run(ctx, handler) }()
			harness.Eventually(t, "it has come so far", func() error {
				if !enough() {
					return errors.New("not yet")
				}
				return nil
			})
			cancel()
			harness.Must(t, <-ended)
			untouched("consumer")
		}
		count := func(sql string) (n int) {
			_ = conn.QueryRow(t.Context(), sql).Scan(&n) // the table may not be there yet
			return n
		}
		for i := range 3 {
			harness.Insert(t, conn, "doc", i, `{}`)
		}
		bad := func(context.Context, pgx.Tx, *consume.Event) error { return errors.New("bad") }
		good := func(context.Context, pgx.Tx, *consume.Event) error { return nil }
		until(func() bool { return count("SELECT count(*) FROM outflow_parked") == 3 }, bad)
		for _, args := range [][]string{
			{"consumer", "list"}, {"parked", "list"}, {"parked", "list", "orders"},
			{"parked", "show", "orders", "doc"}, {"parked", "retry", "orders", "doc"},
		} {
			o.MustRun(args...)
			untouched(strings.Join(args, " "))
		}
		until(func() bool { return count("SELECT count(*) FROM outflow_parked") == 0 }, good)
		o.MustRun("consumer", "rewind", "orders", "--to", "start", "--yes")
		untouched("consumer rewind")
	})
}
