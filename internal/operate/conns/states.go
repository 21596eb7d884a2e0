package conns

import (
	"context"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// Owner is the role that owns the outbox, where one is set for it. It leads to where postgres.url does, which
// says there of itself: what is named as the outbox elsewhere has other rows.
func Owner(cfg config.Config, there relay.ServerState) postgres.Target {
	t := postgres.Target{URL: cfg.Postgres.URL, Slot: cfg.Slot, Command: cfg.Command}
	if url := cfg.Retain.PostgresURL; url != "" && url != t.URL {
		t.Setting, t.URL = "retain.postgres_url", url
		t.Same = postgres.Database{System: there.SystemID, Name: there.Database}
	}
	return t
}

// States does something with the table of states, by the role that retention works as.
func States(ctx context.Context, cfg config.Config, there relay.ServerState,
	do func(*partition.Manager, context.Context) error) error {
	if !cfg.Source.Rows() {
		return nil
	}
	m, err := partition.Open(ctx, Owner(cfg, there), partition.Config{Table: cfg.Table, Slot: cfg.Slot,
		Own: rowfilter.Condition(cfg.Shard, postgres.Quote(cfg.Columns.Doc.Name))}, partition.Options{})
	if err != nil {
		return err
	}
	defer m.Close()
	return do(m, ctx)
}

// Erasures does something with the requests of erasures, by the role that they are written as.
func Erasures(ctx context.Context, cfg config.Config, there relay.ServerState,
	do func(*erasure.Ledger, context.Context, erasure.End) error, end erasure.End) error {
	if !cfg.Source.Rows() {
		return nil
	}
	l, err := erasure.Open(ctx, Owner(cfg, there), cfg.Table, cfg.Slot)
	if err != nil {
		return err
	}
	defer l.Close()
	return do(l, ctx, end)
}
