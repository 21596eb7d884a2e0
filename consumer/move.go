package consumer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

func (s *postgres) move(ctx context.Context, source string, partition int, from, to offset,
	do func(ctx context.Context, tx pgx.Tx) error) error {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.slots }()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	left := false
	defer func() {
		if !left {
			conn.Release()
		}
	}()
	mark := rand.Int64()
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: s.beginQuery(mark, source, partition, from, to),
		CommitQuery: commitQuery(mark)})
	if err != nil {
		return refusedMove(err)
	}
	if err := do(ctx, tx); err != nil {
		if h := hanging(err); h != nil {
			conn.leave(h)
			left = true
		} else {
			s.rollback(ctx, tx)
			if s.committed(ctx, conn, mark, source, partition, from, to) {
				return fmt.Errorf("%w: %w", errEnded, err)
			}
		}
		return err
	}
	return s.commit(ctx, tx, partition, from, to)
}

func (s *postgres) shorten(ctx context.Context, tx pgx.Tx, source string, partition int,
	planned, to offset) error {
	tag, err := tx.Exec(ctx, `UPDATE `+s.table("outflow_mark")+` SET seq = $4, due = $5::text::pg_lsn, n = $6,
		lsn = $7::text::pg_lsn, i = $8, holed = $9 WHERE name = $1 AND source = $2 AND partition = $3
		AND epoch = $10 AND seq = $11`,
		s.cfg.Name, source, partition, int64(to.Seq), to.Due.String(), int64(to.N), to.Pos.LSN.String(),
		int64(to.Pos.Index), to.Lost, s.epoch, int64(planned.Seq))
	if err == nil && tag.RowsAffected() != 1 { // such as with the search path or the role of the handler
		err = errors.New("the transaction does not see its own mark any more")
	}
	return err
}

// beginQuery is the SQL that begins a transaction and moves the offset, in one round trip. If the stored
// offset is not the expected one, it divides by zero. The row stays locked until the transaction ends, so
// nobody else works on this partition. If this process is gone, the server notices that also during a
// statement. All values are numbers, or names that Config has checked.
func (s *postgres) beginQuery(mark int64, source string, partition int, from, to offset) string {
	var b strings.Builder
	b.WriteString("BEGIN")
	if s.cfg.Isolation != "" {
		b.WriteString(" ISOLATION LEVEL " + string(s.cfg.Isolation))
	}
	fmt.Fprintf(&b, "; SET LOCAL idle_in_transaction_session_timeout = %d; SELECT pg_catalog.set_config("+
		"'statement_timeout', '%d', true) WHERE pg_catalog.current_setting('statement_timeout') = '0'; "+
		"%sSET LOCAL outflow.transaction = '%[4]d'; SET outflow.committed = '%[4]d'; "+
		"WITH moved AS (UPDATE %s SET "+
		"seq = %d, due = '%v', n = %d, lsn = '%v', i = %d, holed = %t, updated_at = now()"+
		" WHERE name = '%s' AND source = '%s' AND partition = %d AND epoch = %d AND seq = %d RETURNING 1) "+
		"SELECT 1 / pg_catalog.count(*) FROM moved",
		s.idle.Milliseconds(), s.idle.Milliseconds(), s.checks, mark,
		s.table("outflow_mark"), to.Seq, to.Due, to.N, to.Pos.LSN, to.Pos.Index,
		to.Lost, s.cfg.Name, source, partition, s.epoch, from.Seq)
	return b.String()
}

// commitQuery is the SQL that commits a transaction, in one round trip, if it is still the one that begin
// began: the setting ends with it. Otherwise it divides by zero.
func commitQuery(mark int64) string {
	return fmt.Sprintf("SELECT 1 / (coalesce(pg_catalog.current_setting('outflow.transaction', true), '') "+
		"= '%d')::pg_catalog.int4; COMMIT", mark)
}

// refusedMove returns what an error of begin means.
func refusedMove(err error) error {
	if sqlState(err) == "22012" {
		return errMoved
	}
	return err
}

// sqlState is the SQLSTATE of an error of any driver, if it has one.
func sqlState(err error) (code string) {
	defer func() { _ = recover() }() // a handler's error may wrap a nil pointer
	var e interface{ SQLState() string }
	if errors.As(err, &e) {
		code = e.SQLState()
	}
	return code
}

// commit commits even if the consumer is stopping: the transaction is complete. After any error but a refusal
// it may have been committed.
func (s *postgres) commit(ctx context.Context, tx pgx.Tx, partition int, from, to offset) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout)
	defer cancel()
	err := tx.Commit(ctx)
	var e *pgconn.PgError
	if errors.As(err, &e) && e.Code == "22012" && e.Where == "" { // not one of a deferred trigger
		return fault(ErrHandler, errEnded, hintEnded, "partition %d, sequences %d to %d: if it was "+
			"committed, all of them count as done, and those after the event in question are not",
			partition, from.Seq+1, to.Seq)
	}
	if err == nil || refused(err) {
		return err
	}
	return fmt.Errorf("%w: %w", errUnknown, err)
}

// refused reports whether the server rolled back instead of committing, such as for a deferred constraint.
func refused(err error) bool {
	var e *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return true
	case errors.As(err, &e) && e != nil:
		return e.SeverityUnlocalized == "ERROR"
	}
	switch class(err) { // of another driver
	case "", "08", "53", "57", "58", "XX": // those may have cost the connection
		return false
	}
	return true
}

func (s *postgres) rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = tx.Rollback(ctx) // a connection that can't is closed, which rolls back as well
}

// committed reports whether a transaction of ours that was to be rolled back was committed, which only its
// handler can have done: begin's second setting outlives a commit only. A pooler may ask another session,
// which does not have it; then the offset tells, unless it was not to move. Without an answer it says no.
func (s *postgres) committed(ctx context.Context, conn connection, mark int64, source string, partition int,
	from, to offset) (is bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err := conn.QueryRow(ctx,
		"SELECT coalesce(pg_catalog.current_setting('outflow.committed', true), '') = $1",
		strconv.FormatInt(mark, 10)).Scan(&is)
	if err != nil || is || to.Seq == from.Seq {
		return err == nil && is
	}
	err = conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.table("outflow_mark")+` WHERE name = $1
		AND source = $2 AND partition = $3 AND epoch = $4 AND seq = $5)`, s.cfg.Name, source, partition,
		s.epoch, int64(to.Seq)).Scan(&is)
	return err == nil && is
}
