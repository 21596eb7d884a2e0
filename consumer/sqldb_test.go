package consumer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
)

// sql is the harness's database by database/sql.
func (w *harness) sql() *sql.DB {
	w.t.Helper()
	db, err := sql.Open("pgx", w.url)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = db.Close() })
	return db
}

func (w *harness) sqlConsumer(db *sql.DB, cfg Config) *Consumer {
	w.t.Helper()
	c, err := New(nil, PostgresSQL(db), cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	c.cfg.confirm, c.cfg.interval, c.cfg.poll = time.Millisecond, 50*time.Millisecond, 10*time.Millisecond
	return c
}

// sqlHandler has the effect of an event.
func sqlHandler(ctx context.Context, tx pgx.Tx, e *Event) error {
	if tx != nil {
		return errors.New("two transactions")
	}
	_, err := e.SQLTx().ExecContext(ctx, `INSERT INTO effect VALUES ($1, 1, md5($2)) ON CONFLICT (document)
		DO UPDATE SET n = effect.n + 1, hash = md5(effect.hash || $2)`, e.Document, e.ID)
	return err
}

// What pgx has beside the types of database/sql, in both directions.
func TestArraysAndDurationsPassThroughDatabaseSQL(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	conn, err := sqlDatabase{w.sql(), runnerSQL{w.sql()}}.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	repeatable := pgx.TxOptions{IsoLevel: pgx.RepeatableRead}
	err = pgx.BeginTxFunc(t.Context(), conn, repeatable, func(tx pgx.Tx) error {
		var words []string
		var small []int32
		var large []int64
		var took, level string
		at := time.Unix(1, 5000).UTC()
		err := tx.QueryRow(t.Context(), `SELECT $1::text[], $2::int[], $3::bigint[], $4::interval::text,
			current_setting('transaction_isolation') WHERE $5::timestamptz[] = ARRAY[$6::timestamptz]
			AND $7::bytea[] = ARRAY['\x00ff'::bytea] AND $8::int[] = ARRAY[7]`,
			[]string{`a"\{},`, "", "NULL"}, []int{1, -2}, []int64{1 << 40}, 90*time.Second, []time.Time{at}, at,
			[][]byte{{0, 255}}, []int32{7}).
			Scan(&words, &small, &large, &took, &level)
		if got := fmt.Sprintf("%q %v %v %s %s", words, small, large, took, level); err != nil ||
			got != `["a\"\\{}," "" "NULL"] [1 -2] [1099511627776] 00:01:30 repeatable read` {
			t.Errorf("%s, %v", got, err)
		}
		err = tx.QueryRow(t.Context(), "SELECT 1 WHERE false").Scan(&level)
		if !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("no row: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// The commit would find the connection busy.
func TestRowsThatAHandlerOfDatabaseSQLLeavesOpenAreItsError(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	conn, err := sqlDatabase{w.sql(), runnerSQL{w.sql()}}.Acquire(t.Context())
	must.Succeed(t, err)
	defer conn.Release()
	tx, err := conn.Begin(t.Context())
	must.Succeed(t, err)
	leaves := &calls{cfg: &Config{Timeout: time.Minute, hang: time.Minute},
		handler: func(_ context.Context, _ pgx.Tx, e *Event) error {
			_, err := e.SQLTx().Query("SELECT 1")
			return err
		}}
	if err := leaves.invoke(t.Context(), tx, &Event{raw: &stream.Message{}}); !errors.Is(err, errRows) {
		t.Errorf("%v, want %v", err, errRows)
	}
	_ = tx.Rollback(t.Context())
}

// What a handler may not do with its transaction is found with database/sql as well, also in a batch.
func TestHandlersOfDatabaseSQLMustNotEndTheirTransaction(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		do   func(ctx context.Context, tx *sql.Tx) error
		want string // "": it fails as an event
	}{
		"ignores an error": {func(ctx context.Context, tx *sql.Tx) error {
			_, _ = tx.ExecContext(ctx, "SELECT 1/0")
			return nil
		}, ""},
		"misses its time": {func(ctx context.Context, _ *sql.Tx) error {
			<-ctx.Done()
			return ctx.Err()
		}, ""},
		"panics": {func(context.Context, *sql.Tx) error { panic("handler") }, ""},
		"rolls back and fails": {func(_ context.Context, tx *sql.Tx) error {
			return errors.Join(tx.Rollback(), errors.New("refused"))
		}, ""},
		"commits": {func(_ context.Context, tx *sql.Tx) error { return tx.Commit() }, "consumer_handler"},
		"commits and fails": {func(_ context.Context, tx *sql.Tx) error {
			return errors.Join(tx.Commit(), errors.New("refused"))
		}, "consumer_handler"},
		"says COMMIT": {func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "COMMIT")
			return err
		}, "consumer_handler"},
		"says COMMIT AND CHAIN": {func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "COMMIT AND CHAIN")
			return err
		}, "consumer_handler"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(9, 1)
			src.publish(all...)
			cfg := w.config(src)
			cfg.Timeout = 2 * time.Second
			var misbehaved atomic.Bool
			r := w.start(w.sqlConsumer(w.sql(), cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
				if e.seq == 4 && !misbehaved.Swap(true) {
					return c.do(ctx, e.SQLTx())
				}
				return sqlHandler(ctx, tx, e)
			})
			if c.want == "" {
				w.await(all)
				return
			}
			if err := r.ends(); !errors.Is(err, ErrHandler) {
				t.Errorf("Run: %v", err)
			}
		})
	}
}

