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
// concurrently, each for its own partition; beside them only due, renew and read are called.
type store interface {
	// acquire claims the partitions that are this instance's share, and gives back what is more than that.
	// Where instances share partitions, it leaves those that avoid returns to others, now and until the
	// next acquire.
	// From then on every move of an earlier claim on them fails. It returns a *heldError if there is nothing
	// for this instance, and a state without offsets if it can't work with the layout's keying. Where a
	// layout is wanted and all offsets are at its barrier, it becomes the layout.
	acquire(ctx context.Context, avoid avoids) (*state, error)
	// begin makes the offsets of a new consumer, if nobody has made them meanwhile.
	begin(ctx context.Context, l layout, filters []string, at offset, created time.Time) error
	// beginReplay makes the offsets of all partitions in a replay's stream that was made at that time, if
	// there are none, or those in the stream that acquire has named: was is when that was made.
	beginReplay(ctx context.Context, created, was time.Time) error
	// endReplay removes the offsets of a replay of which the stream has nothing any more. It asks whether
	// that is so when no instance can move them: another one may have read what has come since the caller
	// looked.
	endReplay(ctx context.Context, is func(ctx context.Context) (bool, error)) error
	// want asks for another layout, once all offsets are at a barrier, or moves that barrier.
	want(ctx context.Context, l layout, barrier uint64) error
	// save stores filters, the time of creation of the live stream, and which offsets are lost.
	save(ctx context.Context, s *state) error
	// due reports whether acquire would do something else than it did for this session.
	due(ctx context.Context) (bool, error)
	// renew extends the lease and makes all moves durable; errMoved if others count this instance as dead.
	renew(ctx context.Context) error
	// renewEvery is how often renew has to be called, dueEvery how often due.
	renewEvery() time.Duration
	dueEvery() time.Duration
	// release gives all partitions back.
	release(ctx context.Context) error
	// abandon ends the session without giving anything back.
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
	// read runs do in a transaction that moves no offset. load does so before the session's workers begin,
	// and renew may be called meanwhile.
	read(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error
	load(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error
	// transactional reports whether effects and offsets share a transaction: exactly once.
	transactional() bool
}

// avoids returns the partitions of a layout that an instance must not claim now.
type avoids func(l layout) map[int]bool

// nothing is for a transaction that only moves an offset.
func nothing(context.Context, pgx.Tx) error { return nil }
