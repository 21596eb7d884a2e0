package postgres

import (
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// hostile are settings of a role that would change what is published, or end what takes its time. Some are
// not in every version.
var hostile = map[string]string{
	"search_path": "public, pg_catalog", "quote_all_identifiers": "on", "lc_monetary": "C.UTF-8",
	"DateStyle": "German", "TimeZone": "Asia/Tokyo", "bytea_output": "escape", "extra_float_digits": "-10",
	"IntervalStyle":               "iso_8601",
	"standard_conforming_strings": "off", "transform_null_equals": "on", "row_security": "on",
	"default_transaction_isolation": "serializable", "default_transaction_read_only": "on",
	"statement_timeout": "1ms", "lock_timeout": "1ms", "idle_in_transaction_session_timeout": "1ms",
	"idle_session_timeout": "1ms",
	"transaction_timeout":  "10min", "exit_on_error": "on", "client_min_messages": "error",
	"client_encoding": "LATIN1",
}

// Whatever is set for a role, a database or in the URL: both kinds of connection have the pinned settings.
func TestHostileSettingsChangeNothing(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		d := outboxdb.New(t, srv)
		database := d.Text("SELECT quote_ident(current_database())")
		role := d.Text("SELECT quote_ident('hostile_' || current_database())")
		d.Exec("CREATE ROLE " + role + " LOGIN SUPERUSER")
		t.Cleanup(func() { d.Exec("DROP ROLE " + role) })
		want := maps.Clone(pins)
		if srv.Installation.Major >= 17 {
			want["transaction_timeout"] = "0"
		}
		for name, value := range hostile {
			if _, ok := want[name]; !ok {
				continue // this version doesn't have it
			}
			of := "ALTER DATABASE " + database + " SET "
			if len(name)%2 == 0 {
				of = "ALTER ROLE " + role + " IN DATABASE " + database + " SET "
			}
			if name != "search_path" {
				value = Literal(value)
			}
			d.Exec(of + name + " = " + value)
		}
		url := outboxdb.WithUser(t, d.URL, strings.Trim(role, `"`))
		url += map[bool]string{true: "&", false: "?"}[strings.Contains(url, "?")] +
			"datestyle=German&search_path=public&options=-c%20bytea_output%3Descape"
		ctx := outboxdb.Within(t)
		conn, err := Connect(ctx, url)
		must.Succeed(t, err)
		defer Close(conn)
		repl, err := Target{URL: url}.ConnectReplication(ctx)
		must.Succeed(t, err)
		defer Close(repl)
		for name, value := range want {
			var ordinary string
			query := "SELECT setting FROM pg_settings WHERE name = " + Literal(name)
			must.Succeed(t, conn.QueryRow(ctx, query).Scan(&ordinary))
			rows, err := SimpleQuery(ctx, repl, query)
			must.Succeed(t, err)
			for _, got := range []string{ordinary, rows[0][0]} {
				if name == "DateStyle" {
					got, _, _ = strings.Cut(got, ",") // the order of day and month is for input
				}
				if got != value {
					t.Errorf("%s is %q, want %q", name, got, value)
				}
			}
		}
	})
}

// Nothing is asked for that a pooler refuses.
func TestNothingIsPinnedBehindAPooler(t *testing.T) {
	t.Parallel()
	c, err := Target{URL: "postgres://u@pooler/d", Pooled: true}.config()
	must.Succeed(t, err)
	if len(c.RuntimeParams) != 1 || c.RuntimeParams["application_name"] != "outflow" ||
		c.AfterConnect != nil {
		t.Errorf("it asks for %v", c.RuntimeParams)
	}
}

// A standby and the holder of the slot are told apart by their hosts, and found by the slot.
func TestTheNameHasSlotAndHost(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("s", 63)
	for _, c := range []struct{ slot, host, want string }{
		{"orders", "db-1.example.org", "outflow/orders/db-1.example.org"},
		{"orders", "", "outflow/orders/"},
		{"orders", "über host\x00", "outflow/orders/?ber?host?"},
		{"orders", strings.Repeat("h", 99), "outflow/orders/" + strings.Repeat("h", 48)},
		{long, "h", "outflow/" + long[:55]},
	} {
		got := nameOn(c.slot, c.host)
		if got != c.want || !strings.HasPrefix(got, NamePrefix(c.slot)) {
			t.Errorf("slot %s, host %q: %s, want %s", c.slot, c.host, got, c.want)
		}
	}
	c, err := Target{URL: "postgres://u@h/d", Slot: "orders", Command: "maintain"}.config()
	must.Succeed(t, err)
	if got := c.RuntimeParams["application_name"]; !strings.HasPrefix(got, "outflow/orders:maintain/") ||
		strings.HasPrefix(got, NamePrefix("orders")) || !strings.HasPrefix(got, CommandPrefix("orders")) {
		t.Errorf("maintain counts among those that publish: %s", got)
	}
	for n := range 63 {
		slot := long[:n+1]
		got := Target{Slot: slot, Command: "maintain"}.applicationName()
		if len(got) > 63 || !strings.HasPrefix(got, CommandPrefix(slot)) ||
			strings.HasPrefix(got, NamePrefix(slot)) {
			t.Errorf("slot of %d bytes: maintain counts among those that publish: %s", n+1, got)
		}
	}
	for url, want := range map[string]string{"postgres://u@h/d": NamePrefix("orders"),
		"postgres://u@h/d?application_name=own": "own"} {
		c, err := Target{URL: url, Slot: "orders"}.config()
		must.Succeed(t, err)
		if got := c.RuntimeParams["application_name"]; !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, want %s", url, got, want)
		}
	}
}

