package replication

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

func withUser(t testing.TB, raw, user string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(user)
	return u.String()
}

func TestErrorsHoldNoPassword(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	for _, raw := range []string{
		"postgres://u:" + secret + "@/h:x/d", "postgres://u:a/" + secret + "@h/d", "postgres://u:%zz" + secret + "@h/d",
		"host=h password=" + secret + " port=x", "host=h password='" + secret, "postgres://u:" + secret + "@h:1:2/d",
		"postgres://u:" + secret + "@h/d?sslmode=nonsense", "postgres://u:" + secret + "@h/d?sslmode=verify-ca&sslrootcert=/no/such/file",
		"postgres://u:a@" + secret + "@127.0.0.1/d", "postgres://u:p@s/" + secret + "@127.0.0.1:1/d", "postgres://u:1?" + secret + "@127.0.0.1:1/d",
		"postgres://u:1/" + secret + "@127.0.0.1:1/d", "postgres://u:1#" + secret + "@127.0.0.1:1/d",
		"postgres://u:" + secret + "@127.0.0.1:1/d?connect_timeout=5", "postgres://u:" + secret + "@/d?host=/no/such/dir",
	} {
		_, err := Open(within(t), Config{URL: raw, Slot: "s", Publication: "p", Table: "t"})
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
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	l.Close()
	d := newDatabase(t, pgtest.Server(t))
	u, err := url.Parse(d.url)
	if err != nil {
		t.Fatal(err)
	}
	u.User, u.RawQuery = url.UserPassword("nobody", "p"), "sslmode=prefer"
	refused := u.String()
	for _, test := range []struct{ url, code, want string }{
		{"postgres://u:p@" + closed + "/d", "postgres_connect",
			"postgres.url: PostgreSQL at " + closed + `, database "d", can't be reached: connection refused. See that it runs, and that host and port are right`},
		{"postgres://u:p@" + closed + "," + closed + "/d?sslmode=prefer", "postgres_connect",
			"postgres.url: PostgreSQL at " + closed + `, database "d", can't be reached: connection refused. See that it runs, and that host and port are right`},
		{"postgres://u:p@nowhere.invalid:5432/d", "postgres_connect", ""},
		{refused, "login", ""},
	} {
		_, err := OpenSetup(within(t), SetupConfig{Config: Config{URL: test.url}})
		f := outbox.FaultOf(err)
		if f == nil || f.Code != test.code || test.want != "" && f.Error() != test.want {
			t.Errorf("%s: %v, want %s", test.url, err, test.want)
			continue
		}
		for _, noise := range []string{"failed to connect", "dial", "refused TLS", "\n", "hostname resolving"} {
			if strings.Contains(f.Error(), noise) {
				t.Errorf("%s: %v", test.url, f)
			}
		}
	}
}

func TestWhatTheServerRefusesIsFatal(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	u, err := url.Parse(d.url)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/no_such_database"
	d.cfg.URL = u.String()
	_, err = Open(within(t), d.cfg.Config)
	wantFault(t, err, outbox.Fatal, "database_missing")
	d.cfg.URL = withUser(t, d.url, "no_such_role")
	_, err = Open(within(t), d.cfg.Config)
	wantFault(t, err, outbox.Fatal, "login")

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u.Host = l.Addr().String()
	l.Close()
	d.cfg.URL = u.String()
	if _, err = Open(within(t), d.cfg.Config); err == nil || outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("nobody listens: %v", err)
	}
	d.cfg.URL = "postgres://h:1:2:3/"
	_, err = Open(within(t), d.cfg.Config)
	wantFault(t, err, outbox.Usage, "postgres_url")
}

func TestTheSecondConnectionFollowsTheFirst(t *testing.T) {
	t.Parallel()
	var dialled []string
	lookups := 0
	r := &route{
		known: map[string][]string{},
		dial: func(_ context.Context, network, addr string) (net.Conn, error) {
			dialled = append(dialled, network+" "+addr)
			return nil, nil
		},
		lookup: func(context.Context, string) ([]string, error) {
			lookups++
			return []string{fmt.Sprint("10.0.0.", lookups)}, nil
		},
	}
	ctx := t.Context()
	for range 2 {
		if a, err := r.resolve(ctx, "pg"); err != nil || !slices.Equal(a, []string{"10.0.0.1"}) {
			t.Errorf("pg is %v, %v", a, err)
		}
	}
	r.first(ctx, "tcp", "10.0.0.1:5432")
	r.first(ctx, "tcp", "10.0.0.2:5432") // the first did not answer
	if _, err := r.again(ctx, "tcp", "10.0.0.1:5432"); err == nil {
		t.Error("the second connection goes elsewhere")
	}
	if _, err := r.again(ctx, "tcp", "10.0.0.2:5432"); err != nil {
		t.Error(err)
	}
	if want := []string{"tcp 10.0.0.1:5432", "tcp 10.0.0.2:5432", "tcp 10.0.0.2:5432"}; !slices.Equal(dialled, want) {
		t.Errorf("dialled %v, want %v", dialled, want)
	}
}

// With several hosts both connections end at the first that answers, also where names and addresses differ.
func TestSeveralHosts(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	u, err := url.Parse(d.url)
	if err != nil {
		t.Fatal(err)
	}
	port := u.Port()
	d.cfg.URL = fmt.Sprintf("host=127.0.0.1,localhost,127.0.0.1 port=1,%s,%s user=%s dbname=%s sslmode=prefer target_session_attrs=read-write keepalives_idle=3",
		port, port, u.User.Username(), strings.Trim(u.Path, "/"))
	s := d.start(0)
	if _, err := s.Server(within(t)); err != nil {
		t.Error(err)
	}
	d.insert(ops(t, 1))
	read(t, s, inserts(1))
}

// What is set for the role, the database or in the URL does not change how values are printed.
func TestPinnedSettings(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	name := d.text("SELECT quote_ident(current_database())")
	for _, set := range []string{"DateStyle = 'German'", "TimeZone = 'Asia/Tokyo'", "bytea_output = 'escape'", "extra_float_digits = -10", "IntervalStyle = 'iso_8601'"} {
		d.exec("ALTER DATABASE " + name + " SET " + set)
	}
	d.exec("ALTER TABLE outbox ADD at timestamptz, ADD raw bytea, ADD weight float8, ADD span interval")
	d.cfg.URL += map[bool]string{true: "&", false: "?"}[strings.Contains(d.url, "?")] + "datestyle=German&timezone=Asia/Tokyo"
	s := d.start(0)
	d.exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload, at, raw, weight, span)
		VALUES ('d', 'a', 1, '{}', '2024-02-03 04:05:06.789+00', '\x00ff', 0.1::float8 + 0.2::float8, '1 day 02:00')`)
	all := read(t, s, inserts(1))
	s.Close()
	eventually(t, "the slot is free", func() bool {
		return Peek(within(t), d.cfg.Config, 0, false, func(m Message) error { all.add(m); return nil }) == nil
	})
	if len(all.inserts) != 2 {
		t.Fatalf("%d inserts from stream and peek", len(all.inserts))
	}
	for _, got := range all.inserts {
		for _, want := range []string{"2024-02-03 04:05:06.789+00", `\x00ff`, "0.30000000000000004", "1 day 02:00:00"} {
			if !strings.Contains(got, want) {
				t.Errorf("%q does not hold %s", got, want)
			}
		}
	}
}
