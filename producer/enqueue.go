package producer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// Querier is the caller's open transaction: a pgx.Tx, or a connection (*pgxpool.Conn, *pgx.Conn) on which one
// has begun.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// SQLQuerier is the caller's open transaction of database/sql, with any driver of PostgreSQL: a *sql.Tx, or
// what a library has in its place.
type SQLQuerier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Receipt says what an event was enqueued as. It is valid once the transaction has committed.
type Receipt struct {
	ID      string // empty if the table has no id column
	Counter int64  // the event's own, or the one that [Config.NextCounter] took
}

// Enqueue inserts the events in the caller's transaction, in their order and in one round trip, and returns
// a receipt for each in that order. An error of type [*Invalid] means that nothing was sent; after any other
// the transaction is to be rolled back. They are published, all of them in this order, if and only if the
// transaction commits. A pool, and a connection without a transaction, are refused, because the events would
// be published whatever becomes of the caller's own change.
func (o *Outbox) Enqueue(ctx context.Context, tx Querier, events ...Event) ([]Receipt, error) {
	return o.enqueue(ctx, pgxQuerier{tx}, events)
}

// EnqueueSQL is Enqueue for a transaction of database/sql. Of libraries that are made on it, give sqlx.Tx and
// ent.Tx (with ent's feature sql/execquery) themselves, of bun.Tx the field Tx, and of GORM
// db.Statement.ConnPool within its Transaction.
func (o *Outbox) EnqueueSQL(ctx context.Context, tx SQLQuerier, events ...Event) ([]Receipt, error) {
	return o.enqueue(ctx, sqlQuerier{tx}, events)
}

// errNoTransaction is what a pool or a connection without a transaction gets.
func errNoTransaction(given any) error {
	return fmt.Errorf("producer: no transaction is open on the %T: the events would be published whatever "+
		"becomes of your own change. Begin one, make the change in it, and give it to Enqueue", given)
}

// rows are a query's rows, of either kind of transaction.
type rows interface {
	Next() bool
	Scan(to ...any) error
	Err() error
}

// querier runs a query and hands its rows to read. check refuses what is known not to be a transaction.
type querier interface {
	check() error
	query(ctx context.Context, read func(rows) error, sql string, args ...any) error
}

type pgxQuerier struct{ tx Querier }

// query runs it in the way that the connection has been set to. By default that is a prepared statement: pgx
// prepares it when a connection first sees it, and from then on a call is one round trip. On a connection in
// mode exec it is one always, and PostgreSQL plans it each time.
func (q pgxQuerier) query(ctx context.Context, read func(rows) error, sql string, args ...any) error {
	r, err := q.tx.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	err = read(r)
	r.Close()
	return errors.Join(err, unlessSame(r.Err(), err))
}

// check sends nothing: the server has said with each answer whether a transaction is open.
func (q pgxQuerier) check() error {
	var conn *pgx.Conn
	switch tx := q.tx.(type) {
	case *pgx.Conn:
		conn = tx
	case interface{ Conn() *pgx.Conn }: // pgx.Tx, *pgxpool.Conn
		conn = tx.Conn()
	case interface {
		Begin(ctx context.Context) (pgx.Tx, error)
	}: // *pgxpool.Pool
		return errNoTransaction(tx)
	}
	if conn != nil && conn.PgConn().TxStatus() == 'I' && !conn.IsClosed() {
		return errNoTransaction(q.tx)
	}
	return nil
}

// unlessSame is the error that ended the rows, if read has not returned it.
func unlessSame(err, read error) error {
	if errors.Is(read, err) {
		return nil
	}
	return err
}

type sqlQuerier struct{ tx SQLQuerier }

func (q sqlQuerier) check() error {
	if db, ok := q.tx.(interface{ Stats() sql.DBStats }); ok { // *sql.DB, sqlx.DB, bun.DB
		return errNoTransaction(db)
	}
	return nil
}

func (q sqlQuerier) query(ctx context.Context, read func(rows) error, query string, args ...any) error {
	r, err := q.tx.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	return errors.Join(read(r), r.Close())
}

func (o *Outbox) enqueue(ctx context.Context, q querier, events []Event) ([]Receipt, error) {
	if len(events) == 0 {
		return nil, nil
	}
	if err := q.check(); err != nil {
		return nil, err
	}
	events = o.traced(ctx, events)
	l, s, err := o.prepare(ctx, q, events)
	if err != nil {
		return nil, err
	}
	doing := fmt.Sprintf("enqueue %d events into %s", len(events), o.into())
	if len(events) == 1 {
		doing = "enqueue 1 event into " + o.into()
	}
	receipts := make([]Receipt, len(events))
	n := 0
	err = q.query(ctx, func(r rows) error {
		var id, counter string
		for ; r.Next(); n++ {
			if err := r.Scan(&id, &counter); err != nil {
				return err
			}
			if n >= len(events) {
				continue
			}
			receipts[n] = Receipt{ID: id, Counter: events[n].Counter}
			if s.ids != nil {
				receipts[n].ID = s.ids[n]
			}
			if !s.returnsCounter {
				continue
			}
			var err error
			if receipts[n].Counter, err = strconv.ParseInt(counter, 10, 64); err != nil {
				return fmt.Errorf("counter %q: %w", counter, err)
			}
		}
		return r.Err()
	}, s.sql, s.args...)
	switch {
	case err != nil:
		return nil, o.failed(doing, l, events, err)
	case n != len(events):
		return nil, fmt.Errorf("producer: %s: %d rows were inserted. A trigger or a rule of the table "+
			"keeps rows back. Roll back, and take it away", doing, n)
	}
	return receipts, nil
}

// prepare makes the statement. An event that the table as it was read once does not take is held against the
// table as it is.
func (o *Outbox) prepare(ctx context.Context, q querier, events []Event) (l *layout, s statement, err error) {
	if o.message {
		s, err = o.buildMessages(events)
		return nil, s, err
	}
	for known := o.layout.Load(); ; known = nil {
		if l = known; l == nil {
			if l, err = o.read(ctx, q); err != nil {
				return nil, s, err
			}
		}
		s, err = o.build(l, events)
		if bad := (*Invalid)(nil); known == nil || !errors.As(err, &bad) || !bad.table {
			return l, s, err
		}
	}
}

func (o *Outbox) into() string {
	if o.message {
		return "the WAL"
	}
	return "table " + o.cfg.Table
}

// read reads the table's columns.
func (o *Outbox) read(ctx context.Context, q querier) (*layout, error) {
	var all []layoutRow
	err := q.query(ctx, func(r rows) error {
		for r.Next() {
			var row layoutRow
			if err := r.Scan(row.fields()...); err != nil {
				return err
			}
			all = append(all, row)
		}
		return r.Err()
	}, layoutSQL, o.table.quoted(), o.cfg.Publication)
	if err != nil {
		return nil, o.failed("read the columns of table "+o.cfg.Table, nil, nil, err)
	}
	l, err := o.newLayout(all)
	if err != nil {
		return nil, err
	}
	o.layout.Store(l)
	return l, nil
}