func TestErrorsHoldNoPassword(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	for _, raw := range []string{
		"postgres://u:" + secret + "@/h:x/d", "postgres://u:a/" + secret + "@h/d", "postgres://u:%zz" +
			secret + "@h/d",
		"host=h password=" + secret + " port=x", "host=h password='" + secret, "postgres://u:" + secret +
			"@h:1:2/d",
		"postgres://u:" + secret + "@h/d?sslmode=nonsense", "postgres://u:" + secret +
			"@h/d?sslmode=verify-ca&sslrootcert=/no/such/file",
		"postgres://u:a@" + secret + "@127.0.0.1/d", "postgres://u:p@s/" + secret + "@127.0.0.1:1/d",
		"postgres://u:1?" + secret + "@127.0.0.1:1/d",
		"postgres://u:1/" + secret + "@127.0.0.1:1/d", "postgres://u:1#" + secret + "@127.0.0.1:1/d",
		"postgres://u:" + secret + "@127.0.0.1:1/d?connect_timeout=5", "postgres://u:" + secret +
			"@/d?host=/no/such/dir",
	} {
		_, err := Connect(outboxdb.Within(t), raw)
		if err == nil {
			t.Errorf("%s: no error", raw)
			continue
		}
		for _, text := range []string{err.Error(), fmt.Sprintf("%+v", err), fmt.Sprintf("%#v", err)} {
			if strings.Contains(text, secret) {
				t.Errorf("%s: %s", raw, text)
			}
		}
	}
}

// An error says in one line which setting and server it is about, and why; nothing of it twice.
func TestConnectErrorsAreOneLine(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	closed := l.Addr().String()
	l.Close()
	d := outboxdb.New(t, pgtest.Server(t))
	u, err := url.Parse(d.URL)
	must.Succeed(t, err)
	u.User, u.RawQuery = url.UserPassword("nobody", "p"), "sslmode=prefer"
	refused := u.String()
	for _, test := range []struct{ url, code, want string }{
		{"postgres://u:p@" + closed + "/d", "postgres_connect",
			"postgres.url: PostgreSQL at " + closed +
				`, database "d", can't be reached: connection refused. See that it runs, and that host and port are right`},
		{"postgres://u:p@" + closed + "," + closed + "/d?sslmode=prefer", "postgres_connect",
			"postgres.url: PostgreSQL at " + closed +
				`, database "d", can't be reached: connection refused. See that it runs, and that host and port are right`},
		{"postgres://u:p@nowhere.invalid:5432/d", "postgres_connect", ""},
		{refused, "login", ""},
		{"postgres://u:p@" + u.Host + "/d?sslmode=require", "postgres_connect",
			"postgres.url: PostgreSQL at " + u.Host + `, database "d", offers no TLS: server refused TLS ` +
				"connection. Turn ssl on there, or, " +
				"where nobody can listen, say sslmode=disable in postgres.url"},
	} {
		_, err := Connect(outboxdb.Within(t), test.url)
		f := outbox.FaultOf(err)
		if f == nil || f.Code != test.code || test.want != "" && f.Error() != test.want {
			t.Errorf("%s: %v, want %s", test.url, err, test.want)
			continue
		}
		for _, noise := range []string{"failed to connect", "dial", "; server refused TLS", "\n",
			"hostname resolving"} {
			if strings.Contains(f.Error(), noise) {
				t.Errorf("%s: %v", test.url, f)
			}
		}
	}
}

// TestACertificateThatIsNotAcceptedIsToldAsOne: the server runs, and host and port are right.
func TestACertificateThatIsNotAcceptedIsToldAsOne(t *testing.T) {
	t.Parallel()
	signed := httptest.NewTLSServer(nil)
	defer signed.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.ReadFull(conn, make([]byte, 8)) // SSLRequest
			_, _ = conn.Write([]byte("S"))
			_ = tls.Server(conn, &tls.Config{Certificates: signed.TLS.Certificates}).Handshake()
			conn.Close()
		}
	}()
	for _, mode := range []string{"verify-full", "verify-ca"} {
		_, err = Connect(outboxdb.Within(t), "postgres://u:p@"+l.Addr().String()+"/d?sslmode="+mode)
		f := outboxdb.WantFault(t, err, outbox.Transient, "postgres_connect")
		if !strings.Contains(f.Message, "a certificate that is not accepted") ||
			!strings.Contains(f.Hint, "In postgres.url sslrootcert") {
			t.Errorf("%s: %v", mode, f)
		}
	}
}

func TestWhatTheServerRefusesIsFatal(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	u, err := url.Parse(d.URL)
	must.Succeed(t, err)
	u.Path = "/no_such_database"
	_, err = Connect(outboxdb.Within(t), u.String())
	outboxdb.WantFault(t, err, outbox.Fatal, "database_missing")
	_, err = Connect(outboxdb.Within(t), outboxdb.WithUser(t, d.URL, "no_such_role"))
	outboxdb.WantFault(t, err, outbox.Fatal, "login")

	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	u.Host = l.Addr().String()
	l.Close()
	if _, err = Connect(outboxdb.Within(t), u.String()); err == nil ||
		outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("nobody listens: %v", err)
	}
	_, err = Connect(outboxdb.Within(t), "postgres://h:1:2:3/")
	outboxdb.WantFault(t, err, outbox.Usage, "postgres_url")
}
