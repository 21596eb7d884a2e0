package consumeradmin

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TestParkedEventsAreErased: those that are named go, and where the first one of a document does, for which
// the others wait, they are released. What can't be looked into is named.
func TestParkedEventsAreErased(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`INSERT INTO outflow_parked (name, document, hash, source, seq, subject, headers, data, published_at,
			position, event_id, cause)
		SELECT 'texts', document, 1, source, seq, subject, '{"Outflow": ["v=1"], "b": [{"base64": "aGk="}]}', 'x',
			now(), seq || '-0', '', cause
		FROM (VALUES ('mixed', 'replay', 2, 'other', 'poison'), ('d', 'live', 3, 'gone', 'poison'), ('d', 'live', 5, 'gone', 'behind'),
			('d', 'live', 9, 'later', 'behind'), ('d', 'live', 10, 'later', 'behind'),
			('mixed', 'live', 4, 'other', 'poison'), ('mixed', 'live', 6, 'gone', 'behind'),
			('whole', 'replay', 7, 'gone', 'poison')
		) v (document, source, seq, subject, cause)`)
	stranger := w.DB.Config().Database + "_stranger"
	for _, sql := range []string{"CREATE ROLE " + stranger, "CREATE SCHEMA hidden",
		"CREATE TABLE hidden.outflow_parked ()", "ALTER TABLE hidden.outflow_parked OWNER TO " + stranger} {
		w.exec(sql)
	}
	_, err := w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Metadata: map[string]string{
		metadataName: "elsewhere"}})
	must(t, err)
	sequences := map[uint64]bool{}
	hits := 0
	run := func(erase bool) erasure.FoundParked {
		t.Helper()
		in := []postgres.Target{{URL: w.url}}
		found, err := EraseParked(t.Context(), w.API, []string{"OUTBOX"}, in, erase,
			func(e *erasure.Parked) bool {
				if e.Header.Get("b") != "hi" || e.Stream != "OUTBOX" || e.Data != nil {
					t.Errorf("%+v", e)
				}
				sequences[e.Sequence] = true
				return e.Subject == "gone"
			}, func() { hits++ })
		must(t, err)
		if said := strings.Join(found.Unseen, "; "); !strings.Contains(said, "consumer elsewhere") ||
			!strings.Contains(said, "schema hidden") || len(found.Seen) != 1 {
			t.Errorf("%+v", found)
		}
		return found
	}
	if found := run(false); found.Events != 4 {
		t.Errorf("%d would go", found.Events)
	}
	if found := run(true); found.Events != 4 || hits != 2 {
		t.Errorf("%d went, %d hits", found.Events, hits)
	}
	if sequences[2] || sequences[7] || !sequences[0] || !sequences[9] {
		t.Errorf("sequences %v", sequences)
	}
	var left string
	must(t, w.DB.QueryRow(t.Context(), `SELECT string_agg(concat_ws(' ', document, source, seq, release), ', '
		ORDER BY ord) FROM outflow_parked`).Scan(&left))
	if left != "mixed replay 2 , d live 9 retry, d live 10 , mixed live 4 " {
		t.Errorf("left: %s", left)
	}
	if found := run(true); found.Events != 0 {
		t.Errorf("%d went again", found.Events)
	}
}

// TestParkedEventsThatAreHiddenAreNotPassedOver: a certificate would say that the database was looked at.
func TestParkedEventsThatAreHiddenAreNotPassedOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`INSERT INTO outflow_parked (name, document, hash, source, seq, subject, headers, data, published_at,
			position, event_id, cause)
		VALUES ('texts', 'd', 1, 'live', 5, 'gone', '{"Outflow": ["v=1"]}', 'x', now(), '5-0', '', 'poison')`)
	find := func(in postgres.Target, erase bool) (erasure.FoundParked, error) {
		return EraseParked(t.Context(), w.API, []string{"OUTBOX"}, []postgres.Target{in}, erase,
			func(*erasure.Parked) bool { return true }, func() {})
	}
	target := w.reader("outflow_consumer, outflow_mark, outflow_parked")
	if found, err := find(target, false); err != nil || found.Events != 1 {
		t.Errorf("where nothing is hidden: %+v, %v", found, err)
	}
	w.exec(`ALTER TABLE outflow_parked ENABLE ROW LEVEL SECURITY`)
	found, err := find(target, false)
	if f := outbox.FaultOf(err); f == nil || f.Code != "no_right" {
		t.Errorf("where a policy hides them: %+v, %v", found, err)
	}
	target.Setting = DefaultDatabase // nobody has said that there are consumers in it
	if found, err = find(target, true); err != nil || len(found.Unseen) != 1 ||
		!strings.Contains(found.Unseen[0], "the role may not look into it") {
		t.Errorf("in the default database: %+v, %v", found, err)
	}
	// With this PostgreSQL says of each error where it was, and with what values.
	target.URL += " log_parameter_max_length_on_error=-1"
	role, _, _ := strings.Cut(target.String(), "@")
	w.exec(`REVOKE SELECT ON outflow_consumer FROM ` + role)
	if found, err = find(target, true); err != nil || len(found.Unseen) != 1 {
		t.Errorf("where PostgreSQL logs values: %+v, %v", found, err)
	}
	shadowed := w.shadowed()
	for _, erase := range []bool{false, true} {
		if found, err := find(shadowed, erase); err != nil || found.Events != 1 {
			t.Errorf("where an operator hides them: %+v, %v", found, err)
		}
	}
	if found, err := find(shadowed, true); err != nil || found.Events != 0 {
		t.Errorf("after it has gone: %+v, %v", found, err)
	}
}

