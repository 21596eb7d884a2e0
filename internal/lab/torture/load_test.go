package torture

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// writing is a load on a table of a database of the test.
func writing(t *testing.T, url, table string) *load {
	t.Helper()
	w := &harness{shape: &shape{}, o: &Options{Seed: 1, Rate: 1000, Writers: 3, Source: "table"}, pgURL: url,
		name: "outflow_torture_test", table: table}
	l, err := newLoad(w)
	must.Succeed(t, err)
	return l
}

// A run in which nothing was written says nothing: it is an error, whether nobody could connect or every
// statement was refused.
func TestARunInWhichNothingWasWrittenIsAnError(t *testing.T) {
	t.Parallel()
	t.Run("no server", func(t *testing.T) {
		t.Parallel()
		l := writing(t, "postgres://nobody@127.0.0.1:1/none?connect_timeout=1", "outbox")
		ended := make(chan error, 1)
		go func() { ended <- l.run(t.Context()) }()
		time.Sleep(10 * time.Millisecond)
		l.stop()
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "nothing was committed") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("no table", func(t *testing.T) {
		t.Parallel()
		l := writing(t, pgtest.Database(t, pgtest.Server(t)), "outbox")
		if err := l.run(t.Context()); err == nil || !strings.Contains(err.Error(), "does not exist") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("interrupted", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := writing(t, "postgres://nobody@127.0.0.1:1/none", "outbox").run(ctx); err != nil {
			t.Error(err)
		}
	})
}

// The answer to a commit was lost: what became of it is found out, and nobody commits it any more after that.
func TestALostAnswerToACommitIsFoundOut(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	l, ctx := writing(t, url, "outbox"), t.Context()
	mine, err := pgx.Connect(ctx, url)
	must.Succeed(t, err)
	defer mine.Close(context.WithoutCancel(ctx)) //nolint:errcheck // it is the end
	if _, err := mine.Exec(ctx, "CREATE TABLE outbox (doc_id text, actor_id text, counter bigint, payload "+
		"jsonb)"); err != nil {
		t.Fatal(err)
	}
	for counter, committed := range []bool{true, false} {
		op := operation{doc: "d", actor: "a", counter: int64(counter), payload: json.RawMessage("{}")}
		conn, err := l.connect(ctx)
		must.Succeed(t, err)
		statements := []string{"BEGIN", "insert"}
		if committed {
			statements = append(statements, "COMMIT")
		}
		for _, sql := range statements {
			var args []any
			if sql == "insert" {
				sql, args = op.statement("outbox")
			}
			if _, err := conn.Exec(ctx, sql, args...); err != nil {
				t.Fatal(err)
			}
		}
		// The writer has lost it, and the server does not know yet.
		next, there, err := l.resolve(ctx, lost(t, conn), &op)
		if err != nil || there != committed {
			t.Errorf("there: %v, %v; want %v", there, err, committed)
		}
		if _, err := conn.Exec(ctx, "COMMIT"); !committed && err == nil {
			t.Error("it is committed after that")
		}
		next.Close(ctx)
	}
}

// lost is a connection that has ended, under the name of one that has not.
func lost(t *testing.T, conn *pgx.Conn) *pgx.Conn {
	t.Helper()
	cfg := conn.Config()
	dead, err := pgx.ConnectConfig(t.Context(), cfg)
	must.Succeed(t, err)
	dead.Close(t.Context())
	return dead
}
