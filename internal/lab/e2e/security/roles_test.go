package security

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestTheDocumentedRolesAreEnough runs outflow, on both sides, as the roles of docs/postgres.md and
// docs/samples/nats-accounts.conf, which may do nothing else.
func TestTheDocumentedRolesAreEnough(t *testing.T) {
	t.Parallel()
	const password = harness.AccountPassword
	pg := pgtest.Own(t, 0)
	admin := harness.Connect(t, pg.URL("postgres"))
	harness.Exec(t, admin, "CREATE ROLE owner LOGIN REPLICATION")
	harness.Exec(t, admin, "CREATE DATABASE app OWNER owner")
	harness.Exec(t, admin, "REVOKE ALL ON DATABASE app FROM PUBLIC")
	for statement := range strings.SplitSeq(harness.DocumentedBlock(t, "postgres.md", "Least privilege", 0),
		";") {
		harness.Exec(t, admin, strings.ReplaceAll(statement, "…", password))
	}
	broker := accounts(t)

	url := func(role string) string {
		return strings.Replace(pg.URL("app"), "postgres@", role+":"+password+"@", 1)
	}
	o := harness.New(t, url("owner"), broker.URL(), "outflow", "NATS_USER=outflow-init", "NATS_PASSWORD="+
		password, "REORDER_HORIZON=5ms")
	o.Init()
	conn := harness.Connect(t, url("owner"))
	harness.Exec(t, conn, "REVOKE ALL ON TABLE outbox FROM PUBLIC")
	o.Set("POSTGRES_URL="+url("outflow"), "NATS_USER=outflow")
	o.Start()
	o.AwaitReady()
	for i := range 3 {
		harness.Insert(t, conn, "doc", i, `{}`)
	}
	harness.Exec(t, conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', 'v=1 slot=outflow "+
		"horizon=1ms sort=seq_key max_events=65536 max_bytes=67108864')")

	_, stream := loginTo(t, broker, "outflow-admin")
	harness.AwaitMessages(t, stream, o.Stream, 3)
	more := 100
	harness.Eventually(t, "a tick, a record and a confirmed LSN", func() error {
		// the change of settings may have closed the last window
		if harness.Metric(t, o, "outflow_ticks_total") == 0 {
			more++
			harness.Insert(t, conn, "doc", more, `{}`)
		}
		for _, m := range []string{"outflow_confirmed_lsn", "outflow_ticks_total"} {
			if harness.Metric(t, o, m) == 0 {
				return fmt.Errorf("%s is 0", m)
			}
		}
		return nil
	})
	for _, args := range [][]string{{"status"}, {"status", "--json"},
		{"doctor", "--skip", "postgres.transactions", "--timeout", "1m"}} {
		o.MustRun(args...)
	}
	o.MustStop(t)
	o.MustRun("inspect")
	o.Start() // the record of the last session is there
	o.AwaitReady()
	o.MustStop(t)
	if strings.Contains(o.Log.String(), "permission") {
		t.Errorf("the log says\n%s", o.Log.String())
	}

	// The roles may do no more.
	as, err := pgx.Connect(t.Context(), url("outflow"))
	harness.Must(t, err)
	defer as.Close(context.Background()) //nolint:errcheck // the test is over
	for _, sql := range []string{"SELECT * FROM outbox", "DELETE FROM outbox",
		"CREATE TABLE public.mine (i int)", "DROP PUBLICATION outflow"} {
		if _, err := as.Exec(t.Context(), sql); err == nil {
			t.Errorf("the role may %s", sql)
		}
	}
	for _, user := range []string{"outflow", "outflow-init"} {
		nc, err := nats.Connect(broker.URL(), nats.UserInfo(user, password), nats.Timeout(harness.AskTimeout),
			nats.CustomInboxPrefix("_INBOX.outflow"),
			nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		harness.Must(t, err)
		defer nc.Close()
		subjects := []string{"$JS.API.STREAM.DELETE.OUTBOX", "$JS.API.STREAM.PURGE.OUTBOX",
			"$JS.API.STREAM.MSG.DELETE.OUTBOX", "$JS.API.STREAM.UPDATE.OUTBOX", "outbox.doc"}
		if user != "outflow" {
			subjects = append(subjects, "_outflow.x.outbox.doc")
		}
		for _, subject := range subjects {
			harness.Must(t, nc.Publish(subject, []byte("{}")))
			harness.Must(t, nc.Flush())
			if err := nc.LastError(); err == nil || !strings.Contains(err.Error(), subject) {
				t.Errorf("%s may publish to %s (%v)", user, subject, err)
			}
		}
	}
}

// TestPagesAreReadOnly: what the program serves is on this machine only unless told otherwise, is a handful
// of pages, and takes nothing.
func TestPagesAreReadOnly(t *testing.T) {
	t.Parallel()
	o, _, _ := harness.Install(t, pgtest.Server(t), natstest.Server(t).URL(), "pages")
	out, _, code := o.Run("config")
	if code != 0 || !strings.Contains(out, o.Listen) {
		t.Errorf("exit code %d\n%s", code, out)
	}
	plain := harness.New(t, "postgres://h/d", "", "pages_default")
	plain.Env = plain.Env[:2] // PATH and TMPDIR
	if out, _, _ := plain.Run("config"); !strings.Contains(out, "127.0.0.1:7422") {
		t.Errorf("the default is not local:\n%s", out)
	}
	o.Init()
	o.Start()
	o.AwaitReady()
	do := func(method, path string) int {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, "http://"+o.Listen+path,
			strings.NewReader("x"))
		harness.Must(t, err)
		resp, err := http.DefaultTransport.RoundTrip(r)
		harness.Must(t, err)
		resp.Body.Close()
		return resp.StatusCode
	}
	for _, path := range []string{"/", "/metrics", "/healthz", "/readyz", "/status.json"} {
		for method, want := range map[string]int{"GET": 200, "HEAD": 200, "POST": 405, "PUT": 405,
			"PATCH": 405, "DELETE": 405, "OPTIONS": 405, "TRACE": 405} {
			harness.Eventually(t, method+" "+path, func() error { // it may have no session at one moment
				if got := do(method, path); got != want {
					return fmt.Errorf("%d, want %d", got, want)
				}
				return nil
			})
		}
	}
	for _, path := range []string{
		"/debug/pprof/", "/debug/vars", "/config", "/status", "/metrics/x", "/index.html", "/.env",
		"/favicon.ico", "/quit", "/-/reload", "/..%2f..%2fetc%2fpasswd",
	} {
		if got := do("GET", path); got != 404 {
			t.Errorf("GET %s: %d, want 404", path, got)
		}
	}
	// A client that never ends its header is not waited for.
	conn, err := net.DialTimeout("tcp", o.Listen, harness.Patience)
	harness.Must(t, err)
	defer conn.Close()
	if _, err := conn.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n")); err != nil {
		t.Fatal(err)
	}
	harness.Must(t, conn.SetReadDeadline(time.Now().Add(harness.Patience)))
	for {
		if _, err := conn.Read(make([]byte, 1024)); err != nil {
			if ne, ok := err.(net.Error); ok && ne.Timeout() {
				t.Error("a header that never ends is waited for")
			}
			break
		}
	}
	_, port, _ := net.SplitHostPort(o.Listen)
	addresses, err := net.InterfaceAddrs()
	harness.Must(t, err)
	for _, a := range addresses {
		if ip, _, err := net.ParseCIDR(a.String()); err == nil && !ip.IsLoopback() && ip.IsGlobalUnicast() {
			if c, err := net.DialTimeout("tcp", net.JoinHostPort(ip.String(), port),
				time.Second); err == nil {
				c.Close()
				t.Errorf("it answers at %v too", ip)
			}
		}
	}
}