// TestATriggerOnParkedEventsThatFailsIsNamed: it runs with the search_path of the erasure, in which nothing
// hides an event. One that names its schema, or has a search_path of its own, is run.
func TestATriggerOnParkedEventsThatFailsIsNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`INSERT INTO outflow_parked (name, document, hash, source, seq, subject, headers, data, published_at,
			position, event_id, cause)
		VALUES ('texts', 'd', 1, 'live', 5, 'gone', '{"Outflow": ["v=1"]}', 'x', now(), '5-0', '', 'poison')`)
	w.exec(`CREATE TABLE audit (seq bigint)`)
	w.exec(`CREATE FUNCTION audited() RETURNS trigger LANGUAGE plpgsql AS
		'BEGIN INSERT INTO audit VALUES (OLD.seq); RETURN OLD; END'`)
	w.exec(`CREATE TRIGGER audited BEFORE DELETE ON outflow_parked FOR EACH ROW EXECUTE FUNCTION audited()`)
	run := func() (erasure.FoundParked, error) {
		return EraseParked(t.Context(), w.API, []string{"OUTBOX"},
			[]postgres.Target{{Pooled: true, URL: w.url}}, true,
			func(*erasure.Parked) bool { return true }, func() {})
	}
	_, err := run()
	if f := outbox.FaultOf(err); err == nil || f != nil && f.Code == "consumer_tables" ||
		!strings.Contains(err.Error(), "audited()") {
		t.Errorf("%v", err)
	}
	w.exec(`ALTER FUNCTION audited SET search_path FROM CURRENT`)
	if found, err := run(); err != nil || found.Events != 1 {
		t.Errorf("%+v, %v", found, err)
	}
}

// TestParkedEventsThatATriggerKeepsAreNotSaidToBeErased.
func TestParkedEventsThatATriggerKeepsAreNotSaidToBeErased(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`INSERT INTO outflow_parked (name, document, hash, source, seq, subject, headers, data, published_at,
			position, event_id, cause)
		VALUES ('texts', 'd', 1, 'live', 5, 'gone', '{"Outflow": ["v=1"]}', 'x', now(), '5-0', '', 'poison')`)
	w.exec(`CREATE FUNCTION keeps() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`)
	w.exec(`CREATE TRIGGER keeps BEFORE DELETE ON outflow_parked FOR EACH ROW EXECUTE FUNCTION keeps()`)
	in := []postgres.Target{{Pooled: true, URL: w.url}}
	_, err := EraseParked(t.Context(), w.API, []string{"OUTBOX"}, in, true,
		func(*erasure.Parked) bool { return true }, func() {})
	if f := outbox.FaultOf(err); f == nil || f.Code != "erase_kept" {
		t.Errorf("%v", err)
	}
}

// TestNoStatementIsLeftInASession: a pooler gives a session to others between two transactions, who may have
// statements of the same name, and another one to us, which does not have ours.
func TestNoStatementIsLeftInASession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`INSERT INTO outflow_parked (name, document, hash, source, seq, subject, headers, data, published_at,
			position, event_id, cause)
		VALUES ('texts', 'd', 1, 'live', 5, 'gone', '{"Outflow": ["v=1"]}', 'x', now(), '5-0', '', 'poison')`)
	w.exec(`CREATE TABLE public.left_behind AS SELECT statement FROM pg_prepared_statements LIMIT 0`)
	w.exec(`CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN
		INSERT INTO public.left_behind SELECT statement FROM pg_prepared_statements; RETURN OLD; END'`)
	w.exec(`CREATE TRIGGER look BEFORE DELETE ON outflow_parked FOR EACH ROW EXECUTE FUNCTION look()`)
	in := []postgres.Target{{Pooled: true, URL: w.url}}
	found, err := EraseParked(t.Context(), w.API, []string{"OUTBOX"}, in, true,
		func(*erasure.Parked) bool { return true }, func() {})
	must(t, err)
	var left int
	must(t, w.DB.QueryRow(t.Context(), "SELECT count(*) FROM public.left_behind").Scan(&left))
	if found.Events != 1 || left > 0 {
		t.Errorf("%+v, %d statements", found, left)
	}
}

