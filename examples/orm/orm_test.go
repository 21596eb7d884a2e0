// Package orm shows how the events of a service go into the transactions of its library: what each one gives
// to [producer.Outbox.EnqueueSQL].
package orm

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	entsql "entgo.io/ent/dialect/sql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/producer"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var errChanged = errors.New("the service changed its mind")

// service writes a note and its event in one transaction of a library, which fails with err if that is given.
type service func(ctx context.Context, db *sql.DB, outbox *producer.Outbox, note string, err error) error

const insert = "INSERT INTO note VALUES ($1)"

func event(note string) producer.Event {
	return producer.Event{Document: note, Actor: "a", Counter: 1, Payload: []byte(`{"op": "open"}`)}
}

func withGORM(ctx context.Context, db *sql.DB, outbox *producer.Outbox, note string, fail error) error {
	g, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{})
	if err != nil {
		return err
	}
	return g.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		if err := tx.Exec("INSERT INTO note VALUES (?)", note).Error; err != nil {
			return err
		}
		if _, err := outbox.EnqueueSQL(ctx, tx.Statement.ConnPool, event(note)); err != nil {
			return err
		}
		return fail
	})
}

func withBun(ctx context.Context, db *sql.DB, outbox *producer.Outbox, note string, fail error) error {
	b := bun.NewDB(db, pgdialect.New())
	return b.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		if _, err := tx.ExecContext(ctx, "INSERT INTO note VALUES (?)", note); err != nil {
			return err
		}
		if _, err := outbox.EnqueueSQL(ctx, tx.Tx, event(note)); err != nil {
			return err
		}
		return fail
	})
}

func withSQLX(ctx context.Context, db *sql.DB, outbox *producer.Outbox, note string, fail error) error {
	tx, err := sqlx.NewDb(db, "pgx").BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // nothing, once it is committed
	if _, err := tx.ExecContext(ctx, insert, note); err != nil {
		return err
	}
	if _, err := outbox.EnqueueSQL(ctx, tx, event(note)); err != nil {
		return err
	}
	if fail != nil {
		return fail
	}
	return tx.Commit()
}

// With ent's feature sql/execquery the generated ent.Tx has the QueryContext of its driver's transaction,
// which is this one.
func withEnt(ctx context.Context, db *sql.DB, outbox *producer.Outbox, note string, fail error) error {
	tx, err := entsql.OpenDB("postgres", db).Tx(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // nothing, once it is committed
	if err := tx.Exec(ctx, insert, []any{note}, nil); err != nil {
		return err
	}
	if _, err := outbox.EnqueueSQL(ctx, tx.(*entsql.Tx), event(note)); err != nil {
		return err
	}
	if fail != nil {
		return fail
	}
	return tx.Commit()
}

// TestEachLibrarysTransactionTakesEvents: with each library the event is there exactly if the note is.
func TestEachLibrarysTransactionTakesEvents(t *testing.T) {
	t.Parallel()
	for name, write := range map[string]service{
		"GORM": withGORM, "bun": withBun, "sqlx": withSQLX, "ent": withEnt,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, err := sql.Open("pgx", pgtest.Database(t, pgtest.Server(t)))
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close() //nolint:errcheck // the test is over
			_, err = db.ExecContext(t.Context(), `CREATE TABLE note (id text);
				CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), doc_id text NOT NULL,
					actor_id text NOT NULL, counter bigint NOT NULL, payload jsonb NOT NULL)`)
			if err != nil {
				t.Fatal(err)
			}
			outbox, err := producer.New(producer.Config{})
			if err != nil {
				t.Fatal(err)
			}
			if err := write(t.Context(), db, outbox, "kept", nil); err != nil {
				t.Fatal(err)
			}
			if err := write(t.Context(), db, outbox, "gone", errChanged); !errors.Is(err, errChanged) {
				t.Fatal(err)
			}
			var notes, events string
			err = db.QueryRowContext(t.Context(), `SELECT (SELECT string_agg(id, ',') FROM note),
				(SELECT string_agg(doc_id || payload::text, ',') FROM outbox)`).Scan(&notes, &events)
			if err != nil {
				t.Fatal(err)
			}
			if notes != "kept" || events != `kept{"op": "open"}` {
				t.Errorf("notes %q, events %q", notes, events)
			}
		})
	}
}

// TestAPoolOfALibraryIsRefused: what would write the event outside of the transaction says so.
func TestAPoolOfALibraryIsRefused(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("pgx", "host=127.0.0.1") // nothing is sent
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close() //nolint:errcheck // the test is over
	outbox, err := producer.New(producer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, pool := range []producer.SQLQuerier{db, sqlx.NewDb(db, "pgx"), bun.NewDB(db, pgdialect.New())} {
		_, err := outbox.EnqueueSQL(t.Context(), pool, event("n"))
		if err == nil || !strings.Contains(err.Error(), "no transaction is open") {
			t.Errorf("%T: %v", pool, err)
		}
	}
}
