package partition

import (
	"log/slog"
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	lifecycle "github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// TestPartitionsAreMadeWhileNATSIsAway: the services go on writing.
func TestPartitionsAreMadeWhileNATSIsAway(t *testing.T) {
	t.Parallel()
	db := outboxdb.New(t, pgtest.Server(t))
	db.Exec(`CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), doc_id text NOT NULL,
		actor_id text NOT NULL, counter bigint NOT NULL, payload jsonb NOT NULL,
		created_at timestamptz NOT NULL DEFAULT now(),
		PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at)`)
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": "nats://127.0.0.1:1",
		"slot": db.Slot, "table": "public.outbox"}, nil)
	must.Succeed(t, err)
	cfg.Retain.PostgresURL = outboxdb.New(t, pgtest.Server(t)).URL // that has no outbox, or another one
	_, err = Run(outboxdb.Within(t), cfg, slog.New(slog.DiscardHandler), Options{Apply: true})
	outboxdb.WantFault(t, err, outbox.Fatal, "retain_url")
	cfg.Retain.PostgresURL = db.URL + "&application_name=owner"
	rep, err := Run(outboxdb.Within(t), cfg, slog.New(slog.DiscardHandler), Options{Apply: true})
	outboxdb.WantFault(t, err, outbox.Transient, "nats_connect")
	if rep == nil || len(rep.Steps) < 4 || rep.Steps[0].Action != lifecycle.Create {
		t.Errorf("it did %+v", rep)
	}
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', 1, '{}')")
}
