package harness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer" // consumer is a helper of these tests
)

// Distinct counts things that may come more than once.
type Distinct struct {
	Mu   sync.Mutex
	Seen map[string]bool
}

func (d *Distinct) add(what string) {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	if d.Seen == nil {
		d.Seen = map[string]bool{}
	}
	d.Seen[what] = true
}

// Projection is a consumer whose result depends on the order: of each document a chain of hashes over its
// events.
type Projection struct {
	t        *testing.T
	o        *Outflow
	s        jetstream.JetStream
	Pool     *pgxpool.Pool
	Name     string
	Marks    consume.Offsets
	Replayed Distinct    // events that were marked as replayed
	Poison   atomic.Bool // the handler does not know what to do with document "doc 9"
	stop     context.CancelFunc
	ended    chan error
}

func NewProjection(t *testing.T, o *Outflow, url string, s jetstream.JetStream, name string) *Projection {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	Must(t, err)
	t.Cleanup(pool.Close)
	p := &Projection{t: t, o: o, s: s, Pool: pool, Name: name, Marks: consume.Postgres(pool)}
	p.Make()
	return p
}

func (p *Projection) Make() {
	p.t.Helper()
	_, err := p.Pool.Exec(p.t.Context(),
		`DROP TABLE IF EXISTS chain; CREATE TABLE chain (doc text PRIMARY KEY, n int, hash text)`)
	Must(p.t, err)
}

func (p *Projection) handle(ctx context.Context, tx pgx.Tx, e *consume.Event) error {
	if p.Poison.Load() && e.Document == "doc 9" {
		return consume.Poison(errors.New("as the test wants it"))
	}
	if e.Replayed {
		p.Replayed.add(e.Document + " " + e.Key) // an attempt that failed is made again
	}
	q := interface {
		QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	}(p.Pool)
	if tx != nil {
		q = tx
	}
	var n int
	return q.QueryRow(ctx,
		`INSERT INTO chain AS c VALUES ($1, 1, md5($2)) ON CONFLICT (doc) DO UPDATE
			SET n = c.n + 1, hash = md5(c.hash || $2) RETURNING n`,
		e.Document, e.Key+string(e.Data)).Scan(&n)
}

// Start runs it.
func (p *Projection) Start() {
	p.t.Helper()
	c, err := consume.New(p.s, p.Marks, consume.Config{Name: p.Name, Stream: p.o.Stream, Partitions: 4,
		Log: slog.New(slog.NewTextHandler(p.o.Log, nil))})
	Must(p.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	p.stop, p.ended = cancel, make(chan error, 1)
	go func() { p.ended <- c.Run(ctx, p.handle) }()
	p.t.Cleanup(cancel)
}

// Reach waits until it has n events, stops it, and returns the projection.
func (p *Projection) Reach(n int) string {
	p.t.Helper()
	Eventually(p.t, fmt.Sprintf("%d events in the projection", n), func() error {
		select {
		case err := <-p.ended:
			p.t.Fatalf("the consumer ended: %v", err)
		default:
		}
		var got int
		Must(p.t, p.Pool.QueryRow(p.t.Context(), `SELECT coalesce(sum(n), 0) FROM chain`).Scan(&got))
		if got < n {
			return fmt.Errorf("%d events", got)
		}
		return nil
	})
	p.stop()
	select {
	case err := <-p.ended:
		Must(p.t, err)
	case <-time.After(Patience):
		p.t.Fatal("the consumer did not stop")
	}
	return p.dump()
}

func (p *Projection) dump() (text string) {
	p.t.Helper()
	Must(p.t, p.Pool.QueryRow(p.t.Context(),
		`SELECT coalesce(string_agg(doc || ' ' || n || ' ' || hash, E'\n' ORDER BY doc COLLATE "C"), '')
			FROM chain`).Scan(&text))
	return text
}
