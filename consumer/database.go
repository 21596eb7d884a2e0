package consumer

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// database is what the offsets in PostgreSQL need of a pool of connections: a pgxpool.Pool, or a sql.DB.
type database interface {
	DB
	Begin(ctx context.Context) (pgx.Tx, error)
	// Acquire reserves a connection.
	Acquire(ctx context.Context) (connection, error)
	// most is how many connections there may be at a time; 0: there is no limit.
	most() int
	// key is equal for the same pool.
	key() any
}

// connection is a connection that is reserved until Release.
type connection interface {
	DB
	Begin(ctx context.Context) (pgx.Tx, error)
	// BeginTx begins a transaction by the SQL in BeginQuery, which begins with BEGIN, and ends it by that in
	// CommitQuery, which ends with COMMIT. Without BeginQuery, IsoLevel counts.
	BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error)
	Release()
	// leave leaves the connection to a handler that still uses it, instead of Release. The server ends the
	// transaction.
	leave(h *hangError)
}

// pgxDatabase is a pool of pgx.
type pgxDatabase struct{ *pgxpool.Pool }

func (d pgxDatabase) Acquire(ctx context.Context) (connection, error) {
	conn, err := d.Pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return pgxConn{conn}, nil
}

func (d pgxDatabase) most() int { return int(d.Config().MaxConns) }

func (d pgxDatabase) key() any { return d.Pool }

type pgxConn struct{ *pgxpool.Conn }

// leave: the server ends the transaction when it sees that the connection is gone.
func (c pgxConn) leave(h *hangError) {
	conn := c.Hijack()
	_ = conn.PgConn().Conn().Close() // may be called while the handler uses the connection
	go func() {
		<-h.returned
		_ = conn.Close(context.Background()) // the network connection is closed: this doesn't wait
	}()
}
