package security

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// sealed is a PostgreSQL server that lets roles in over TLS only: those of the group passwords with SCRAM,
// those of the group certificates with a certificate.
type sealed struct {
	*pgserver.Server
	ca *authority
}

func newSealed(t *testing.T) *sealed {
	t.Helper()
	s := &sealed{Server: pgtest.Own(t, 0), ca: newAuthority(t, "authority")}
	cert, key := s.ca.issue("postgres", "localhost")
	s.install(t, cert, "server.crt")
	s.install(t, key, "server.key")
	s.install(t, s.ca.file, "root.crt")
	hba := filepath.Join(t.TempDir(), "pg_hba.conf")
	if err := os.WriteFile(hba, []byte(`
local all all trust
host all postgres 127.0.0.1/32 trust
hostssl all +passwords 127.0.0.1/32 scram-sha-256
hostssl all +certificates 127.0.0.1/32 cert
`), 0o600); err != nil {
		t.Fatal(err)
	}
	s.install(t, hba, "pg_hba.conf")
	admin := harness.Connect(t, s.URL("postgres"))
	for _, sql := range []string{
		"CREATE ROLE passwords", "CREATE ROLE certificates",
		"ALTER SYSTEM SET ssl_ca_file = 'root.crt'", "ALTER SYSTEM SET ssl_cert_file = 'server.crt'",
		"ALTER SYSTEM SET ssl_key_file = 'server.key'",
		"ALTER SYSTEM SET password_encryption = 'scram-sha-256'", "ALTER SYSTEM SET ssl = on",
		"SELECT pg_reload_conf()",
	} {
		harness.Exec(t, admin, sql)
	}
	harness.Eventually(t, "TLS", func() error {
		conn, err := pgx.Connect(t.Context(),
			fmt.Sprintf("postgres://postgres@localhost:%d/postgres?sslmode=verify-full&sslrootcert=%s",
				s.Port, s.ca.file))
		if err != nil {
			return err
		}
		return conn.Close(t.Context())
	})
	return s
}

// install puts a file into the data folder, as the server's user owns it.
func (s *sealed) install(t *testing.T, from, name string) {
	t.Helper()
	content, err := os.ReadFile(from)
	harness.Must(t, err)
	data := filepath.Join(s.Dir, "data")
	harness.Must(t, os.WriteFile(filepath.Join(data, name), content, 0o600))
	info, err := os.Stat(data)
	harness.Must(t, err)
	owner := info.Sys().(*syscall.Stat_t)
	harness.Must(t, os.Chown(filepath.Join(data, name), int(owner.Uid), int(owner.Gid)))
}

// database makes a role and a database that it owns.
func (s *sealed) database(t *testing.T, role, group, password string) {
	t.Helper()
	admin := harness.Connect(t, s.URL("postgres"))
	harness.Exec(t, admin, fmt.Sprintf("CREATE ROLE %s LOGIN REPLICATION PASSWORD '%s' IN ROLE %s", role,
		password, group))
	harness.Exec(t, admin, fmt.Sprintf("CREATE DATABASE %s OWNER %s", role, role))
}

// url is where a role of that name has its database.
func (s *sealed) url(host, role, password string, params ...string) string {
	u := url.URL{Scheme: "postgres", User: url.User(role), Host: host + ":" + strconv.Itoa(s.Port),
		Path: "/" + role, RawQuery: strings.Join(params, "&")}
	if password != "" {
		u.User = url.UserPassword(role, password)
	}
	return u.String()
}

// plain sets environment variables that are not Outflow's own.
func plain(o *harness.Outflow, vars ...string) { o.Env = append(o.Env, vars...) }

