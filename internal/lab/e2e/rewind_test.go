package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer" // consumer is a helper of these tests
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// distinct counts things that may come more than once.
type distinct struct {
	mu   sync.Mutex
	seen map[string]bool
}

func (d *distinct) add(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.seen == nil {
		d.seen = map[string]bool{}
	}
	d.seen[what] = true
}

func (d *distinct) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.seen)
}

// take returns the count, and begins anew.
func (d *distinct) take() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := len(d.seen)
	d.seen = nil
	return n
}

// projection is a consumer whose result depends on the order: of each document a chain of hashes over its events.
type projection struct {
	t        *testing.T
	o        *outflow
	s        jetstream.JetStream
	pool     *pgxpool.Pool
	name     string
	marks    consume.Offsets
	replayed distinct    // events that were marked as replayed
	poison   atomic.Bool // the handler does not know what to do with document "doc 9"
	stop     context.CancelFunc
	ended    chan error
}

func newProjection(t *testing.T, o *outflow, url string, s jetstream.JetStream, name string) *projection {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	must(t, err)
	t.Cleanup(pool.Close)
	p := &projection{t: t, o: o, s: s, pool: pool, name: name, marks: consume.Postgres(pool)}
	p.make()
	return p
}

func (p *projection) make() {
	p.t.Helper()
	_, err := p.pool.Exec(p.t.Context(), `DROP TABLE IF EXISTS chain; CREATE TABLE chain (doc text PRIMARY KEY, n int, hash text)`)
	must(p.t, err)
}

func (p *projection) handle(ctx context.Context, tx pgx.Tx, e *consume.Event) error {
	if p.poison.Load() && e.Document == "doc 9" {
		return consume.Poison(errors.New("as the test wants it"))
	}
	if e.Replayed {
		p.replayed.add(e.Document + " " + e.Key) // an attempt that failed is made again
	}
	q := interface {
		QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	}(p.pool)
	if tx != nil {
		q = tx
	}
	var n int
	return q.QueryRow(ctx, `INSERT INTO chain AS c VALUES ($1, 1, md5($2)) ON CONFLICT (doc) DO UPDATE SET n = c.n + 1, hash = md5(c.hash || $2) RETURNING n`,
		e.Document, e.Key+string(e.Data)).Scan(&n)
}

