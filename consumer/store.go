package consumer

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
)

// Offsets says where a consumer keeps its offsets: [Postgres], [JetStream] or [Memory].
type Offsets interface {
	open(ctx context.Context, js jetstream.JetStream, cfg *Config) (store, error)
}

// store keeps the offsets of a consumer. One session uses it at a time. The workers of the session call move
// concurrently, each for its own partition; beside them only renew, read and dropOldLayouts are called.
type store interface {
	// acquire takes the lease, or returns a *heldError. From then on every move of an earlier holder fails.
	acquire(ctx context.Context) (*state, error)
	// save replaces the consumer's state. It is durable when save returns.
	save(ctx context.Context, s *state) error
	// dropOldLayouts drops a source's old layouts. Unlike save it may be called beside move and renew.
	dropOldLayouts(ctx context.Context, source string) error
	// renew extends the lease and makes all moves durable; errMoved if another instance has the lease.
	renew(ctx context.Context) error
	// renewEvery is how often renew has to be called.
	renewEvery() time.Duration
	// release gives the lease back after a last renew.
	release(ctx context.Context) error
	// abandon ends the session without giving the lease back.
	abandon()
	// move runs do in a transaction that moves a partition's offset. It returns errMoved if the stored offset
	// is not from, or another instance has the lease; that is checked also if to equals from. do gets a nil
	// tx if there is no database; its error is returned unchanged. Any other error is the database's; after
	// errUnknown the transaction may have been committed. With a database the move is durable when move
	// returns, otherwise after the next renew.
	move(ctx context.Context, source string, partition int, from, to offset,
		do func(ctx context.Context, tx pgx.Tx) error) error
	// shorten sets the offset that a transaction of move is to leave to an earlier one.
	shorten(ctx context.Context, tx pgx.Tx, source string, partition int, planned, to offset) error
	// read runs do in a transaction that moves no offset.
	read(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error
	// transactional reports whether effects and offsets share a transaction: exactly once.
	transactional() bool
}

// nothing is for a transaction that only moves an offset.
func nothing(context.Context, pgx.Tx) error { return nil }
