package docs

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// cutover is the world of docs/cut-over.md: a service that writes without a pause, and a tool that reads a
// slot of its own, which dies between sending and confirming. Whatever was committed must have been sent
// once, by the one or the other.
type cutover struct {
	t        *testing.T
	p        *pageRun
	tool     *service
	sentFile string // what last-events prints

	mu        sync.Mutex
	committed map[string]bool // ids of rows
	sent      map[string]int  // by the tool
	twice     int             // of them: not confirmed when it died
	lingered  bool            // a transaction was open from before the stop until Outflow had the slot
}

// aroundCutover starts that world, and returns what is to happen behind the page's last block.
func aroundCutover(t *testing.T, p *pageRun) (finish func()) {
	w := &cutover{t: t, p: p, tool: p.service("debezium", "start"), committed: map[string]bool{},
		sent: map[string]int{}, sentFile: filepath.Join(p.base, "sent")}
	p.write(w.sentFile, "", 0o600)
	p.write(filepath.Join(p.base, "bin", "last-events"), fmt.Sprintf("#!/bin/sh\ntail -n 1000 %q\n",
		w.sentFile), 0o700)
	ctx, cancel := context.WithCancel(t.Context())
	var world errgroup.Group
	for range 3 {
		world.Go(func() error { return w.session(ctx, w.write) })
	}
	world.Go(func() error { return w.session(ctx, w.linger) })
	world.Go(func() error {
		err := w.session(ctx, w.read)
		w.tool.is(map[bool]string{true: "stop", false: "failed"}[err == nil])
		return err
	})
	end := sync.OnceValue(func() error {
		cancel()
		return world.Wait()
	})
	t.Cleanup(func() { // the test may have failed on the way
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	return func() {
		harness.Must(t, end())
		w.judge()
	}
}

// session connects a part of the world when the page has made table and slot. An end of the context is a
// clean end.
func (w *cutover) session(ctx context.Context, f func(context.Context, *pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, w.p.pgURL)
	if err == nil {
		defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // whatever it did has been answered
		err = until(ctx, conn, `SELECT count(*) = 1 FROM pg_replication_slots
			WHERE slot_name = 'debezium' AND NOT active`)
	}
	if err == nil {
		err = f(ctx, conn)
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// until waits for a condition.
func until(ctx context.Context, q interface {
	QueryRow(context.Context, string, ...any) pgx.Row
}, sql string) error {
	for {
		var is bool
		if err := q.QueryRow(ctx, sql).Scan(&is); err != nil || is {
			return err
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

// insert writes some events.
func (w *cutover) insert(ctx context.Context, tx pgx.Tx) (ids []string, err error) {
	rows, err := tx.Query(ctx, `INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
		SELECT 'order', n::text, 'created', '{}' FROM generate_series(1, $1) n RETURNING id::text`,
		1+rand.IntN(4))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// write commits transactions; some are rolled back.
func (w *cutover) write(ctx context.Context, conn *pgx.Conn) error {
	whole := context.WithoutCancel(ctx) // the world has to know whether it was committed
	for pause(ctx, 10*time.Millisecond) == nil {
		undone := errors.New("rolled back")
		var ids []string
		err := pgx.BeginFunc(whole, conn, func(tx pgx.Tx) (err error) {
			if ids, err = w.insert(whole, tx); err == nil && rand.IntN(8) == 0 {
				return undone
			}
			return err
		})
		switch {
		case err == nil:
			w.note(ids)
		case !errors.Is(err, undone):
			return err
		}
	}
	return nil
}

func (w *cutover) note(ids []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		w.committed[id] = true
	}
}

// linger has a transaction open from when the tool is told to stop until Outflow reads the slot.
func (w *cutover) linger(ctx context.Context, conn *pgx.Conn) error {
	for w.tool.told() != "stop" {
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	ids, err := w.insert(ctx, tx)
	if err == nil {
		err = until(ctx, tx, `SELECT count(*) = 1 FROM pg_replication_slots
			WHERE slot_name = 'outflow' AND active`)
	}
	if err == nil {
		err = tx.Commit(context.WithoutCancel(ctx))
	}
	if err != nil {
		return err
	}
	w.note(ids)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lingered = true
	return nil
}

// read is the tool: it sends what its slot has, and confirms it. When it is told to stop it sends some more,
// and dies.
func (w *cutover) read(ctx context.Context, conn *pgx.Conn) error {
	w.tool.is("start")
	for w.tool.told() == "start" && ctx.Err() == nil {
		end, n, err := w.send(ctx, conn)
		if err != nil {
			return err
		}
		if n == 0 {
			_ = pause(ctx, 10*time.Millisecond)
			continue
		}
		if _, err := conn.Exec(ctx, "SELECT pg_replication_slot_advance('debezium', $1::pg_lsn)",
			end.String()); err != nil {
			return err
		}
	}
	for ctx.Err() == nil {
		switch _, n, err := w.send(ctx, conn); {
		case err != nil:
			return err
		case n > 0:
			w.twice = n
			return nil
		}
		_ = pause(ctx, 10*time.Millisecond)
	}
	return ctx.Err()
}

// send sends the next transactions of the slot, and returns where the last of them ends.
func (w *cutover) send(ctx context.Context, conn *pgx.Conn) (end pglogrepl.LSN, n int, err error) {
	rows, err := conn.Query(ctx, `SELECT data FROM pg_logical_slot_peek_binary_changes('debezium', NULL, 20,
		'proto_version', '1', 'publication_names', 'dbz_publication')`)
	if err != nil {
		return 0, 0, err
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		return 0, 0, err
	}
	var ids []string
	for _, data := range all {
		message, err := pglogrepl.Parse(data)
		if err != nil {
			return 0, 0, err
		}
		switch m := message.(type) {
		case *pglogrepl.InsertMessage:
			ids = append(ids, string(m.Tuple.Columns[0].Data))
		case *pglogrepl.CommitMessage:
			end = m.TransactionEndLSN
		}
	}
	if len(ids) == 0 {
		return end, 0, nil
	}
	f, err := os.OpenFile(w.sentFile, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return 0, 0, err
	}
	_, err = f.WriteString(strings.Join(ids, "\n") + "\n")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		w.sent[id]++
	}
	return end, len(ids), errors.Join(err, f.Close())
}

// judge counts each row on both sides.
func (w *cutover) judge() {
	w.t.Helper()
	byTool, byOutflow := len(w.sent), 0
	js := harness.JetStream(w.t, w.p.natsURL)
	harness.AwaitMessages(w.t, js, newStream, len(w.committed)-byTool)
	s, err := js.Stream(w.t.Context(), newStream)
	harness.Must(w.t, err)
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(w.t.Context(), seq)
		harness.Must(w.t, err)
		w.sent[m.Header.Get("id")]++
		byOutflow++
	}
	w.t.Logf("%d rows: %d sent by the tool, %d of them not confirmed; %d by Outflow", len(w.committed),
		byTool, w.twice, byOutflow)
	compare(w.t, "both sides", w.committed, w.sent)
	if byTool < between || byOutflow < between || w.twice == 0 || !w.lingered {
		w.t.Errorf("nothing was shown; a transaction was open across the change: %v", w.lingered)
	}
}
