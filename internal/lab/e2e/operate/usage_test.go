package operate

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestUsageErrorsEndWithExitCode2: exit code 2, before anything is connected to; what is wrong, its value,
// and the nearest thing that would be right.
func TestUsageErrorsEndWithExitCode2(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "outflow.yaml")
	harness.Must(t, os.WriteFile(file, []byte("slot: outflow\nreorder: {horizn: 20ms}\n"), 0o600))
	const nowhere = "postgres://nobody:hunter2@127.0.0.1:1/none"
	for _, c := range []struct {
		name    string
		setting string
		args    []string
		says    []string
	}{
		{"unknown key", "CONFIG=" + file, []string{"run"}, []string{"reorder.horizn", "reorder.horizon",
			file}},
		{"no such file", "CONFIG=/nowhere.yaml", []string{"run"}, []string{"/nowhere.yaml"}},
		{"impossible value", "REORDER_HORIZON=20", []string{"run"},
			[]string{"reorder.horizon", `20`, "OUTFLOW_REORDER_HORIZON"}},
		{"unknown variable", "REORDER_HORIZONT=20ms", []string{"run"},
			[]string{"OUTFLOW_REORDER_HORIZONT", "OUTFLOW_REORDER_HORIZON"}},
		{"unknown flag", "LISTEN=", []string{"run", "--strem", "X"}, []string{"--strem", "--stream"}},
		{"unknown command", "LISTEN=", []string{"ruN"}, []string{"ruN", "run"}},
		{"subject", "SUBJECT={doc_id}", []string{"run"}, []string{"subject", "{doc_id}", "literal"}},
		{"reserved subject", "SUBJECT=$JS.{doc_id}", []string{"run"}, []string{"subject", "$JS"}},
		{"reserved header", "HEADERS=Nats-Msg-Id=id", []string{"run"}, []string{"headers", "Nats-Msg-Id"}},
		{"dead letters among the events", "SINK_DEAD_LETTER_SUBJECT=outbox.dead",
			[]string{"run", "--sink.on_poison=dead_letter"},
			[]string{"sink.dead_letter_subject", "outbox.dead"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := harness.New(t, nowhere, "nats://127.0.0.1:1", "outflow", c.setting)
			o.MustFail(2, c.args, c.says...)
			if out, errOut, _ := o.Run(append([]string{"config"}, c.args[1:]...)...); strings.Contains(out+
				errOut, "hunter2") {
				t.Errorf("outflow config shows the password: %s%s", out, errOut)
			}
		})
	}
}

func TestAListenAddressInUseIsAUsageError(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, _, url := harness.Install(t, pgtest.Server(t), ns.URL(), "listen")
	o.Init()
	o.Start()
	o.AwaitReady()
	second := harness.New(t, url, ns.URL(), o.Slot, "LISTEN="+o.Listen, "STREAM="+o.Stream)
	second.MustFail(2, []string{"run"}, "listen", o.Listen, "OUTFLOW_LISTEN")
}

// TestServersThatCannotBeUsedEndWithExitCode3: exit code 3 where the set-up of a server or a role can't work.
func TestServersThatCannotBeUsedEndWithExitCode3(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	t.Run("wal_level", func(t *testing.T) {
		pg := pgtest.Own(t, 0, "wal_level=replica")
		o := harness.New(t, pg.URL("postgres"), ns.URL(), "outflow")
		o.MustFail(3, []string{"init"}, "wal_level is replica", "Set wal_level = logical")
		harness.Exec(t, harness.Connect(t, pg.URL("postgres")),
			"CREATE TABLE outbox (doc_id text, payload text)")
		o.MustFail(3, []string{"run"}, "wal_level is replica", "Set wal_level = logical")
	})
	t.Run("no replication right", func(t *testing.T) {
		pg := pgtest.Server(t)
		o, conn, url := harness.Install(t, pg, ns.URL(), "norole")
		harness.Exec(t, conn,
			`DO $$ BEGIN CREATE ROLE weak LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$`)
		harness.Exec(t, conn, "GRANT ALL ON SCHEMA public TO weak")
		o.Set("POSTGRES_URL=" + strings.Replace(url, "postgres@", "weak@", 1))
		o.MustFail(3, []string{"init"}, "REPLICATION")
		harness.Exec(t, conn, "CREATE TABLE outbox (doc_id text, payload text)")
		o.MustFail(3, []string{"run"}, "REPLICATION")
	})
	t.Run("no JetStream", func(t *testing.T) {
		plain := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) { o.JetStream = false }})
		o, conn, _ := harness.Install(t, pgtest.Server(t), plain.URL(), "nojs")
		o.MustFail(3, []string{"init"}, "JetStream", plain.URL())
		harness.Exec(t, conn, "CREATE TABLE IF NOT EXISTS outbox (doc_id text, payload text)")
		o.MustFail(3, []string{"run"}, "JetStream")
	})
	t.Run("no such database", func(t *testing.T) {
		o := harness.New(t, pgtest.Server(t).URL("nowhere"), ns.URL(), "outflow")
		o.MustFail(3, []string{"init"}, "database", "postgres.url")
		o.MustFail(3, []string{"run"}, "database", "postgres.url")
	})
}

