package bench

import (
	"context"
	"fmt"
	"strings"
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
	Delays delays
}

// write is the role: single rows through several connections, at a rate, and a consumer that receives them.
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
	reader, err := newReader(t)
	if err != nil {
		return nil, err
	}
	defer reader.close()
	if err := ready(); err != nil {
		return nil, err
	}
	got, err := w.run(ctx)
	if err != nil {
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
	returned []time.Time  // of commits, by number
}

func (w *writing) statement() string {
	return "INSERT INTO " + w.Table + " (doc_id, actor_id, counter, payload) VALUES ($1, 'actor', $2, $3)"
}

// values are the statement's.
func (w *writing) values(n int64) []any {
	at := n % 1024
	return []any{
		fmt.Sprintf("doc%d", n%int64(w.Docs)), n/int64(w.Docs) + 1,
		fmt.Sprintf(`{"n": %d, "op": "%s"}`, n, w.noise[at:at+int64(w.Payload)-24]),
	}
}

func (w *writing) run(ctx context.Context) (*written, error) {
	total := int64(float64(w.Rate) * (w.Warm + w.For).Seconds())
	w.returned = make([]time.Time, total)
	got := &written{Rows: int(total), Begun: time.Now()}
	g, ctx := errgroup.WithContext(ctx)
	for _, conn := range w.conns {
		g.Go(func() error {
			for {
				n := w.next.Add(1) - 1
				if n >= total {
					return nil
				}
				if err := sleep(ctx, time.Until(
					got.Begun.Add(time.Duration(n)*time.Second/time.Duration(w.Rate)))); err != nil {
					return err
				}
				if _, err := conn.Exec(ctx, "write", w.values(n)...); err != nil {
					return err
				}
				w.returned[n] = time.Now()
			}
		})
	}
	err := g.Wait()
	got.Ended = time.Now()
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
