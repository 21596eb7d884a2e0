package consumer

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// quietSQL is a driver of database/sql without a server.
type quietSQL struct {
	begin, end   func(own context.Context) error // own is the context that the transaction began with
	ended, asked int
}

func (d *quietSQL) Connect(context.Context) (driver.Conn, error) { return &quietConn{quietSQL: d}, nil }
func (d *quietSQL) Driver() driver.Driver                        { return nil }

type quietConn struct {
	*quietSQL
	own context.Context
}

func (c *quietConn) Prepare(string) (driver.Stmt, error) { return nil, errors.ErrUnsupported }
func (c *quietConn) Begin() (driver.Tx, error)           { return nil, errors.ErrUnsupported }
func (c *quietConn) Close() error                        { return nil }
func (c *quietConn) Commit() error                       { return c.Rollback() }

func (c *quietConn) BeginTx(own context.Context, _ driver.TxOptions) (driver.Tx, error) {
	c.own = own
	return c, c.begin(own)
}

func (c *quietConn) Rollback() error {
	c.ended++
	return c.end(c.own)
}

func (c *quietConn) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return driver.RowsAffected(1), nil
}

func (c *quietConn) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	c.asked++
	return noRows{}, nil
}

type noRows struct{}

func (noRows) Columns() []string         { return nil }
func (noRows) Close() error              { return nil }
func (noRows) Next([]driver.Value) error { return io.EOF }

func succeeds(context.Context) error { return nil }

// until is of a driver that gives up, or is through, when the transaction's context ends.
func until(err error) func(own context.Context) error {
	return func(own context.Context) error {
		<-own.Done()
		return err
	}
}

// When the run is cancelled, database/sql does not end the transaction on a goroutine of its own. That would
// close a broken connection at the moment at which it is used, and sql.Conn panics.
func TestTransactionsOfDatabaseSQLEndWhereTheConnectionIsUsed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end   error
		asked int // how often the connection was asked whether the handler has committed
	}{"the connection stays": {nil, 1}, "it breaks": {driver.ErrBadConn, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := &quietSQL{begin: succeeds, end: func(context.Context) error { return c.end }}
				db := sql.OpenDB(d)
				defer db.Close()
				s := &postgres{pool: sqlDatabase{db, runnerSQL{db}}, slots: make(chan struct{}, 1),
					cfg: &Config{}}
				ctx, cancel := context.WithCancel(t.Context())
				err := s.move(ctx, live, 0, offset{}, offset{}, func(context.Context, pgx.Tx) error {
					cancel()
					synctest.Wait()
					if d.ended != 0 {
						t.Error("it is ended while its handler runs")
					}
					return errStopping
				})
				if !errors.Is(err, errStopping) || d.ended != 1 || d.asked != c.asked {
					t.Errorf("%v, ended %d times, asked %d times", err, d.ended, d.asked)
				}
			})
		})
	}
}

// A server that does not answer at the begin or the end of a transaction is waited for until the context
// ends. The connection is not used any more, also if there was an answer at that moment.
func TestTheEndsOfTransactionsOfDatabaseSQLAreNotAwaitedForEver(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		begin, end func(own context.Context) error
		do         func(tx pgx.Tx, ctx context.Context) error
	}{
		"begin":              {until(driver.ErrBadConn), succeeds, pgx.Tx.Rollback},
		"begin, answered":    {until(nil), succeeds, pgx.Tx.Rollback},
		"commit":             {succeeds, until(errors.New("late")), pgx.Tx.Commit},
		"commit, answered":   {succeeds, until(nil), pgx.Tx.Commit},
		"rollback":           {succeeds, until(errors.New("late")), pgx.Tx.Rollback},
		"rollback, answered": {succeeds, until(nil), pgx.Tx.Rollback},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := sql.OpenDB(&quietSQL{begin: c.begin, end: c.end})
				defer db.Close()
				conn, err := sqlDatabase{db, runnerSQL{db}}.Acquire(t.Context())
				must.Succeed(t, err)
				defer conn.Release()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if tx, err := conn.Begin(ctx); err == nil {
					_ = c.do(tx, ctx)
				}
				if _, err := conn.Exec(t.Context(), "SELECT"); !errors.Is(err, sql.ErrConnDone) {
					t.Errorf("the connection is used further: %v", err)
				}
			})
		})
	}
}
