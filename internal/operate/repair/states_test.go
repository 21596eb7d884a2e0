package repair

import (
	"testing"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/outbox"
)

// TestStatesOfAnotherDatabaseStay: retain.postgres_url leads to one that has a table of the outbox's name.
func TestStatesOfAnotherDatabaseStay(t *testing.T) {
	t.Parallel()
	pg := pgtest.Server(t)
	db, other := outboxdb.New(t, pg), outboxdb.New(t, pg)
	other.Exec(outboxdb.PlainTable)
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": natstest.Server(t).URL(),
		"slot": db.Slot, "stream": "OUTBOX"}, nil)
	must.Succeed(t, err)
	must.Succeed(t, initialize.Run(outboxdb.Within(t), cfg, quiet, func(string, ...any) {}, nil))
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	cfg.Retain.PostgresURL = other.URL
	_, err = Run(outboxdb.Within(t), cfg, quiet, Options{Accept: "slot_missing", Where: "doc_id = 'd'"})
	outboxdb.WantFault(t, err, outbox.Fatal, "retain_url")
}
