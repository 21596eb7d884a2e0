package consumer

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/puddle/v2"
)

// PostgresSQL is [Postgres] for services that use database/sql, also through an ORM: each event takes effect
// exactly once. The handler's tx is nil, and [Event.SQLTx] is the transaction. Any driver for PostgreSQL will
// do whose errors tell their SQLSTATE by a method SQLState, such as pgx's own (pgx/v5/stdlib) and lib/pq.
//
// The pool needs at least two connections, as does that of Postgres (SetMaxOpenConns; there is no limit by
// default). A transaction takes two more round trips than with Postgres; with another driver than pgx's each
// event takes one, too.
func PostgresSQL(db *sql.DB) Offsets {
	if db == nil {
		return postgresOffsets{}
	}
	return postgresOffsets{sqlDatabase{db, runnerSQL{db}}}
}

// SQLTx is the transaction that also moves the offset, with [PostgresSQL]; otherwise nil. The handler must
// not commit it, roll it back or use it after returning. If another goroutine ends it then, database/sql may
// panic.
func (e *Event) SQLTx() *sql.Tx { return e.sqlTx }

// statements is what a sql.DB, a sql.Conn and a sql.Tx have in common.
type statements interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// runnerSQL runs statements as a DB of pgx does. It passes what not all drivers know as text.
type runnerSQL struct{ to statements }

func (r runnerSQL) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	done, err := r.to.ExecContext(ctx, query, asText(args)...)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	n, err := done.RowsAffected()
	return pgconn.NewCommandTag("ROWS " + strconv.FormatInt(n, 10)), err
}

func (r runnerSQL) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	rows, err := r.to.QueryContext(ctx, query, asText(args)...)
	if err != nil {
		return nil, err
	}
	return sqlRows{rows: rows}, nil
}

func (r runnerSQL) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	rows, err := r.to.QueryContext(ctx, query, asText(args)...)
	return sqlRow{rows, err}
}

// asText turns arguments into what every driver passes on; the statements say the types.
func asText(args []any) []any {
	all := make([]any, len(args))
	for i, arg := range args {
		switch v := arg.(type) {
		case time.Duration:
			all[i] = strconv.FormatInt(v.Microseconds(), 10) + " microseconds"
		case []int64:
			all[i] = array(v, func(n int64) string { return strconv.FormatInt(n, 10) })
		case []int32:
			all[i] = array(v, func(n int32) string { return strconv.Itoa(int(n)) })
		case []int:
			all[i] = array(v, strconv.Itoa)
		case []string:
			all[i] = array(v, func(s string) string { return s })
		case [][]byte:
			all[i] = array(v, func(b []byte) string { return `\x` + hex.EncodeToString(b) })
		case []time.Time:
			all[i] = array(v, func(t time.Time) string { return t.Format(time.RFC3339Nano) })
		default:
			all[i] = arg
		}
	}
	return all
}

// array is the text of an array.
func array[T any](values []T, text func(T) string) string {
	var b strings.Builder
	b.WriteByte('{')
	for i, v := range values {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('"')
		b.WriteString(strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text(v)))
		b.WriteByte('"')
	}
	b.WriteByte('}')
	return b.String()
}

// fromText has arrays, which database/sql does not know, read by pgx.
func fromText(dest []any) []any {
	all := make([]any, len(dest))
	for i, d := range dest {
		switch all[i] = d; d.(type) {
		case *[]string, *[]int32, *[]int64:
			all[i] = pgtype.NewMap().SQLScanner(d)
		}
	}
	return all
}

// sqlRows are rows as those of pgx.
type sqlRows struct {
	pgx.Rows // nil: what it has beside is not used
	rows     *sql.Rows
}

func (r sqlRows) Close()                        { _ = r.rows.Close() } // Err has it
func (r sqlRows) Err() error                    { return r.rows.Err() }
func (r sqlRows) Next() bool                    { return r.rows.Next() }
func (r sqlRows) Scan(dest ...any) error        { return r.rows.Scan(fromText(dest)...) }
func (r sqlRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

type sqlRow struct {
	rows *sql.Rows
	err  error
}

func (r sqlRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	return errors.Join(r.rows.Scan(fromText(dest)...), r.rows.Close())
}

// sqlDatabase is a pool of database/sql.
type sqlDatabase struct {
	db *sql.DB
	runnerSQL
}

func (d sqlDatabase) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := d.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &sqlTx{runnerSQL: runnerSQL{tx}, tx: tx}, nil
}

func (d sqlDatabase) Acquire(ctx context.Context) (connection, error) {
	conn, err := d.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	return &sqlConn{runnerSQL: runnerSQL{conn}, conn: conn}, nil
}

func (d sqlDatabase) most() int { return d.db.Stats().MaxOpenConnections }

func (d sqlDatabase) key() any { return d.db }

