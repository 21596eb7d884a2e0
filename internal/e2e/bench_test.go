package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/natstest"
	"github.com/outflowhq/outflow/internal/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// BenchmarkDrain lets a backlog wait and reports how fast it is published and acknowledged, as a ratio to pg_recvlogical, which
// throws the same data away, in the same run.
func BenchmarkDrain(b *testing.B) {
	for _, shape := range []struct{ rows, perTx int }{{100_000, 100}, {100_000, 1}} {
		b.Run(fmt.Sprintf("rows=%d,tx=%d", shape.rows, shape.perTx), func(b *testing.B) {
			pg := pgtest.Own(b, 0, "fsync=off", "shared_buffers=512MB", "max_wal_size=8GB")
			recvlogical, ok := pg.Installation.Tool("pg_recvlogical")
			if !ok {
				b.Skipf("%v has no pg_recvlogical to compare with", pg.Installation)
			}
			url, err := pg.CreateDatabase(b.Context(), "bench")
			if err != nil {
				b.Fatal(err)
			}
			nats := natstest.Process(b)
			o := newOutflow(b, url, nats.URL(), "bench", "REORDER_HORIZON=0s")
			o.init()
			conn := db(b, url)
			mustExec(b, conn, "SELECT pg_create_logical_replication_slot('other', 'pgoutput')")
			mustExec(b, conn, `CREATE PROCEDURE fill(rows int, per_tx int) LANGUAGE plpgsql AS $$
				BEGIN
					FOR t IN 0 .. rows / per_tx - 1 LOOP
						INSERT INTO outbox (doc_id, actor_id, counter, payload)
							SELECT 'doc' || n % 1000, 'actor', t * per_tx + n, jsonb_build_object('op', repeat('x', 150), 'n', n) FROM generate_series(1, per_tx) n;
						COMMIT;
					END LOOP;
				END $$`)
			rows := 0
			var theirs, ours time.Duration
			var cpu float64 // seconds
			for b.Loop() {
				mustExec(b, conn, fmt.Sprintf("CALL fill(%d, %d)", shape.rows, shape.perTx))
				rows += shape.rows
				var end string
				if err := conn.QueryRow(b.Context(), "SELECT pg_current_wal_lsn()").Scan(&end); err != nil {
					b.Fatal(err)
				}
				begun := time.Now()
				out, err := exec.Command(recvlogical, "-d", url, "-S", "other", "--start", "-f", "/dev/null", "--no-loop", "--endpos", end,
					"-o", "proto_version=1", "-o", "publication_names=bench").CombinedOutput()
				if err != nil {
					b.Fatalf("pg_recvlogical: %v\n%s", err, out)
				}
				theirs += time.Since(begun)
				begun = time.Now()
				o.start()
				awaitMessages(b, js(b, nats.URL()), o.stream, rows)
				ours += time.Since(begun)
				cpu += metric(b, o, "process_cpu_seconds_total")
				o.term()
			}
			b.ReportMetric(float64(rows)/ours.Seconds(), "events/s")
			b.ReportMetric(float64(rows)/theirs.Seconds(), "pg_recvlogical/s")
			b.ReportMetric(theirs.Seconds()/ours.Seconds(), "ratio")
			b.ReportMetric(cpu/float64(rows)*1e6, "cpu-µs/event")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// metric reads a value from /metrics.
func metric(tb testing.TB, o *outflow, name string) float64 {
	tb.Helper()
	var body string
	eventually(tb, "metrics", func() error {
		code := 0
		if code, body = o.get("/metrics"); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				tb.Fatal(err)
			}
			return v
		}
	}
	tb.Fatalf("no metric %s", name)
	return 0
}

// counted waits until a counter has reached a value. What is read again, by another session, is counted again.
func (o *outflow) counted(name string, least float64) {
	o.t.Helper()
	eventually(o.t, name, func() error {
		if got := metric(o.t, o, name); got < least {
			return fmt.Errorf("%v, want %v", got, least)
		}
		return nil
	})
}

// BenchmarkLatency reports the time from a commit's return to a consumer, at 1,000 commits a second.
func BenchmarkLatency(b *testing.B) {
	for _, horizon := range []string{"0s", "20ms"} {
		b.Run("horizon="+horizon, func(b *testing.B) {
			pg := pgtest.Own(b, 0)
			url, err := pg.CreateDatabase(b.Context(), "bench")
			if err != nil {
				b.Fatal(err)
			}
			nats := natstest.Process(b)
			o := newOutflow(b, url, nats.URL(), "bench", "REORDER_HORIZON="+horizon)
			o.init()
			o.start()
			o.ready()
			for b.Loop() {
				const commits, rate, writers = 5000, 1000, 8
				d := measureLatency(b, url, js(b, nats.URL()), o.stream, commits, rate, writers)
				b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, "p50-ms")
				b.ReportMetric(float64(d[len(d)*99/100].Microseconds())/1000, "p99-ms")
				b.ReportMetric(float64(d[len(d)*999/1000].Microseconds())/1000, "p99.9-ms")
				b.ReportMetric(0, "ns/op")
			}
			o.term()
		})
	}
}

// measureLatency writes single-row transactions at a rate and returns each one's time from commit to consumer, ascending.
func measureLatency(b *testing.B, url string, js jetstream.JetStream, stream string, commits, rate, writers int) []time.Duration {
	var mu sync.Mutex
	committed, arrived := map[string]time.Time{}, map[string]time.Time{}
	all := make(chan struct{})
	cons, err := js.OrderedConsumer(b.Context(), stream, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverNewPolicy})
	if err != nil {
		b.Fatal(err)
	}
	consuming, err := cons.Consume(func(m jetstream.Msg) {
		now := time.Now()
		h, err := outbox.ParseHeader(m.Headers().Get(outbox.HeaderName))
		if err != nil {
			b.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		if arrived[h.Key] = now; len(arrived) == commits {
			close(all)
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	defer consuming.Stop()
	begun := time.Now()
	var group sync.WaitGroup
	for w := range writers {
		group.Go(func() {
			conn, err := pgx.Connect(b.Context(), url)
			if err != nil {
				b.Error(err)
				return
			}
			defer conn.Close(context.WithoutCancel(b.Context())) //nolint:errcheck // it is over
			for i := w; i < commits; i += writers {
				time.Sleep(time.Until(begun.Add(time.Duration(i) * time.Second / time.Duration(rate)))) // the rate
				_, err := conn.Exec(b.Context(), "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, 'a', $2, '{\"op\":[[0,0,\"x\"]]}')",
					fmt.Sprint("doc", i%100), i)
				now := time.Now()
				if err != nil {
					b.Error(err)
					return
				}
				mu.Lock()
				committed[fmt.Sprintf("a:%020d", i)] = now
				mu.Unlock()
			}
		})
	}
	group.Wait()
	select {
	case <-all:
	case <-time.After(patience):
		b.Fatalf("%d of %d arrived", len(arrived), commits)
	}
	mu.Lock()
	defer mu.Unlock()
	var d []time.Duration
	for key, at := range arrived {
		d = append(d, max(0, at.Sub(committed[key])))
	}
	slices.Sort(d)
	return d
}
