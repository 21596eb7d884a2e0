package wiring

import (
	"log/slog"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestMain(m *testing.M) {
	natstest.RunChild()
	goleak.VerifyTestMain(pgtest.Tests(m))
}

// A role that may log in and not replicate is good for an ordinary connection only.
func TestConnectionsAreTriedAsTheyAreUsed(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	d.Exec("CREATE ROLE wiring_no_replication LOGIN")
	t.Cleanup(func() { d.Exec("DROP ROLE wiring_no_replication") })
	cfg := config.Config{Slot: d.Slot, Stream: "OUTBOX", Subject: outbox.DefaultSubject,
		NATS: config.NATS{URL: natstest.Server(t).URL()}}
	cfg.Sink.MaxPayload = 1 << 20
	for url, want := range map[string]string{
		d.URL: "",
		outboxdb.WithUser(t, d.URL, "wiring_no_replication"): "connect for replication",
	} {
		cfg.Postgres.URL, cfg.Postgres.WriteURL = url, url
		failed := TryConnections(t.Context(), cfg)
		if want == "" && len(failed) > 0 || want != "" && (len(failed) != 1 ||
			!strings.Contains(failed[0].Error(), want)) {
			t.Errorf("want %q: %v", want, failed)
		}
	}
}

// A server that has a place for one replication connection alone, which is open, is as it should be.
func TestTheOpenReplicationConnectionIsNotMissed(t *testing.T) {
	t.Parallel()
	s := pgtest.Own(t, 0, "max_wal_senders=1")
	cfg := config.Config{Slot: "outflow", Stream: "OUTBOX", Subject: outbox.DefaultSubject,
		NATS: config.NATS{URL: natstest.Server(t).URL()}}
	cfg.Sink.MaxPayload = 1 << 20
	cfg.Postgres.URL = pgtest.Database(t, s)
	cfg.Postgres.WriteURL = cfg.Postgres.URL
	c := Catalog(cfg)
	conn, err := c.Target().ConnectReplication(t.Context())
	must.Succeed(t, err)
	defer postgres.Close(conn)
	if failed := TryConnections(t.Context(), cfg); len(failed) > 0 {
		t.Error(failed)
	}
}

// A connection costs PostgreSQL a process, and more computing than anything else of a start.
func TestASessionOpensTwoConnectionsToPostgreSQL(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	d.Exec(outboxdb.PlainTable)
	proxy, url, err := faultproxy.To(d.URL)
	must.Succeed(t, err)
	t.Cleanup(proxy.Close)
	cfg, err := config.Load(config.Args{
		"postgres.url": url, "nats.url": natstest.Server(t).URL(), "slot": d.Slot,
	}, nil)
	must.Succeed(t, err)
	o := &opener{cfg: cfg, log: slog.New(slog.DiscardHandler), check: (*Layout).CheckKey}
	for n := 2; n <= 4; n += 2 { // the second session opens no more and no less
		conns, err := o.open(outboxdb.Within(t))
		must.Succeed(t, err)
		conns.Close()
		if got := proxy.Accepted(); got != n {
			t.Errorf("%d connections, want %d", got, n)
		}
	}
}
