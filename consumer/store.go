package consumer

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
)

// Offsets says where a consumer keeps how far it is: [Postgres], [JetStream] or [Memory].
type Offsets interface {
	open(ctx context.Context, js jetstream.JetStream, cfg *Config) (store, error)
}

// store keeps a consumer's offsets. One session uses it at a time; the session's workers call move at the same time, each for its own
// partition.
type store interface {
	// take takes the lease, or returns a *heldError. From then on whatever an earlier holder tries to move fails.
	acquire(ctx context.Context) (*state, error)
	// set replaces what is stored of the consumer.
	save(ctx context.Context, s *state) error
	// forget drops a source's old layouts. Unlike set it may be called while workers move offsets, but not beside renew.
	dropOldLayouts(ctx context.Context, source string) error
	// renew keeps the lease, and makes durable what move has not; errMoved if another one has it.
	renew(ctx context.Context) error
	// every is how often renew is to be called.
	renewEvery() time.Duration
	// give gives the lease back, after a last renew.
	release(ctx context.Context) error
	// drop lets go of the session without giving the lease back.
	abandon()
	// move runs do in a transaction in which a partition's offset goes from the one that this session knows to another: errMoved if it
	// is not that one, or the lease is not ours. With to equal to from nothing moves, and the transaction is the session's all the same.
	// do gets nil where there is no database; its error comes back as it is. What else goes wrong is the database's; after errUnknown it
	// may be committed.
	move(ctx context.Context, source string, partition int, from, to offset, do func(ctx context.Context, tx pgx.Tx) error) error
	// read runs do in a transaction without an offset.
	read(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error
	// exact reports whether there is a transaction: effects are exactly once.
	transactional() bool
	// close lets go of what open took.
	close()
}

// nothing is what a transaction does that only moves an offset.
func nothing(context.Context, pgx.Tx) error { return nil }