// TestParkedEventsAreNotErasedAtAStandby, which may not have those that were parked a moment ago.
func TestParkedEventsAreNotErasedAtAStandby(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	standby, err := pgtest.Own(t, 0).Standby(t.Context(), "standby", nil)
	must(t, err)
	t.Cleanup(func() { must(t, standby.Remove()) })
	found, err := EraseParked(t.Context(), w.API, []string{"OUTBOX"}, []postgres.Target{{
		URL: standby.URL("postgres"), Setting: "--database"}}, false, nil, nil)
	if f := outbox.FaultOf(err); f == nil || f.Code != "in_recovery" {
		t.Errorf("%+v, %v", found, err)
	}
}

// TestTheDefaultDatabaseOfAStandbyIsThatOfThePrimary: postgres.write_url is asked then, if it is the very
// database that postgres.url is. Elsewhere there would be no consumers, and what they need would go.
func TestTheDefaultDatabaseOfAStandbyIsThatOfThePrimary(t *testing.T) {
	t.Parallel()
	primary := pgtest.Own(t, 0)
	app, err := primary.CreateDatabase(t.Context(), "app")
	must(t, err)
	conn, err := pgx.Connect(t.Context(), app)
	must(t, err)
	_, err = conn.Exec(t.Context(), "CREATE ROLE reads LOGIN")
	must(t, err)
	must(t, conn.Close(t.Context()))
	standby, err := primary.Standby(t.Context(), "standby", nil)
	must(t, err)
	t.Cleanup(func() { must(t, standby.Remove()) })
	read := strings.Replace(app, fmt.Sprint(primary.Port), fmt.Sprint(standby.Port), 1)
	role := fmt.Sprintf("postgres://reads@127.0.0.1:%d/app", primary.Port)
	other, err := pgtest.Own(t, 0).CreateDatabase(t.Context(), "app")
	must(t, err)
	for name, c := range map[string]struct{ url, primary, port, code string }{
		"the primary":       {read, app, fmt.Sprint(primary.Port), ""},
		"as another role":   {read, role, fmt.Sprint(primary.Port), ""},
		"no standby":        {app, other, fmt.Sprint(primary.Port), ""},
		"another database":  {read, primary.URL("postgres"), "", "write_url"},
		"another cluster's": {read, other, "", "write_url"},
		"a standby again":   {read, standby.URL("app"), "", "in_recovery"},
		"none":              {read, "", "", "in_recovery"},
	} {
		found, err := EraseParked(t.Context(), nil, nil, []postgres.Target{{Setting: DefaultDatabase,
			URL: c.url, Primary: c.primary, Pooled: true}}, false, nil, nil)
		if f := outbox.FaultOf(err); c.code != "" && (f == nil || f.Code != c.code) ||
			c.code == "" && (err != nil || !strings.Contains(fmt.Sprint(found.Seen), ":"+c.port+"/app")) {
			t.Errorf("%s: %v, %v", name, found.Seen, err)
		}
	}
	conn, err = pgx.Connect(t.Context(), app)
	must(t, err)
	_, err = conn.Exec(t.Context(), "REVOKE EXECUTE ON FUNCTION pg_control_system FROM PUBLIC")
	must(t, err)
	must(t, conn.Close(t.Context()))
	// What can't be asked now is no setting that is wrong; where nobody may ask, another one is needed.
	for code, adjust := range map[string]func(*pgx.ConnConfig, context.CancelFunc){
		"": func(c *pgx.ConnConfig, cancel context.CancelFunc) {
			c.AfterConnect = func(context.Context, *pgconn.PgConn) error { cancel(); return nil }
		},
		"write_url": func(c *pgx.ConnConfig, _ context.CancelFunc) {
			c.RuntimeParams["role"] = "reads"
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		target := postgres.Target{URL: read, Primary: app, Pooled: true}
		_, err := target.Connect(ctx, func(c *pgx.ConnConfig) {
			if c.Port == uint16(primary.Port) {
				adjust(c, cancel)
			}
		})
		cancel()
		if f := outbox.FaultOf(err); err == nil || (f != nil) != (code != "") || f != nil && f.Code != code {
			t.Errorf("%q: %v", code, err)
		}
	}
}
