// Package conns opens the connections of the operator's commands, and reads over them what a start of outflow
// run reads.
package conns

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
	"github.com/outflowhq/outflow/sink/stream"
)

// Conns are the connections of one command, or of one attempt of it.
type Conns struct {
	Layout  *wiring.Layout // follows the checkpoint record once that was read
	NATS    *sink.Conn
	Store   *checkpoint.Store
	Session *replication.Session

	cfg config.Config
}

// Open connects to PostgreSQL and NATS. It checks nothing of what it finds there but the table's columns.
func Open(ctx context.Context, cfg config.Config, log *slog.Logger) (_ *Conns, err error) {
	c := &Conns{cfg: cfg}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if c.Session, err = wiring.Inspect(ctx, cfg, log); err != nil {
		return nil, err
	}
	if c.Layout, err = wiring.Apply(ctx, cfg, c.Session); err != nil {
		return nil, err
	}
	sc, err := wiring.Sink(cfg, c.Layout, log)
	if err != nil {
		return nil, err
	}
	if c.NATS, err = wiring.Connect(ctx, cfg, sc); err != nil {
		return nil, err
	}
	c.Store = wiring.Store(cfg, c.NATS)
	return c, nil
}

// Close closes the connections. It may be called on nil, and more than once.
func (c *Conns) Close() {
	if c == nil {
		return
	}
	if c.NATS != nil {
		c.NATS.Close()
	}
	if c.Session != nil {
		c.Session.Close()
	}
}

// Reader reads everything but the publication, and lets the layout follow the record.
func (c *Conns) Reader() *checkpoint.Reader {
	return &checkpoint.Reader{
		Slot: waiting(c.cfg, wiring.WaitPostgres, c.Session.Slot),
		Record: func(ctx context.Context) (*checkpoint.Record, uint64, error) {
			defer wiring.WaitNATS(ctx, c.cfg)()
			rec, revision, err := c.Store.Load(ctx)
			if err == nil {
				c.Layout.Follow(c.cfg, rec)
			}
			return rec, revision, err
		},
		Stream: waiting(c.cfg, wiring.WaitNATS, c.NATS.State),
		Server: waiting(c.cfg, wiring.WaitPostgres, c.Session.Server),
	}
}

// waiting is read, which shows that a server is waited for.
func waiting[T any](cfg config.Config, wait func(context.Context, config.Config) func(),
	read func(context.Context) (T, error)) func(context.Context) (T, error) {
	return func(ctx context.Context) (T, error) {
		defer wait(ctx, cfg)()
		return read(ctx)
	}
}

// SaveRecord writes the record by compare-and-set and returns its new revision.
func SaveRecord(ctx context.Context, store *checkpoint.Store, rec *checkpoint.Record,
	revision uint64) (uint64, error) {
	revision, err := store.Save(ctx, rec, revision)
	if err != nil {
		return 0, fmt.Errorf("write the checkpoint record: %w", err)
	}
	return revision, nil
}

// EnsureStream makes the stream as the settings say, if there is none.
func EnsureStream(ctx context.Context, cfg config.Config, conn *sink.Conn) error {
	in := cfg.Init
	return conn.EnsureStream(ctx, stream.Options{
		Replicas: in.Replicas, Storage: in.Storage, MaxAge: in.MaxAge, MaxBytes: in.MaxBytes,
	})
}

// EnsureBucket makes the bucket of the checkpoint record as the settings say, if there is none.
func EnsureBucket(ctx context.Context, cfg config.Config, store *checkpoint.Store) error {
	storage := jetstream.FileStorage
	if cfg.Init.Storage == "memory" {
		storage = jetstream.MemoryStorage
	}
	return store.EnsureBucket(ctx, cfg.Init.Replicas, storage)
}