// TestRunWaitsForNATS: init says so; run waits for it, not ready but alive, and begins by itself.
func TestRunWaitsForNATS(t *testing.T) {
	t.Parallel()
	ns := natstest.Process(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "away")
	o.Init()
	harness.Must(t, ns.Stop())
	o.MustFail(3, []string{"init"}, "nats.url "+ns.URL())
	o.MustFail(3, []string{"status"}, "nats.url "+ns.URL())
	out, _, _ := o.Run("status")
	o.MustContain("outflow status without NATS", out, "nats_connect", "held by nobody", "not reachable")
	o.Start()
	harness.Insert(t, conn, "doc", 1, "{}")
	harness.Eventually(t, "not ready, and why", func() error {
		switch code, body := o.Get("/readyz"); {
		case code != http.StatusServiceUnavailable:
			return fmt.Errorf("%d %s", code, body)
		case !strings.Contains(body, "waiting") || !strings.Contains(strings.ToLower(body), "nats"):
			return errors.New(body)
		}
		return nil
	})
	if code, body := o.Get("/healthz"); code != http.StatusOK {
		t.Errorf("/healthz while NATS is away: %d %s", code, body)
	}
	harness.Must(t, ns.Start())
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
	o.AwaitReady()
	o.MustBeComplete(conn, ns.URL())
}

// TestRunWaitsForPostgreSQL: the same for PostgreSQL, which is not there when outflow starts.
func TestRunWaitsForPostgreSQL(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Own(t, 0)
	o := harness.New(t, pg.URL("postgres"), ns.URL(), "outflow")
	o.Init()
	harness.Must(t, pg.Stop("fast"))
	address := fmt.Sprintf("127.0.0.1:%d", pg.Port)
	o.MustFail(3, []string{"init"}, address)
	o.MustFail(3, []string{"status"}, address)
	out, _, _ := o.Run("status")
	o.MustContain("outflow status without PostgreSQL", out, "postgres_connect", "OUTBOX: stored",
		"sequence 0")
	o.MustFail(3, []string{"inspect"}, address)
	o.Start()
	harness.Eventually(t, "not ready, and why", func() error {
		if code, body := o.Get("/readyz"); code != http.StatusServiceUnavailable ||
			!strings.Contains(body, address) {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	harness.Must(t, pg.Start(t.Context()))
	conn := harness.Connect(t, pg.URL("postgres"))
	harness.Insert(t, conn, "doc", 1, "{}")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
	o.AwaitReady()
	o.MustBeComplete(conn, ns.URL())
}

// Ticks that are written into another database would never be read, and the last events would be held for
// ever.
func TestAWriteURLToAnotherDatabaseIsRefused(t *testing.T) {
	t.Parallel()
	pg := pgtest.Server(t)
	nats := natstest.Server(t)
	o, _, _ := harness.Install(t, pg, nats.URL(), "elsewhere")
	o.Init()
	o.Set("POSTGRES_WRITE_URL=" + pgtest.Database(t, pg))
	o.Start()
	o.MustEnd(3, "postgres.write_url leads to database")
}
