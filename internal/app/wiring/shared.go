package wiring

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/sink"
)

// Where clusters share a stream, its record is the home's, whose slot has one name on all of them. Each other
// cluster keeps a record of its own beside it.

// sharedAs is the cluster.id by which a record may have an owner; 0: the stream is not shared.
func sharedAs(cfg config.Config) int {
	if cfg.Cluster.Shared() {
		return cfg.Cluster.ID
	}
	return 0
}

// modeAs is the cluster.id by which a record may be one of clusters; 0: it may not.
func modeAs(cfg config.Config) int {
	if cfg.Cluster.Islands() {
		return cfg.Cluster.ID
	}
	return sharedAs(cfg)
}

// HomeStore is the store of the record of a shared stream, whoever makes that.
func HomeStore(cfg config.Config, c *sink.Conn) *checkpoint.Store {
	return checkpoint.NewStore(c.API(), checkpoint.StoreConfig{Stream: cfg.Stream, Slot: cfg.Slot,
		Cluster: modeAs(cfg)})
}

// SessionStore is where a session reads and writes the record, whichever cluster it says to be the owner.
func SessionStore(cfg config.Config, c *sink.Conn) pipeline.Store {
	if cfg.Cluster.Elsewhere() {
		return &pipeline.Elsewhere{Home: HomeStore(cfg, c), Own: Store(cfg, c)}
	}
	return HomeStore(cfg, c)
}

// CheckShared refuses a record that the setting cluster.mode does not go with, and, where the stream is
// another cluster's, a home that has none: there is nothing to stand by for.
func CheckShared(ctx context.Context, cfg config.Config, c *sink.Conn) error {
	if !cfg.Cluster.Shared() {
		return nil // the store refuses a record with an owner
	}
	rec, _, err := HomeStore(cfg, c).Load(ctx)
	elsewhere := cfg.Cluster.Elsewhere()
	switch {
	case err != nil:
		return err
	case elsewhere && (rec == nil || rec.Creating):
		return &outbox.Fault{
			Class: outbox.Fatal, Code: "cluster_home_missing",
			Message: fmt.Sprintf("the home of stream %s has no checkpoint record of slot %s: there is no "+
				"stream that this cluster could go on with", cfg.Stream, cfg.Slot),
			Hint: "Run `outflow init` at home first, and give slot and stream the names that they have there",
		}
	case rec == nil || rec.Creating || rec.Repairing != "" || rec.Epoch > 0:
		return nil
	}
	f := &outbox.Fault{
		Class: outbox.Fatal, Code: checkpoint.CodeMode,
		Message: fmt.Sprintf("cluster.mode is shared, and the checkpoint record of slot %s is of a stream "+
			"that its home alone makes", cfg.Slot),
		Hint: "Stop the writers and outflow, run `outflow drain` with cluster.mode: none, then `outflow " +
			"init` with cluster.mode: shared",
	}
	if elsewhere {
		f.Hint = "Do so at home: " + f.Hint
	}
	return f
}