// sqlConn is a connection of database/sql. Nobody but its user ends a transaction on it, so nothing closes it
// while it is used: sql.Conn looks whether it is closed before it takes its lock, and panics if it is closed
// in between. That is what the end of a transaction does which finds the connection broken.
type sqlConn struct {
	runnerSQL
	conn *sql.Conn
	// has database/sql end the newest transaction, on another goroutine: nothing but Close may follow
	end context.CancelFunc
}

func (c *sqlConn) Begin(ctx context.Context) (pgx.Tx, error) {
	return c.BeginTx(ctx, pgx.TxOptions{BeginQuery: "BEGIN"})
}

func (c *sqlConn) BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error) {
	begin, further, _ := strings.Cut(o.BeginQuery, ";")
	if begin == "" && o.IsoLevel != "" {
		begin = "BEGIN ISOLATION LEVEL " + string(o.IsoLevel)
	}
	if mode := strings.TrimPrefix(begin, "BEGIN"); mode != "" {
		further = "SET TRANSACTION" + mode + ";" + further
	}
	var own context.Context // only c.end ends it, and so the transaction
	own, c.end = context.WithCancel(context.WithoutCancel(ctx))
	t := &sqlTx{conn: c, check: strings.TrimSuffix(o.CommitQuery, "; COMMIT")}
	if err := c.within(ctx, func() (err error) {
		t.tx, err = c.conn.BeginTx(own, nil)
		return err
	}); err != nil {
		return nil, err
	}
	t.runnerSQL = runnerSQL{t.tx}
	if further != "" {
		if _, err := t.Exec(ctx, further); err != nil {
			_ = t.Rollback(ctx)
			return nil, err
		}
	}
	return t, nil
}

// within begins or ends a transaction, which the driver gives up when ctx ends, if it can. As with pgx the
// connection is closed then.
func (c *sqlConn) within(ctx context.Context, do func() error) error {
	stop := context.AfterFunc(ctx, c.end)
	err := do()
	if !stop() {
		_ = c.conn.Close() // also if somebody is at it: from here on all uses see that it is closed
	}
	return err
}

func (c *sqlConn) Release() {
	if c.end != nil {
		c.end()
	}
	_ = c.conn.Close() // gives it back to the pool
}

// leave has database/sql roll the transaction back and take the connection, which the handler can't use any
// more. A statement of it that still runs has to end first: its context has ended.
func (c *sqlConn) leave(*hangError) {
	c.end()
	go c.Release()
}

// sqlTx is a transaction of database/sql as the consumer uses it. The handler gets tx itself.
type sqlTx struct {
	runnerSQL
	pgx.Tx // nil: what it has beside is not used

	tx   *sql.Tx
	conn *sqlConn // nil if the pool has it: it ends with the context that it began with
	// SQL that divides by zero if the transaction is not the one that began; "": nobody can end it
	check string
}

func (t *sqlTx) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	return t.runnerSQL.Exec(ctx, query, args...)
}

func (t *sqlTx) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	return t.runnerSQL.Query(ctx, query, args...)
}

func (t *sqlTx) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	return t.runnerSQL.QueryRow(ctx, query, args...)
}

func (t *sqlTx) Commit(ctx context.Context) error {
	if t.check != "" {
		if _, err := t.Exec(ctx, t.check); err != nil {
			_ = t.Rollback(ctx)
			if sqlState(err) == "22012" {
				return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "22012", Message: err.Error()}
			}
			return err
		}
	}
	return t.ends(ctx, t.tx.Commit)
}

func (t *sqlTx) Rollback(ctx context.Context) error {
	err := t.ends(ctx, t.tx.Rollback)
	if errors.Is(err, sql.ErrTxDone) {
		return pgx.ErrTxClosed
	}
	return err
}

func (t *sqlTx) ends(ctx context.Context, do func() error) error {
	if t.conn == nil {
		return do()
	}
	return t.conn.within(ctx, do)
}

// left returns an error if the handler has left the transaction as it must not be. pgx's driver knows that by
// itself; others have to ask the server.
func (t *sqlTx) left(ctx context.Context) error {
	status := byte(0)
	if err := t.conn.conn.Raw(func(driver any) error {
		if c, ok := driver.(interface{ Conn() *pgx.Conn }); ok && !c.Conn().IsClosed() {
			if status = c.Conn().PgConn().TxStatus(); status == 'T' && c.Conn().PgConn().IsBusy() {
				return errRows
			}
		}
		return nil
	}); errors.Is(err, errRows) {
		return err
	}
	switch status {
	case 'T':
		return nil
	case 'E':
		return errSwallowed
	case 'I':
		return errEnded
	}
	_, err := t.Exec(ctx, t.check)
	switch state := sqlState(err); {
	case err == nil:
		return nil
	case state == "25P02":
		return errSwallowed
	case state == "22012" || errors.Is(err, sql.ErrTxDone):
		return errEnded
	}
	return fmt.Errorf("the connection broke while the handler ran: %w", err)
}

// closedPool reports whether a pool was closed. The error of database/sql has no name.
func closedPool(err error) bool {
	return errors.Is(err, puddle.ErrClosedPool) || strings.Contains(err.Error(), "sql: database is closed")
}
