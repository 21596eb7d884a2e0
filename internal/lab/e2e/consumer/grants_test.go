package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer" // consumer is a helper of these tests
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// reads runs a consumer until it has n more events or ends, and returns its error.
func reads(t *testing.T, js jetstream.JetStream, pool *pgxpool.Pool, cfg consume.Config, n int) error {
	t.Helper()
	c, err := consume.New(js, consume.Postgres(pool), cfg)
	harness.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	return c.Run(ctx, func(context.Context, pgx.Tx, *consume.Event) error {
		if n--; n == 0 {
			cancel()
		}
		return nil
	})
}

// TestAConsumersGrantsAreEnough runs a consumer under the roles of docs/postgres.md: one that owns a schema,
// and one that has the grants, which it needs all.
func TestAConsumersGrantsAreEnough(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Own(t, 0) // the page names its roles
	o, conn, url := harness.Install(t, pg, ns.URL(), "grants", "REORDER_HORIZON=0s")
	o.Init()
	o.Start()
	for i := range 3 {
		harness.Insert(t, conn, "doc", i, "{}")
	}
	js := harness.JetStream(t, ns.URL())
	pool := func() *pgxpool.Pool {
		cfg, err := pgxpool.ParseConfig(url)
		harness.Must(t, err)
		cfg.ConnConfig.User, cfg.ConnConfig.Password = "texts", "documented"
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		harness.Must(t, err)
		t.Cleanup(pool.Close)
		return pool
	}
	harness.Exec(t, conn, strings.ReplaceAll(harness.DocumentedBlock(t, "postgres.md",
		"A consumer's role", 0), "…", "documented"))
	cfg := consume.Config{Name: "own", Stream: o.Stream, DatabaseSchema: "texts", Lease: time.Second}
	harness.Must(t, reads(t, js, pool(), cfg, 3))

	harness.Exec(t, conn, "CREATE SCHEMA consumers; "+consume.Tables("consumers"))
	grants := harness.DocumentedBlock(t, "postgres.md", "A consumer's role", 1)
	cfg.Name, cfg.DatabaseSchema, cfg.NoCreate = "granted", "consumers", true
	harness.Exec(t, conn, grants)
	harness.Must(t, reads(t, js, pool(), cfg, 3))
	for _, table := range []string{"outflow_consumer", "outflow_member", "outflow_mark", "outflow_parked"} {
		for _, right := range []string{"SELECT", "UPDATE"} {
			if table == "outflow_parked" && right == "UPDATE" {
				continue // only where something is released
			}
			harness.Exec(t, conn, fmt.Sprintf("REVOKE %s ON consumers.%s FROM texts", right, table))
			cfg.Name = "without_" + table
			err := reads(t, js, pool(), cfg, 3)
			if !errors.Is(err, consume.ErrSetup) || !strings.Contains(err.Error(), table) {
				t.Errorf("without %s on %s: %v", right, table, err)
			}
			harness.Exec(t, conn, grants)
		}
	}
}

// TestAConsumersRightsAreEnough runs a consumer as the NATS user of docs/nats.md.
func TestAConsumersRightsAreEnough(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const password = "documented"
	conf, err := server.ProcessConfigFile(harness.WriteFile(t, "nats.conf",
		strings.ReplaceAll(harness.DocumentedBlock(t, "nats.md", "A consumer's rights", 0), "…", password)))
	harness.Must(t, err)
	ns := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.Users = append(conf.Users, &server.User{Username: "admin", Password: password})
	}})
	url := pgtest.Database(t, pgtest.Server(t))
	o := harness.New(t, url, ns.URL(), harness.SlotName("reading"), "NATS_USER=admin",
		"NATS_PASSWORD="+password, "REORDER_HORIZON=0s")
	o.UseStream("OUTBOX")
	o.Init()
	o.Start()
	conn := harness.Connect(t, url)
	for i := range 3 {
		harness.Insert(t, conn, "doc", i, "{}")
	}
	nc, err := nats.Connect(ns.URL(), nats.UserInfo("texts", password), nats.Timeout(harness.AskTimeout),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { t.Error(err) }))
	harness.Must(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(harness.AskTimeout))
	harness.Must(t, err)
	pool, err := pgxpool.New(t.Context(), url)
	harness.Must(t, err)
	t.Cleanup(pool.Close)
	cfg := consume.Config{Name: "texts", Stream: o.Stream, Lease: time.Second}
	harness.Must(t, reads(t, js, pool, cfg, 3))
	o.MustRun("replay", "--doc", "doc", "--to", "consumer:texts")
	harness.Must(t, reads(t, js, pool, cfg, 3))
}