// TestEveryLoginToPostgreSQLWorksOverTLS runs the whole way, init to a clean stop, over TLS with the server's
// certificate checked, for each way to log in.
func TestEveryLoginToPostgreSQLWorksOverTLS(t *testing.T) {
	t.Parallel()
	s := newSealed(t)
	nats := natstest.Server(t)
	ca := "sslrootcert=" + s.ca.file
	const password = "sesame 'and\" \\ @:/?#%"
	pass := strings.ReplaceAll(password, "'", "''")
	escape := strings.NewReplacer(`\`, `\\`, `:`, `\:`)
	ways := map[string]func(t *testing.T, o *harness.Outflow, role string){
		"password_in_url": func(t *testing.T, o *harness.Outflow, role string) {
			s.database(t, role, "passwords", pass)
			o.Set("POSTGRES_URL=" + s.url("localhost", role, password, "sslmode=verify-full", ca))
		},
		"password_file": func(t *testing.T, o *harness.Outflow, role string) {
			s.database(t, role, "passwords", pass)
			file := filepath.Join(t.TempDir(), "pgpass")
			line := fmt.Sprintf("localhost:%d:*:%s:%s\n", s.Port, role, escape.Replace(password))
			harness.Must(t, os.WriteFile(file, []byte(line), 0o600))
			plain(o, "PGPASSFILE="+file)
			o.Set("POSTGRES_URL=" + s.url("localhost", role, "", "sslmode=verify-full", ca))
		},
		"environment": func(t *testing.T, o *harness.Outflow, role string) {
			s.database(t, role, "passwords", pass)
			o.Set("POSTGRES_URL=")
			plain(o, "PGHOST=localhost", "PGPORT="+strconv.Itoa(s.Port), "PGUSER="+role, "PGDATABASE="+role,
				"PGPASSWORD="+password, "PGSSLMODE=verify-full", "PGSSLROOTCERT="+s.ca.file)
		},
		"client_certificate": func(t *testing.T, o *harness.Outflow, role string) {
			s.database(t, role, "certificates", "")
			cert, key := s.ca.issue(role)
			o.Set("POSTGRES_URL=" + s.url("localhost", role, "", "sslmode=verify-full", ca, "sslcert="+cert,
				"sslkey="+key))
		},
	}
	for role, way := range ways {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			o := harness.New(t, "", nats.URL(), role)
			o.UseStream(strings.ToUpper(role))
			way(t, o, role)
			o.Init()
			o.Start()
			o.AwaitReady()
			conn := harness.Connect(t, s.URL(role))
			for i := range 3 {
				harness.Insert(t, conn, "doc", i, `{"over":"TLS"}`)
			}
			harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), o.Stream, 3)
			var senders, all, encrypted int
			if err := conn.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE backend_type = 'walsender'),
				count(*), count(*) FILTER (WHERE ssl)
				FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE usename = $1`, role).Scan(&senders, &all, &encrypted); err != nil {
				t.Fatal(err)
			}
			if senders != 1 || all < 2 || encrypted != all {
				t.Errorf("%d replication connections; %d of %d connections are encrypted", senders, encrypted,
					all)
			}
			o.MustStop(t)
			o.MustBeComplete(conn, nats.URL())
			if log := o.Log.String(); strings.Contains(log, password) ||
				strings.Contains(log, "level=ERROR") || strings.Contains(log, "not all") {
				t.Errorf("the log says\n%s", log)
			}
		})
	}
}

// TestACertificateIsChangedWhileOutflowRuns, to one of another authority: the new files are good for new
// connections before the old ones are taken back, and nothing is published twice or lost.
func TestACertificateIsChangedWhileOutflowRuns(t *testing.T) {
	t.Parallel()
	const role = "renewed"
	s := newSealed(t)
	s.database(t, role, "certificates", "")
	cert, key := s.ca.issue(role)
	ns := natstest.Server(t)
	o := harness.New(t, s.url("localhost", role, "", "sslmode=verify-full", "sslrootcert="+s.ca.file,
		"sslcert="+cert, "sslkey="+key), ns.URL(), role)
	o.Init()
	o.Start()
	o.AwaitReady()
	conn := harness.Connect(t, s.URL(role))
	stop := harness.StartWriters(t, s.URL(role))
	defer stop()
	trust := func(files ...string) {
		t.Helper()
		var all []byte
		for _, f := range files {
			content, err := os.ReadFile(f)
			harness.Must(t, err)
			all = append(all, content...)
		}
		s.install(t, harness.WriteFile(t, "root.crt", string(all)), "root.crt")
		harness.Exec(t, conn, "SELECT pg_reload_conf()")
	}
	reload := func() {
		t.Helper()
		from := len(o.Said())
		harness.Must(t, o.Process.Signal(syscall.SIGHUP))
		harness.Eventually(t, "the certificate is good", func() error {
			if said := o.Said()[from:]; !strings.Contains(said, "are good for new connections") {
				_ = o.Process.Signal(syscall.SIGHUP) // the server may not have read its file yet
				return fmt.Errorf("it says %s", said)
			}
			return nil
		})
	}
	next := newAuthority(t, "next")
	trust(s.ca.file, next.file)
	newCert, newKey := next.issue(role)
	harness.Must(t, os.Rename(newKey, key))
	harness.Must(t, os.Rename(newCert, cert))
	reload()
	trust(next.file)
	harness.Exec(t, conn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", role)
	reload()
	n := harness.Value[int](t, conn, "SELECT count(*) FROM outbox")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n+50)
	stop()
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream,
		harness.Value[int](t, conn, "SELECT count(*) FROM outbox"))
	o.MustBeComplete(conn, ns.URL())
	issuers := harness.Value[string](t, conn, `SELECT string_agg(DISTINCT issuer_dn, ' ') FROM pg_stat_ssl
		JOIN pg_stat_activity USING (pid) WHERE usename = $1`, role)
	if issuers != "/CN=next" {
		t.Errorf("the connections have certificates of %s", issuers)
	}
	o.MustStop(t)
}

