package producer

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// database is a database of its own, reached in both ways.
type database struct {
	t    testing.TB
	url  string
	conn *pgx.Conn
	sql  *sql.DB
}

// defaultTable is what `outflow init` makes.
const defaultTable = `CREATE TABLE outbox (
  id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL,
  counter bigint NOT NULL,
  seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20,
  '0')) STORED,
  payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now())`

func newDatabase(t testing.TB, statements ...string) *database {
	t.Helper()
	d := connect(t, pgtest.Database(t, pgtest.Server(t)))
	for _, s := range statements {
		d.exec(s)
	}
	return d
}

func connect(t testing.TB, url string) *database {
	t.Helper()
	d := &database{t: t, url: url}
	var err error
	if d.conn, err = pgx.Connect(t.Context(), d.url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.conn.Close(context.Background()) }) //nolint:errcheck // the test is over
	if d.sql, err = sql.Open("pgx", d.url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.sql.Close() }) //nolint:errcheck // the test is over
	return d
}

func (d *database) exec(statement string, args ...any) {
	d.t.Helper()
	if _, err := d.conn.Exec(context.WithoutCancel(d.t.Context()), statement, args...); err != nil {
		d.t.Fatalf("%s: %v", statement, err)
	}
}

// texts returns the rows of a query with one column of text.
func (d *database) texts(query string, args ...any) []string {
	d.t.Helper()
	r, err := d.conn.Query(d.t.Context(), query, args...)
	if err != nil {
		d.t.Fatal(err)
	}
	all, err := pgx.CollectRows(r, pgx.RowTo[string])
	if err != nil {
		d.t.Fatalf("%s: %v", query, err)
	}
	return all
}

func outboxOf(t testing.TB, cfg Config) *Outbox {
	t.Helper()
	o, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// inTx runs a call in a transaction of its own of either kind, which commits if the call succeeds.
type inTx func(ctx context.Context, o *Outbox, events ...Event) ([]Receipt, error)

func (d *database) pgx(ctx context.Context, o *Outbox, events ...Event) (receipts []Receipt, err error) {
	err = pgx.BeginFunc(ctx, d.conn, func(tx pgx.Tx) (err error) {
		receipts, err = o.Enqueue(ctx, tx, events...)
		return err
	})
	return receipts, err
}

func (d *database) std(ctx context.Context, o *Outbox, events ...Event) ([]Receipt, error) {
	tx, err := d.sql.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	receipts, err := o.EnqueueSQL(ctx, tx, events...)
	if err != nil {
		_ = tx.Rollback() // the call's error counts
		return nil, err
	}
	return receipts, tx.Commit()
}

// both runs a test with either kind of transaction.
func (d *database) both(t *testing.T, test func(t *testing.T, call inTx)) {
	t.Run("pgx", func(t *testing.T) { test(t, d.pgx) })
	t.Run("database/sql", func(t *testing.T) { test(t, d.std) })
}

func mustCall(t testing.TB, call inTx, o *Outbox, events ...Event) []Receipt {
	t.Helper()
	receipts, err := call(t.Context(), o, events...)
	if err != nil {
		t.Fatal(err)
	}
	if len(receipts) != len(events) {
		t.Fatalf("%d receipts for %d events", len(receipts), len(events))
	}
	return receipts
}

// idsOf returns the ids of receipts.
func idsOf(receipts []Receipt) (ids []string) {
	for _, r := range receipts {
		ids = append(ids, r.ID)
	}
	return ids
}

// countersOf returns the counters of receipts.
func countersOf(receipts []Receipt) (counters []int64) {
	for _, r := range receipts {
		counters = append(counters, r.Counter)
	}
	return counters
}
