package conns

import (
	"context"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// Owner is the role that owns the outbox, where one is set for it.
func Owner(cfg config.Config) postgres.Target {
	if url := cfg.Retain.PostgresURL; url != "" {
		return postgres.Target{Setting: "retain.postgres_url", URL: url, Slot: cfg.Slot, Command: cfg.Command}
	}
	return postgres.Target{URL: cfg.Postgres.URL, Slot: cfg.Slot, Command: cfg.Command}
}

// States does something with the table of states, by the role that retention works as.
func States(ctx context.Context, cfg config.Config,
	do func(*partition.Manager, context.Context) error) error {
	if !cfg.Source.Rows() {
		return nil
	}
	m, err := partition.Open(ctx, Owner(cfg), partition.Config{Table: cfg.Table, Slot: cfg.Slot,
		Own: rowfilter.Condition(cfg.Shard, postgres.Quote(cfg.Columns.Doc.Name))}, partition.Options{})
	if err != nil {
		return err
	}
	defer m.Close()
	return do(m, ctx)
}

// Erasures does something with the requests of erasures, by the role that they are written as.
func Erasures(ctx context.Context, cfg config.Config,
	do func(*erasure.Ledger, context.Context, erasure.End) error, end erasure.End) error {
	if !cfg.Source.Rows() {
		return nil
	}
	l, err := erasure.Open(ctx, Owner(cfg), cfg.Table, cfg.Slot)
	if err != nil {
		return err
	}
	defer l.Close()
	return do(l, ctx, end)
}
