package consumer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// invoke upcasts the event and calls the handler once. It returns a panic of the handler as an error, as well
// as anything that the handler must not do with its transaction.
func invoke(ctx context.Context, cfg *Config, h Handler, tx pgx.Tx, e *Event) (err error) {
	if err := cfg.Schema.upcast(e); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	if tx == nil {
		return call(ctx, h, nil, e)
	}
	if err := call(ctx, h, handlerTx{tx}, e); err != nil {
		return err
	}
	switch conn := tx.Conn().PgConn(); {
	case conn.IsClosed():
		return errors.New("the connection broke while the handler ran")
	case conn.TxStatus() == 'E':
		return errSwallowed
	case conn.TxStatus() != 'T':
		return errEnded
	}
	return nil
}

// errSwallowed: the handler ignored an error of a statement. PostgreSQL would roll back at the commit.
var errSwallowed = errors.New("the handler returned nil, but a statement of its transaction failed: return " +
	"that error, or run what may fail in a savepoint (tx.Begin)")

// errEnded: the handler ended the transaction itself. What was in it may be committed.
var errEnded = errors.New("the handler ended the transaction that it was given, or tried to, with an SQL " +
	"command of its own: it must not")

const hintEnded = "Leave the end of the transaction to the consumer: return nil or an error"

func call(ctx context.Context, h Handler, tx pgx.Tx, e *Event) (err error) {
	defer recovered(&err)
	return h(ctx, tx, e)
}

// handlerTx is the transaction as a handler gets it: only the consumer may end it, together with the offset.
type handlerTx struct{ pgx.Tx }

// Exec implements [pgx.Tx]. It refuses what would end the transaction, which has already moved the offset.
func (t handlerTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if ends(sql) {
		return pgconn.CommandTag{}, errEnded
	}
	return t.Tx.Exec(ctx, sql, args...)
}

// ends reports whether an SQL command ends the transaction, as far as its first words show that.
func ends(sql string) bool {
	words := strings.Fields(strings.ToUpper(strings.ReplaceAll(sql[:min(len(sql), 64)], ";", " ")))
	if len(words) == 0 {
		return false
	}
	switch words[0] {
	case "COMMIT", "END", "ABORT":
		return true
	case "ROLLBACK":
		return !slices.Contains(words, "TO")
	case "PREPARE":
		return len(words) > 1 && words[1] == "TRANSACTION"
	}
	return false
}

// Commit implements [pgx.Tx]. It only returns an error.
func (handlerTx) Commit(context.Context) error {
	return errors.New("the consumer commits the transaction of a handler, not the handler")
}

// Rollback implements [pgx.Tx]. It only returns an error.
func (handlerTx) Rollback(context.Context) error {
	return errors.New("the consumer rolls back the transaction of a handler if that returns an error, not " +
		"the handler")
}

// wait waits after the n-th failed attempt, from 1, or until ctx ends.
func (b Backoff) wait(ctx context.Context, n int) error {
	pause := b.First
	for ; n > 1 && pause < b.Max; n-- {
		pause *= 2
	}
	pause = min(pause, b.Max)
	pause += time.Duration((rand.Float64() - 0.5) * 0.4 * float64(pause))
	if sleep(ctx, pause) != nil {
		return fmt.Errorf("while waiting for the next attempt: %w", context.Cause(ctx))
	}
	return nil
}