// start runs it.
func (p *projection) start() {
	p.t.Helper()
	c, err := consume.New(p.s, p.marks, consume.Config{Name: p.name, Stream: p.o.stream, Partitions: 4, Log: slog.New(slog.NewTextHandler(p.o.log, nil))})
	must(p.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	p.stop, p.ended = cancel, make(chan error, 1)
	go func() { p.ended <- c.Run(ctx, p.handle) }()
	p.t.Cleanup(cancel)
}

// reach waits until it has n events, stops it, and returns the projection.
func (p *projection) reach(n int) string {
	p.t.Helper()
	eventually(p.t, fmt.Sprintf("%d events in the projection", n), func() error {
		select {
		case err := <-p.ended:
			p.t.Fatalf("the consumer ended: %v", err)
		default:
		}
		var got int
		must(p.t, p.pool.QueryRow(p.t.Context(), `SELECT coalesce(sum(n), 0) FROM chain`).Scan(&got))
		if got < n {
			return fmt.Errorf("%d events", got)
		}
		return nil
	})
	p.stop()
	select {
	case err := <-p.ended:
		must(p.t, err)
	case <-time.After(patience):
		p.t.Fatal("the consumer did not stop")
	}
	return p.dump()
}

func (p *projection) dump() (text string) {
	p.t.Helper()
	must(p.t, p.pool.QueryRow(p.t.Context(), `SELECT coalesce(string_agg(doc || ' ' || n || ' ' || hash, E'\n' ORDER BY doc COLLATE "C"), '') FROM chain`).Scan(&text))
	return text
}

// consumers asks outflow consumer list.
func (o *outflow) consumers(args ...string) map[string]map[string]any {
	o.t.Helper()
	out, errOut, code := o.exec(append([]string{"consumer", "list", "--json"}, args...)...)
	if code != 0 {
		o.t.Fatalf("outflow consumer list: exit code %d\n%s", code, errOut)
	}
	var all []map[string]any
	must(o.t, json.Unmarshal([]byte(out), &all))
	byName := map[string]map[string]any{}
	for _, c := range all {
		byName[c["name"].(string)] = c
	}
	return byName
}

// TestRebuildFromNothing: a projection that is dropped and made again, by setting its consumer back, and by a replay from the table to it
// alone, is the one that it was, byte for byte.
func TestRebuildFromNothing(t *testing.T) {
	slow(t)
	t.Parallel()
	const docs, each = 9, 40
	ns := natstest.Server(t)
	o, conn, url := installation(t, pgtest.Server(t), ns.URL(), "rebuild", "REORDER_HORIZON=0s")
	o.init()
	o.start()
	s := js(t, ns.URL())
	p := newProjection(t, o, url, s, "chain")
	p.start()
	for i := range each {
		mustExec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc ' || d, 'anna', $1::int, jsonb_build_object('n', $1::int) FROM generate_series(1, $2::int) d`, i, docs)
	}
	eventually(t, "the consumer runs", func() error {
		if c := o.consumers()["chain"]; c == nil || c["owner"] == nil {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
	o.fails(3, []string{"consumer", "rewind", "chain", "--to", "start", "--yes"}, "consumer chain runs")
	want := p.reach(docs * each)
	if p.replayed.count() != 0 {
		t.Errorf("%d live events are marked as replayed", p.replayed.count())
	}

	p.make()
	o.fails(2, []string{"consumer", "rewind", "chain", "--to", "time:1h"}, "no terminal", "--yes")
	out, errOut, code := o.exec("consumer", "rewind", "chain", "--to", "start", "--yes")
	if code != 0 {
		t.Fatalf("rewind: exit code %d\n%s%s", code, out, errOut)
	}
	o.mustSay("rewind", out, fmt.Sprintf("%d events: from sequence 1 (position", docs*each), "Event.Replayed is true")
	if c := o.consumers()["chain"]; c["sequence"].(float64) != 0 || c["running"].(bool) || c["marks"] != "postgres" || c["partitions"].(float64) != 4 {
		t.Errorf("set back: %v", c)
	}
	p.start()
	if got := p.reach(docs * each); got != want {
		t.Errorf("set back to the start, it becomes\n%s\nwant\n%s", got, want)
	}
	if got := p.replayed.take(); got != docs*each {
		t.Errorf("%d events are marked as replayed", got)
	}

	// A part of it, and live ones behind. One document is parked on the way; it comes again with the others.
	again := func(parked int) {
		t.Helper()
		must(t, func() error { _, err := p.pool.Exec(t.Context(), `UPDATE chain SET n = 0, hash = 'x'`); return err }())
		out, errOut, code := o.exec("consumer", "rewind", "chain", "--to", fmt.Sprintf("seq:%d", docs*each-2*docs+1), "--yes")
		if code != 0 || strings.Contains(out, "of them are parked") != (parked > 0) {
			t.Fatalf("rewind: exit code %d: %s%s", code, out, errOut)
		}
	}
	again(0)
	p.poison.Store(true)
	p.start()
	p.reach(2*docs - 2)
	p.replayed.take()
	eventually(t, "two are parked", func() error {
		if c := o.consumers()["chain"]; c["parked"].(float64) != 2 {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
	p.poison.Store(false)
	again(2)
	if c := o.consumers()["chain"]; c["parked"].(float64) != 0 {
		t.Errorf("set back: %v", c)
	}
	o.fails(3, []string{"consumer", "rewind", "chain", "--to", fmt.Sprintf("seq:%d", docs*each), "--yes"}, "only goes back")
	mustExec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc ' || d, 'anna', $1::int, '{}' FROM generate_series(1, $2::int) d`, each, docs)
	p.start()
	p.reach(3 * docs)
	if got := p.replayed.take(); got != 2*docs {
		t.Errorf("%d of %d events are marked as replayed", got, 2*docs)
	}
	mustExec(t, conn, `DELETE FROM outbox WHERE counter = $1`, each)

	p.make()
	out, errOut, code = o.exec("replay", "--from", "table", "--to", "consumer:chain", "--replay-id", "rebuild")
	if code != 0 {
		t.Fatalf("replay: exit code %d\n%s%s", code, out, errOut)
	}
	p.start()
	if got := p.reach(docs * each); got != want {
		t.Errorf("from the table it becomes\n%s\nwant\n%s", got, want)
	}
	if got := p.replayed.take(); got != docs*each {
		t.Errorf("%d events are marked as replayed", got)
	}

	p.make()
	if out, errOut, code := o.exec("replay", "--seq", fmt.Sprintf("..%d", docs*each), "--to", "consumer:chain"); code != 0 {
		t.Fatalf("replay: exit code %d\n%s%s", code, out, errOut)
	}
	p.start()
	if got := p.reach(docs * each); got != want {
		t.Errorf("from the stream it becomes\n%s\nwant\n%s", got, want)
	}

	live, err := s.Stream(t.Context(), o.stream)
	must(t, err)
	must(t, live.Purge(t.Context(), jetstream.WithPurgeSequence(20)))
	o.fails(3, []string{"consumer", "rewind", "chain", "--to", "start", "--yes"}, "begins at sequence 20", "--to seq:20", "outflow replay --from table --to consumer:chain")
	o.fails(3, []string{"consumer", "rewind", "chain", "--to", "position:0/1", "--yes"}, "begins at sequence 20")
	o.fails(3, []string{"consumer", "rewind", "nobody", "--to", "start", "--yes"}, "no consumer nobody")
	o.fails(2, []string{"consumer", "rewind", "chain", "--to", "yesterday", "--yes"}, "seq:N")
	o.fails(2, []string{"consumer", "rewind", "chain", "--yes"}, "--to")
	all := o.replay("--seq", fmt.Sprintf("%d", docs*each+1))
	if out, errOut, code := o.exec("consumer", "rewind", "chain", "--to", "position:"+all[0].Position, "--yes"); code != 0 || !strings.Contains(out, fmt.Sprintf("to %d\n", docs*each)) {
		t.Errorf("to a position: exit code %d: %s%s", code, out, errOut)
	}
}

// TestRewindWithoutDatabase: a consumer that keeps its marks in JetStream, and plain durables.
func TestRewindWithoutDatabase(t *testing.T) {
	t.Parallel()
	o, _, s := replayWorld(t, "rewindkv")
	p := newProjection(t, o, envOf(o, "OUTFLOW_POSTGRES_URL"), s, "kv")
	p.marks = consume.JetStream()
	p.start()
	want := p.reach(12)
	p.make()
	out, errOut, code := o.exec("consumer", "rewind", "kv", "--to", "start", "--yes")
	if code != 0 || !strings.Contains(out, "12 events: from sequence 1") {
		t.Fatalf("rewind: exit code %d\n%s%s", code, out, errOut)
	}
	if c := o.consumers()["kv"]; c["sequence"].(float64) != 0 || c["marks"] != "jetstream" {
		t.Errorf("set back: %v", c)
	}
	p.start()
	if got := p.reach(12); got != want {
		t.Errorf("set back, it becomes\n%s\nwant\n%s", got, want)
	}
	if got := p.replayed.count(); got != 12 {
		t.Errorf("%d events are marked as replayed", got)
	}

	stream, err := s.Stream(t.Context(), o.stream)
	must(t, err)
	plain, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
		Durable: "plain", FilterSubject: "outbox.a", MaxAckPending: 7, Description: "mine", Metadata: map[string]string{"team": "x"},
	})
	must(t, err)
	take := func(c jetstream.Consumer, n int) (seqs []uint64) {
		batch, err := c.Fetch(n)
		must(t, err)
		for m := range batch.Messages() {
			meta, err := m.Metadata()
			must(t, err)
			must(t, m.DoubleAck(t.Context()))
			seqs = append(seqs, meta.Sequence.Stream)
		}
		return seqs
	}
	if got := fmt.Sprint(take(plain, 4)); got != "[1 3 5 7]" {
		t.Fatalf("the durable was given %s", got)
	}
	fetching, stop := context.WithCancel(t.Context())
	_, err = plain.Fetch(5, jetstream.FetchContext(fetching)) // two come, and are never acknowledged
	must(t, err)
	eventually(t, "a pull waits", func() error {
		if info, err := plain.Info(t.Context()); err != nil || info.NumWaiting == 0 {
			return fmt.Errorf("%v, %w", info, err)
		}
		return nil
	})
	o.fails(3, []string{"consumer", "rewind", "plain", "--to", "seq:3", "--yes"}, "pulls wait")
	stop()
	eventually(t, "no pull waits", func() error {
		if info, err := plain.Info(t.Context()); err != nil || info.NumWaiting > 0 {
			return fmt.Errorf("%v, %w", info, err)
		}
		return nil
	})
	info, err := plain.Info(t.Context())
	must(t, err)
	given := info.Delivered.Stream
	// As if a rewind had been killed behind each of its steps: the durable is there with a record, then it is gone.
	record, err := json.Marshal(map[string]any{"config": info.Config, "was": given, "acked": info.AckFloor.Stream, "to": 2})
	must(t, err)
	_, err = stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "plain_rewinding", Metadata: map[string]string{"outflow.rewind": string(record)}})
	must(t, err)
	if c := o.consumers(); c["plain"]["note"] != nil || c["plain_rewinding"] != nil || c["plain"]["position"] == nil {
		t.Errorf("with a record beside it: %v", c)
	}
	must(t, stream.DeleteConsumer(t.Context(), "plain"))
	if c := o.consumers()["plain"]; c["note"] == nil || !strings.Contains(c["note"].(string), "rewind plain --to seq:3") {
		t.Errorf("interrupted: %v", c)
	}
	if out, errOut, code := o.exec("consumer", "rewind", "plain", "--to", "seq:3", "--yes"); code != 0 || !strings.Contains(out, "nothing tells them from new ones") {
		t.Fatalf("rewind: exit code %d\n%s%s", code, out, errOut)
	}
	again, err := stream.Consumer(t.Context(), "plain")
	must(t, err)
	if c := again.CachedInfo().Config; c.MaxAckPending != 7 || c.Description != "mine" || c.Metadata["team"] != "x" || c.FilterSubject != "outbox.a" {
		t.Errorf("made again: %+v", c)
	}
	if _, err := stream.Consumer(t.Context(), "plain_rewinding"); err == nil {
		t.Error("the record is still there")
	}
	// Killed behind the new durable: the same command finishes here, too.
	_, err = stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "plain_rewinding", Metadata: map[string]string{"outflow.rewind": string(record)}})
	must(t, err)
	if out, errOut, code := o.exec("consumer", "rewind", "plain", "--to", "seq:3", "--yes"); code != 0 {
		t.Fatalf("rewind: exit code %d\n%s%s", code, out, errOut)
	}
	if _, err := stream.Consumer(t.Context(), "plain_rewinding"); err == nil {
		t.Error("the record is still there")
	}
	if got := fmt.Sprint(take(again, 3)); got != "[3 5 7]" {
		t.Errorf("the durable was given %s again", got)
	}
	text, _, _ := o.exec("consumer", "list")
	o.mustSay("outflow consumer list", text, "CONSUMER", "plain", "outbox.a", "kv", "jetstream")
}

// envOf is a setting of an installation.
func envOf(o *outflow, name string) (value string) {
	for _, e := range o.env {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			value = v
		}
	}
	return value
}