// TestARefusalByPostgreSQLNamesTheSettingAndNoPassword: what is wrong is said in words, with the setting's
// name, at once by init and at each attempt by run, and no password is.
func TestARefusalByPostgreSQLNamesTheSettingAndNoPassword(t *testing.T) {
	t.Parallel()
	s := newSealed(t)
	nats := natstest.Server(t)
	const secret = "open-sesame-7719"
	s.database(t, "somebody", "passwords", secret)
	s.database(t, "holder", "certificates", "")
	stranger := newAuthority(t, "stranger")
	cert, key := stranger.issue("holder")
	ca := "sslrootcert=" + s.ca.file
	for name, c := range map[string]struct {
		url  string
		says []string
	}{
		"another authority": {s.url("localhost", "somebody", secret, "sslmode=verify-full", "sslrootcert="+
			stranger.file), []string{"certificate"}},
		"another host": {s.url("127.0.0.1", "somebody", secret, "sslmode=verify-full", ca),
			[]string{"certificate", "127.0.0.1"}},
		"not encrypted": {s.url("localhost", "somebody", secret, "sslmode=disable"),
			[]string{"pg_hba.conf", "no encryption"}},
		"wrong password": {s.url("localhost", "somebody", secret+"x", "sslmode=verify-full", ca),
			[]string{"password authentication failed"}},
		"no certificate": {s.url("localhost", "holder", "", "sslmode=verify-full", ca),
			[]string{"certificate"}},
		"a stranger's": {s.url("localhost", "holder", "", "sslmode=verify-full", ca, "sslcert="+cert,
			"sslkey="+key), []string{"certificate"}},
		"no file": {s.url("localhost", "somebody", secret, "sslmode=verify-full",
			"sslrootcert=/nowhere/ca.pem"), []string{"/nowhere/ca.pem"}},
		"another one's place": {s.url("localhost", "holder", secret, "sslmode=verify-full", ca),
			[]string{"certificate"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := harness.New(t, c.url, nats.URL(), harness.SlotName("refused"), "LOG_LEVEL=debug")
			for _, command := range []string{"init", "status"} {
				out, errOut, code := o.Run(command)
				if code == 0 {
					t.Errorf("outflow %s: exit code 0", command)
				}
				o.MustContain("outflow "+command, errOut, append(c.says, "postgres.url")...)
				if strings.Contains(out+errOut, secret) {
					t.Errorf("outflow %s tells the password:\n%s%s", command, out, errOut)
				}
			}
			o.Start()
			harness.Eventually(t, "the log says why", func() error {
				for _, s := range append(c.says, "postgres.url") {
					if log := o.Log.String(); !strings.Contains(log, s) {
						return fmt.Errorf("not %q:\n%s", s, log)
					}
				}
				return nil
			})
			o.Kill()
			if strings.Contains(o.Log.String(), secret) {
				t.Errorf("the log tells the password:\n%s", o.Log.String())
			}
		})
	}
}
