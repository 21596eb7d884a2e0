package conns

import (
	"context"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// States does something with the table of states, by the role that retention works as.
func States(ctx context.Context, cfg config.Config,
	do func(*partition.Manager, context.Context) error) error {
	if !cfg.Source.Rows() {
		return nil
	}
	target := postgres.Target{URL: cfg.Postgres.URL, Slot: cfg.Slot}
	if url := cfg.Retain.PostgresURL; url != "" {
		target.Setting, target.URL = "retain.postgres_url", url
	}
	m, err := partition.Open(ctx, target, partition.Config{Table: cfg.Table, Slot: cfg.Slot,
		Own: rowfilter.Condition(cfg.Shard, postgres.Quote(cfg.Columns.Doc.Name))}, partition.Options{})
	if err != nil {
		return err
	}
	defer m.Close()
	return do(m, ctx)
}
