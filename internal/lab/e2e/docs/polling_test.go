package docs

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// polling is the world of docs/from-polling.md: a service that writes without a pause, and the relay that the
// reader comes from. Whatever the page does, nothing that was committed may be missing in the end, or be
// there twice.
type polling struct {
	t       *testing.T
	p       *pageRun
	js      jetstream.JetStream
	conn    *pgx.Conn // to look
	service *service  // the relay

	mu        sync.Mutex
	committed map[int64]bool // ids of rows
	awaited   bool           // the slot waited for a transaction that was open
	stops     int            // of the relay
	// what was committed when it had stopped: the page's first half is to see to that
	theirs []int64
}

const (
	oldStream = "RELAY"
	newStream = "EVENTS"
	// between is how many rows at least are committed from when the relay has stopped until the page goes on.
	between = 40
)

// aroundPolling starts that world, and returns what is to happen behind the page's last block.
func aroundPolling(t *testing.T, p *pageRun) (finish func()) {
	w := &polling{t: t, p: p, js: harness.JetStream(t, p.natsURL), conn: harness.Connect(t, p.pgURL),
		committed: map[int64]bool{}, service: p.service("relay", "start")}
	if _, err := w.js.CreateStream(t.Context(),
		jetstream.StreamConfig{Name: oldStream, Subjects: []string{"events.>"}}); err != nil {
		t.Fatal(err)
	}
	relaying, endRelay := context.WithCancel(t.Context())
	writing, endWriting := context.WithCancel(relaying)
	var relay, writers errgroup.Group
	relay.Go(func() error {
		err := w.relay(relaying)
		if err != nil {
			w.service.is("failed")
		}
		return err
	})
	for range 3 {
		writers.Go(func() error { return w.write(writing) })
	}
	writers.Go(func() error { return w.linger(writing) })
	end := func() error {
		endWriting()
		err := writers.Wait()
		endRelay()
		return errors.Join(err, relay.Wait())
	}
	t.Cleanup(func() { // the test may have failed on the way
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	return func() {
		endWriting()
		harness.Must(t, writers.Wait())
		w.sent(endRelay, &relay)
		w.judge()
	}
}

// ready waits until the page has made the table.
func (w *polling) ready(ctx context.Context, conn *pgx.Conn) error {
	for {
		var there bool
		if err := conn.QueryRow(ctx, "SELECT to_regclass('outbox') IS NOT NULL").Scan(&there); err != nil ||
			there {
			return err
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// session gives each part of the world a connection of its own. An end of the context is a clean end.
func (w *polling) session(ctx context.Context, name string, f func(*pgx.Conn) error) error {
	cfg, err := pgx.ParseConfig(w.p.pgURL)
	if err != nil {
		return err
	}
	cfg.RuntimeParams["application_name"] = name
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err == nil {
		defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // whatever it did has been answered
		if err = w.ready(ctx, conn); err == nil {
			err = f(conn)
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// write commits transactions of a few rows; some are rolled back.
func (w *polling) write(ctx context.Context) error {
	// What is begun is brought to its end: the world has to know whether it was committed.
	whole := context.WithoutCancel(ctx)
	return w.session(ctx, "service", func(conn *pgx.Conn) error {
		for pause(ctx, 15*time.Millisecond) == nil {
			tx, err := conn.Begin(whole)
			if err != nil {
				return err
			}
			var ids []int64
			for range 1 + rand.IntN(4) {
				id, err := insert(whole, tx)
				if err != nil {
					return err
				}
				ids = append(ids, id)
			}
			if rand.IntN(8) == 0 {
				err = tx.Rollback(whole)
				ids = nil
			} else {
				err = tx.Commit(whole)
			}
			if err != nil {
				return err
			}
			w.note(ids...)
		}
		return nil
	})
}

func insert(ctx context.Context, tx pgx.Tx) (id int64, err error) {
	topic := fmt.Sprintf("orders.%d", rand.IntN(5))
	err = tx.QueryRow(ctx, "INSERT INTO outbox (topic, message) VALUES ($1, '{}') RETURNING id",
		topic).Scan(&id)
	return id, err
}

func (w *polling) note(ids ...int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		w.committed[id] = true
	}
}

func (w *polling) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.committed)
}

// linger has a transaction open while the relay is stopped and the slot is made, and commits it when the slot
// waits for it.
func (w *polling) linger(ctx context.Context) error {
	return w.session(ctx, "batch", func(conn *pgx.Conn) error {
		for w.service.told() != "stop" {
			if err := pause(ctx, 5*time.Millisecond); err != nil {
				return err
			}
		}
		tx, err := conn.Begin(ctx)
		if err != nil {
			return err
		}
		id, err := insert(ctx, tx)
		if err != nil {
			return err
		}
		for {
			var waiting bool
			err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted
				AND locktype = 'transactionid'
				AND transactionid = pg_current_xact_id()::xid)`).Scan(&waiting)
			if err != nil {
				return err
			}
			if waiting {
				break
			}
			if err := pause(ctx, 10*time.Millisecond); err != nil {
				return err
			}
		}
		if err := tx.Commit(context.WithoutCancel(ctx)); err != nil {
			return err
		}
		w.note(id)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.awaited = true
		return nil
	})
}

// relay does what the page says that the reader's relay does, while it is not stopped.
func (w *polling) relay(ctx context.Context) error {
	for ctx.Err() == nil {
		if w.service.told() != "start" {
			_ = pause(ctx, 10*time.Millisecond)
			continue
		}
		if err := w.session(ctx, "relay", func(conn *pgx.Conn) error {
			return w.relayOn(ctx, conn)
		}); err != nil {
			return fmt.Errorf("the relay: %w", err)
		}
		for before := w.count(); w.count() < before+between && ctx.Err() == nil; {
			_ = pause(ctx, 10*time.Millisecond)
		}
		w.stopped()
		w.service.is("stop")
	}
	return nil
}

// relayOn relays until it is stopped.
func (w *polling) relayOn(ctx context.Context, conn *pgx.Conn) error {
	var forgotten int
	err := conn.QueryRow(ctx, "SELECT count(*) FROM outbox WHERE state = 'pending' AND id = ANY ($1)",
		w.theirs).Scan(&forgotten)
	if err != nil {
		return err
	}
	if forgotten > 0 {
		return fmt.Errorf("%d rows that were there when the page began to go over have been sent by nobody "+
			"when it goes back", forgotten)
	}
	w.service.is("start")
	for w.service.told() == "start" && ctx.Err() == nil {
		n, err := w.pass(context.WithoutCancel(ctx), conn)
		if err != nil {
			return err
		}
		if n == 0 {
			_ = pause(ctx, 10*time.Millisecond)
		}
	}
	return nil
}

// stopped notes what there is when the relay has stopped.
func (w *polling) stopped() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stops++
	w.theirs = slices.Collect(maps.Keys(w.committed))
}

// pass is one look of the relay at the table.
func (w *polling) pass(ctx context.Context, conn *pgx.Conn) (n int, err error) {
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT id, topic, message::text FROM outbox WHERE state = 'pending'
			ORDER BY id LIMIT 20 FOR UPDATE SKIP LOCKED`)
		if err != nil {
			return err
		}
		type row struct {
			ID             int64
			Topic, Message string
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			return err
		}
		var ids []int64
		for _, r := range all {
			m := &nats.Msg{Subject: "events." + r.Topic, Data: []byte(r.Message),
				Header: nats.Header{"Event-Id": {strconv.FormatInt(r.ID, 10)}}}
			if _, err := w.js.PublishMsg(ctx, m); err != nil {
				return err
			}
			ids = append(ids, r.ID)
		}
		n = len(ids)
		_, err = tx.Exec(ctx, "UPDATE outbox SET state = 'done', processed_at = now() WHERE id = ANY ($1)",
			ids)
		return err
	})
	return n, err
}

// sent waits until the relay, which the page has started again, has sent all there is, and ends it.
func (w *polling) sent(end func(), relay *errgroup.Group) {
	w.t.Helper()
	harness.Eventually(w.t, "the relay has sent everything", func() error {
		var pending int
		err := w.conn.QueryRow(w.t.Context(), "SELECT count(*) FROM outbox WHERE state = 'pending'").Scan(
			&pending)
		if err != nil || pending > 0 {
			return fmt.Errorf("%d rows are pending (%v)", pending, err)
		}
		return nil
	})
	end()
	harness.Must(w.t, relay.Wait())
}

// judge counts each row in the streams, and each effect of the page's consumer.
func (w *polling) judge() {
	w.t.Helper()
	streams := map[int64]int{}
	for _, name := range []string{oldStream, newStream} {
		n := w.ids(name, streams)
		w.t.Logf("stream %s: %d messages", name, n)
		if n < between {
			w.t.Errorf("stream %s has %d messages, want %d at least: nothing was shown", name, n, between)
		}
	}
	compare(w.t, "the streams", w.committed, streams)
	effects := map[int64]int{}
	harness.Eventually(w.t, "the consumer has had everything", func() error {
		clear(effects)
		f, err := os.Open(filepath.Join(w.p.dir, "mails"))
		if err != nil {
			return err
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			id, err := strconv.ParseInt(strings.TrimSpace(lines.Text()), 10, 64)
			if err != nil {
				return err
			}
			effects[id]++
		}
		if len(effects) < w.count() {
			return fmt.Errorf("%d of %d", len(effects), w.count())
		}
		return lines.Err()
	})
	compare(w.t, "the consumer's effects", w.committed, effects)
	if !w.awaited || w.stops < 1 {
		w.t.Errorf("the slot waited for an open transaction: %v; the relay was stopped %d times", w.awaited,
			w.stops)
	}
}

// ids counts the event ids of a stream.
func (w *polling) ids(stream string, seen map[int64]int) (n int) {
	w.t.Helper()
	s, err := w.js.Stream(w.t.Context(), stream)
	harness.Must(w.t, err)
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(w.t.Context(), seq)
		if err != nil {
			w.t.Fatalf("message %d of %s: %v", seq, stream, err)
		}
		id, err := strconv.ParseInt(m.Header.Get("Event-Id"), 10, 64)
		if err != nil {
			w.t.Fatalf("message %d of %s: %v", seq, stream, err)
		}
		seen[id]++
		n++
	}
	return n
}

// compare compares what was committed with how often each of it was seen.
func compare[ID comparable](t *testing.T, what string, committed map[ID]bool, seen map[ID]int) {
	t.Helper()
	missing, twice, foreign := 0, 0, 0
	for id := range committed {
		if seen[id] == 0 {
			missing++
		}
	}
	for id, n := range seen {
		if n > 1 {
			twice++
		}
		if !committed[id] {
			foreign++
		}
	}
	if missing+twice+foreign > 0 {
		t.Errorf("%s: of %d rows %d are missing, %d are there more than once; %d were never committed",
			what, len(committed), missing, twice, foreign)
	}
}
