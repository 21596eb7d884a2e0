package replication

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
)

// TestEachClusterReplacesItsOwnControlRows: and each of its outflows its own; a row is not written when its
// time is over, whatever held it up.
func TestEachClusterReplacesItsOwnControlRows(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.Exec(`CREATE TABLE outflow_control (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), outbox text NOT NULL,
		prefix text NOT NULL, content text NOT NULL)`)
	writer := func(cluster int, slot string) *Writer {
		cfg := d.config()
		cfg.Control, cfg.Cluster, cfg.Slot = "public.outflow_control", cluster, slot
		w := NewWriter(cfg)
		t.Cleanup(w.Close)
		return w
	}
	rows := func() string {
		return d.Text("SELECT coalesce(string_agg(content, ', ' ORDER BY content), '') FROM outflow_control")
	}
	in := func() time.Time { return time.Now().Add(time.Hour) }
	mark := func(by int, to uint64) relay.ClusterRow {
		return relay.ClusterRow{Kind: relay.Hello, By: by, Hello: to}
	}
	first, second, other := writer(1, "a"), writer(2, "a"), writer(1, "b")
	for n := range uint64(3) {
		must.Succeed(t, first.ClusterRow(within(t), mark(1, n+1), in()))
		must.Succeed(t, second.ClusterRow(within(t), mark(2, n+1), in()))
	}
	must.Succeed(t, other.ClusterRow(within(t), mark(1, 9), in()))
	want := fmt.Sprintf("%s, %s, %s", mark(1, 3).Content(), mark(1, 9).Content(), mark(2, 3).Content())
	if got := rows(); got != want {
		t.Errorf("the table has %q, want %q", got, want)
	}
	if err := first.ClusterRow(within(t), mark(1, 4), time.Now().Add(-time.Hour)); !errors.Is(err, ErrLate) {
		t.Errorf("an hour too late: %v", err)
	}
	must.Succeed(t, first.ClusterRow(within(t), mark(1, 5), in()))

	// What waits for a lock until its time is over is not written when it gets it.
	conn, err := pgx.Connect(within(t), d.URL)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, conn.Close(within(t))) }()
	tx, err := conn.Begin(within(t))
	must.Succeed(t, err)
	_, err = tx.Exec(within(t), "SELECT FROM outflow_control FOR UPDATE")
	must.Succeed(t, err)
	until, done := time.Now().Add(300*time.Millisecond), make(chan error, 1)
	go func() { done <- first.ClusterRow(within(t), mark(1, 6), until) }()
	await.True(func() bool {
		return d.Text(`SELECT count(*)::text FROM pg_locks JOIN pg_stat_activity USING (pid)
			WHERE NOT granted AND datname = current_database()`) == "1"
	})
	await.True(func() bool { return time.Now().After(until) })
	must.Succeed(t, tx.Commit(within(t)))
	if err := <-done; !errors.Is(err, ErrLate) {
		t.Errorf("after a lock: %v", err)
	}
	must.Succeed(t, first.Heartbeat(within(t)))
	want = fmt.Sprintf(", %s, %s", mark(1, 9).Content(), mark(2, 3).Content())
	if got := rows(); got != want {
		t.Errorf("the table has %q, want %q", got, want)
	}
}
