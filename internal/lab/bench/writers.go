package bench

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

const writersRole = "writers"

// written is what the writers report.
type written struct {
	Rows   int
	Begun  time.Time
	Ended  time.Time
	Marks  []mark // while they wrote
	Delays delays
}

// mark is how much was committed by a time.
type mark struct {
	At   time.Time
	Rows int
}

// markEvery is how often the writers note how far they are.
const markEvery = 50 * time.Millisecond

// write is the role: single-row or larger transactions through several connections, at a rate or as fast as it goes, and a consumer
// if the task names a stream.
func write(ctx context.Context, t task, ready func() error) (any, error) {
	w := &writing{task: t, noise: noise(t.Payload + 1024)}
	for range t.Writers {
		conn, err := pgx.Connect(ctx, t.Postgres)
		if err != nil {
			return nil, err
		}
		defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the process ends
		if _, err := conn.Prepare(ctx, "write", w.statement()); err != nil {
			return nil, err
		}
		w.conns = append(w.conns, conn)
	}
	var reader *reader
	if t.Stream != "" {
		var err error
		if reader, err = newReader(t); err != nil {
			return nil, err
		}
		defer reader.close()
	}
	if err := ready(); err != nil {
		return nil, err
	}
	got, err := w.run(ctx)
	if err != nil || reader == nil {
		return got, err
	}
	got.Delays, err = reader.delays(ctx, w.returned, int(float64(t.Rate)*t.Warm.Seconds()))
	return got, err
}

// writing is the writers' state.
type writing struct {
	task
	noise string
	conns []*pgx.Conn

	next     atomic.Int64 // the number of the next transaction
	rows     atomic.Int64 // committed
	returned []time.Time  // of commits, by number; only at a rate
}

// statement writes a transaction: $1 is its first event's number.
func (w *writing) statement() string {
	into := "INSERT INTO " + w.Table + " (doc_id, actor_id, counter, payload) "
	if w.PerTx == 1 {
		return into + "VALUES ($1, 'actor', $2, $3)"
	}
	return into + fmt.Sprintf(`SELECT 'doc' || e %% %d, 'actor', e, jsonb_build_object('n', e, 'op', substr($2::text, 1 + (e %% 1024)::int, %d))
		FROM generate_series($1::bigint, $1::bigint + %d) e`, w.Docs, w.Payload-24, w.PerTx-1)
}

// values are the statement's.
func (w *writing) values(first int64) []any {
	if w.PerTx > 1 {
		return []any{first, w.noise}
	}
	at := first % 1024
	return []any{
		fmt.Sprintf("doc%d", first%int64(w.Docs)), first,
		fmt.Sprintf(`{"n": %d, "op": "%s"}`, first, w.noise[at:at+int64(w.Payload)-24]),
	}
}

func (w *writing) run(ctx context.Context) (*written, error) {
	whole := w.Warm + w.For
	total := int64(1) << 62
	if w.Rate > 0 {
		total = int64(float64(w.Rate) * whole.Seconds())
		w.returned = make([]time.Time, total)
	}
	got := &written{Begun: time.Now()}
	over := make(chan struct{})
	var marking sync.WaitGroup
	marking.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-time.After(markEvery):
				rows := int(w.rows.Load()) // before the time: what is late counts as lag
				got.Marks = append(got.Marks, mark{time.Now(), rows})
			}
		}
	})
	g, ctx := errgroup.WithContext(ctx)
	for _, conn := range w.conns {
		g.Go(func() error {
			for {
				n := w.next.Add(1) - 1
				if n >= total || w.Rate == 0 && time.Since(got.Begun) >= whole {
					return nil
				}
				if w.Rate > 0 {
					if err := sleep(ctx, time.Until(got.Begun.Add(time.Duration(n)*time.Second/time.Duration(w.Rate)))); err != nil {
						return err
					}
				}
				if _, err := conn.Exec(ctx, "write", w.values(n*int64(w.PerTx))...); err != nil {
					return err
				}
				if w.Rate > 0 {
					w.returned[n] = time.Now()
				}
				w.rows.Add(int64(w.PerTx))
			}
		})
	}
	err := g.Wait()
	got.Ended = time.Now()
	close(over)
	marking.Wait()
	got.Rows = int(w.rows.Load())
	return got, err
}

// noise is text that does not compress.
func noise(n int) string {
	var b strings.Builder
	for x := uint64(88172645463325252); b.Len() < n; {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		fmt.Fprintf(&b, "%016x", x)
	}
	return b.String()
}
