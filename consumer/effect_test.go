package consumer

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAHandlerThatMisbehavesIsAnErrorThatSaysHow: each becomes an error that says what the handler did, and
// none takes the consumer with it.
func TestAHandlerThatMisbehavesIsAnErrorThatSaysHow(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), pgtest.Database(t, pgtest.Server(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	for want, h := range map[string]Handler{
		"": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			return nil
		},
		"panic: runtime error: index out of": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			_ = e.Data[len(e.Data)]
			return nil
		},
		"TestAHandlerThatMisbehavesIsAnErrorThatSaysHow.func": func(ctx context.Context, tx pgx.Tx,
			e *Event) error {
			panic(errors.ErrUnsupported)
		},
		"the consumer commits": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			return tx.Commit(ctx)
		},
		"the consumer rolls back": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			return tx.Rollback(ctx)
		},
		"but a statement of its transaction": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			_, _ = tx.Exec(ctx, "SELECT 1/0")
			return nil
		},
		"not read all rows": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			_, err := tx.Query(ctx, "SELECT 1")
			return err
		},
		errEnded.Error(): func(ctx context.Context, tx pgx.Tx, e *Event) error {
			_, err := tx.Conn().Exec(ctx, "COMMIT")
			return err
		},
		"deadline exceeded": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			<-ctx.Done()
			return ctx.Err()
		},
		"ended its goroutine": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			runtime.Goexit()
			return nil
		},
		"panic: runtime error: invalid memory address": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			var failed *pgconn.PgError
			return failed
		},
		"the connection broke": func(ctx context.Context, tx pgx.Tx, e *Event) error {
			return tx.Conn().Close(ctx)
		},
	} {
		cfg := Config{Timeout: time.Minute, hang: time.Minute}
		if strings.HasPrefix(want, "deadline") {
			cfg.Timeout = time.Millisecond
		}
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		err = (&calls{handler: h, cfg: &cfg}).invoke(t.Context(), tx, &Event{raw: &stream.Message{}})
		if (err == nil) != (want == "") || err != nil &&
			!strings.Contains(strings.ToLower(err.Error()), strings.ToLower(want)) {
			t.Errorf("%v, want %q", err, want)
		}
		if strings.HasPrefix(want, "misbehave") && !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%v hides what the handler panicked with", err)
		}
		_ = tx.Rollback(t.Context()) // some are over already
	}
	// A savepoint is the handler's own.
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) //nolint:errcheck // the test is over
	nested := &calls{cfg: &Config{Timeout: time.Minute},
		handler: func(ctx context.Context, tx pgx.Tx, e *Event) error {
			err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT 1/0")
				return err
			})
			if err == nil {
				return errors.New("no error")
			}
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT 1")
				return err
			})
		}}
	if err := nested.invoke(t.Context(), tx, &Event{raw: &stream.Message{}}); err != nil {
		t.Error(err)
	}
}
