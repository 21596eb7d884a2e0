package replication

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// hostile are settings of a role that would change what is published, or end what takes its time. Some are not in every version.
var hostile = map[string]string{
	"search_path": "public, pg_catalog", "quote_all_identifiers": "on", "lc_monetary": "C.UTF-8",
	"DateStyle": "German", "TimeZone": "Asia/Tokyo", "bytea_output": "escape", "extra_float_digits": "-10", "IntervalStyle": "iso_8601",
	"standard_conforming_strings": "off", "transform_null_equals": "on", "row_security": "on",
	"default_transaction_isolation": "serializable", "default_transaction_read_only": "on",
	"statement_timeout": "1ms", "lock_timeout": "1ms", "idle_in_transaction_session_timeout": "1ms", "idle_session_timeout": "1ms",
	"transaction_timeout": "10min", "exit_on_error": "on", "client_min_messages": "error", "client_encoding": "LATIN1",
}

// Whatever is set for a role, a database or in the URL: each connection has the pinned settings.
func TestHostileSettingsChangeNothing(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		d := newDatabase(t, srv)
		setup := d.setup()
		_, err := setup.EnsureTable(within(t))
		if err != nil {
			t.Fatal(err)
		}
		setup.Close()
		database := d.text("SELECT quote_ident(current_database())")
		role := d.text("SELECT quote_ident('hostile_' || current_database())")
		d.exec("CREATE ROLE " + role + " LOGIN SUPERUSER")
		t.Cleanup(func() { d.exec("REASSIGN OWNED BY " + role + " TO CURRENT_USER"); d.exec("DROP ROLE " + role) })
		want := map[string]string{"transaction_timeout": "0"}
		for name, value := range hostile {
			if d.text("SELECT count(*)::text FROM pg_settings WHERE name = $1", name) == "0" {
				delete(want, name)
				continue
			}
			of := "ALTER DATABASE " + database + " SET "
			if len(name)%2 == 0 {
				of = "ALTER ROLE " + role + " IN DATABASE " + database + " SET "
			}
			if name != "search_path" {
				value = literal(value)
			}
			d.exec(of + name + " = " + value)
		}
		for name, value := range pins {
			want[name] = strings.TrimSuffix(value, "ISO") // DateStyle is "ISO, DMY": the order is of input
		}
		d.cfg.URL = withUser(t, d.url, strings.Trim(role, `"`))
		d.cfg.URL += map[bool]string{true: "&", false: "?"}[strings.Contains(d.cfg.URL, "?")] +
			"datestyle=German&search_path=public&options=-c%20bytea_output%3Descape"

		check := func(which, name, got string) {
			t.Helper()
			if want := want[name]; got != want && (name != "DateStyle" || !strings.HasPrefix(got, "ISO, ")) {
				t.Errorf("%s: %s is %q, want %q", which, name, got, want)
			}
		}
		ordinary := func(which string, conn *pgx.Conn) {
			t.Helper()
			for name := range want {
				var got string
				if err := conn.QueryRow(within(t), "SELECT setting FROM pg_settings WHERE name = $1", name).Scan(&got); err != nil {
					t.Fatalf("%s: %v", which, err)
				}
				check(which, name, got)
			}
		}
		setup = d.setup()
		defer setup.Close()
		if created, _, err := setup.EnsurePublication(within(t)); err != nil || !created {
			t.Fatal(created, err)
		}
		if _, err := setup.CreateSlot(within(t)); err != nil {
			t.Fatal(err)
		}
		ordinary("set-up", setup.conn)
		r, err := OpenReader(within(t), d.cfg.Config)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		ordinary("reader", r.conn)
		w := NewWriter(d.cfg.Config)
		defer w.Close()
		if err := w.Heartbeat(within(t)); err != nil {
			t.Error(err)
		}
		if err := w.do(within(t), func(conn *pgx.Conn) error { ordinary("writer", conn); return nil }); err != nil {
			t.Error(err)
		}
		s := d.open()
		ordinary("session", s.conn)
		for name := range want {
			rows, err := simpleQuery(within(t), s.repl, "SELECT setting FROM pg_settings WHERE name = "+literal(name))
			if err != nil {
				t.Fatal(err)
			}
			check("replication", name, rows[0][0])
		}
		if err := setup.tryReplication(within(t)); err != nil {
			t.Error(err)
		}
		if err := Peek(within(t), d.cfg.Config, 0, false, func(Message) error { return nil }); err != nil {
			t.Error(err)
		}
	})
}

// Where ticks go elsewhere than to the outbox's server, a pooler may be between: the connection asks for nothing that one refuses.
func TestWriterPinsNothingBehindAPooler(t *testing.T) {
	t.Parallel()
	w := NewWriter(Config{URL: "postgres://u@h/d", WriteURL: "postgres://u@pooler/d"})
	c, err := w.config()
	if err != nil {
		t.Fatal(err)
	}
	if len(c.RuntimeParams) != 1 || c.RuntimeParams["application_name"] != "outflow" || c.AfterConnect != nil {
		t.Errorf("it asks for %v", c.RuntimeParams)
	}
}

// The text of types that print names or money depends on the value alone.
func TestNamesAndMoneyArePrintedAlike(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.exec("ALTER TABLE outbox ADD rel regclass, ADD fn regprocedure, ADD type regtype, ADD price money")
	name := d.text("SELECT quote_ident(current_database())")
	d.exec("ALTER DATABASE " + name + " SET search_path = public")
	d.exec("ALTER DATABASE " + name + " SET lc_monetary = 'C.UTF-8'")
	d.exec("CREATE FUNCTION mine(int) RETURNS int LANGUAGE sql AS 'SELECT 1'")
	s := d.start(0)
	d.exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload, rel, fn, type, price)
		VALUES ('d', 'a', 1, '{}', 'public.outbox', 'public.mine(int)', 'int', 1234.5)`)
	got := read(t, s, inserts(1)).inserts[0]
	for _, want := range []string{"public.outbox", "public.mine(integer)", "integer", "$1,234.50"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q does not hold %s", got, want)
		}
	}
}