// Parking writes arrays of whatever documents, headers and payloads there are.
func TestEventsAreParkedAndReleasedByDatabaseSQL(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	odd := []string{`a"b\{},c`, "", "é\x00ü", "NULL", strings.Repeat("x", 2000), "plain"}
	var wanted []int
	for i := range 30 {
		m := s.event(odd[i%len(odd)])
		m.Header["Odd"] = nats.Header{"v": {`"\,{}`, "\xff"}}["v"]
		src.publish(m)
		wanted = append(wanted, i)
	}
	cfg := w.config(src)
	var mended atomic.Bool
	var mu sync.Mutex
	got := map[string]int{}
	db := w.sql()
	w.start(w.sqlConsumer(db, cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if !mended.Load() && e.Document != "plain" {
			return Poison(errors.New(`"refused"`))
		}
		if string(e.Data) != e.ID || e.Header["Odd"][0] != `"\,{}` || e.Header["Odd"][1] != "\xff" {
			return Poison(fmt.Errorf("%q %q", e.Data, e.Header))
		}
		mu.Lock()
		defer mu.Unlock()
		got[e.ID]++
		return nil
	})
	w.awaitOffsets(30)
	mended.Store(true)
	w.exec("UPDATE outflow_parked SET release = 'retry' WHERE cause = 'poison'")
	if !await.True(func() bool {
		var left int
		err := w.mine.QueryRow(t.Context(), "SELECT count(*) FROM outflow_parked").Scan(&left)
		return err == nil && left == 0
	}) {
		t.Fatal("they are not released")
	}
	mu.Lock()
	defer mu.Unlock()
	if len(got) != len(wanted) {
		t.Errorf("%d of %d events had their effect", len(got), len(wanted))
	}
}

func TestAPoolOfDatabaseSQLThatIsTooSmallIsRefused(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	db := w.sql()
	db.SetMaxOpenConns(1)
	err := w.sqlConsumer(db, w.config(newMemoryStream())).Run(t.Context(), sqlHandler)
	if !errors.Is(err, ErrSetup) || !strings.Contains(err.Error(), "1 connections for 1") {
		t.Errorf("Run: %v", err)
	}
	for _, none := range []Offsets{PostgresSQL(nil), Postgres(nil)} {
		c, err := New(nil, none, w.config(newMemoryStream()))
		if err == nil {
			err = c.Run(t.Context(), handler)
		}
		if err == nil || !strings.Contains(err.Error(), "want a pool") {
			t.Errorf("without a pool: %v", err)
		}
	}
	closed := w.sql()
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	err = w.sqlConsumer(closed, w.config(newMemoryStream())).Run(t.Context(), sqlHandler)
	if !errors.Is(err, ErrSetup) || !strings.Contains(err.Error(), "the pool is closed") {
		t.Errorf("Run: %v", err)
	}
}
