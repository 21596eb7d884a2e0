package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/outbox"
)

// connect returns a connection to our database.
func (w *harness) connect(ctx context.Context) (conn *pgx.Conn, err error) {
	err = persist(ctx, func(ctx context.Context) error {
		conn, err = pgx.Connect(ctx, w.pgURL)
		return err
	})
	return conn, err
}

// query asks one question on a connection of its own, again and again until it is answered: it must do no
// harm twice.
func (w *harness) query(ctx context.Context, scan []any, sql string, args ...any) error {
	return persist(ctx, func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, w.pgURL)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the answer counts
		return refused(conn.QueryRow(ctx, sql, args...).Scan(scan...))
	})
}

// exec runs statements, each of which must do no harm twice.
func (w *harness) exec(ctx context.Context, statements ...string) error {
	return persist(ctx, func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, w.pgURL)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the statements' answers count
		for _, s := range statements {
			if _, err := conn.Exec(ctx, s); err != nil {
				return refused(fmt.Errorf("%s: %w", s, err))
			}
		}
		return nil
	})
}

// refused marks what the server answers as it would answer again: all but what is in use, what was cancelled,
// and a server that starts or stops.
func refused(err error) error {
	switch state := sqlState(err); {
	case state == "", state == "55006", state[:2] == "57", state[:2] == "53", state[:2] == "08":
		return err
	}
	return permanent{err}
}

func sqlState(err error) string {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && len(pg.Code) == 5 {
		return pg.Code
	}
	return ""
}

// lsn returns the end of what is written.
func (w *harness) lsn(ctx context.Context) (lsn outbox.LSN, err error) {
	var text string
	if err := w.query(ctx, []any{&text}, "SELECT pg_current_wal_insert_lsn()::text"); err != nil {
		return 0, err
	}
	return outbox.ParseLSN(text)
}

// dropSlots drops the slots whose name is like a pattern. A slot whose reader has just gone may be in use for
// a moment.
func (w *harness) dropSlots(ctx context.Context, like string) error {
	conn, err := pgx.Connect(ctx, w.pgURL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the statements' answers count
	_, err = conn.Exec(ctx, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE "+
		"slot_name LIKE $1 AND active", like)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE "+
		"slot_name LIKE $1", like)
	return err
}

// literal makes a pattern that only the text itself is like.
func literal(text string) string { return strings.ReplaceAll(text, "_", `\_`) }

// outboxName is the table, as outflow init makes it; relayTable is the polling relay's copy of it.
const (
	outboxName = "outbox"
	relayTable = "relayed"
)

// makeTables makes the tables, the outbox as outflow init does.
func (w *harness) makeTables(ctx context.Context, c *Case) error {
	if w.tables {
		return nil
	}
	first := &streamer{w: w, build: Build{itself, w.o.Binary}}
	err := errors.Join(first.prepare(ctx, c), first.cleanUp(ctx))
	if err != nil {
		return err
	}
	w.tables = true
	return w.exec(ctx, "CREATE TABLE IF NOT EXISTS "+relayTable+" (LIKE "+outboxName+
		" INCLUDING ALL, place bigint GENERATED ALWAYS AS IDENTITY, sent_at timestamptz)",
		"CREATE INDEX IF NOT EXISTS relayed_unsent ON "+relayTable+" (place) WHERE sent_at IS NULL",
		fillProcedure)
}

// emptyTables removes what an earlier turn has written.
func (w *harness) emptyTables(ctx context.Context) error {
	return w.exec(ctx, "TRUNCATE "+outboxName+", "+relayTable+" RESTART IDENTITY")
}
