package outage

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// BenchmarkHiccup reports how long the stream is silent when NATS is killed and started again, with an event every 10 ms, beside 50 MB/s
// of WAL of a table that is in no publication. With OUTFLOW_TEST_BINARY it measures another version. -benchtime 1x is enough: the server has
// to decode again what was written in the last durable_after, 30 s here, wherever a session begins anew.
func BenchmarkHiccup(b *testing.B) {
	const rate = 50e6
	durable := 30 * time.Second
	pg := pgtest.Own(b, 0)
	url, err := pg.CreateDatabase(b.Context(), "bench")
	if err != nil {
		b.Fatal(err)
	}
	nats := natstest.Process(b)
	o := harness.New(b, url, nats.URL(), "hiccup", "SINK_DURABLE_AFTER="+durable.String())
	o.Init()
	o.Start()
	o.AwaitReady()
	harness.Exec(b, harness.Connect(b, url), "CREATE TABLE other (a text)")
	harness.Exec(b, harness.Connect(b, url), "ALTER TABLE other ALTER a SET STORAGE PLAIN")
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	conn, done := harness.Connect(b, url), make(chan struct{})
	go func() { // the neighbours
		defer close(done)
		for begun, wrote := time.Now(), 0.; ctx.Err() == nil; {
			if _, err := conn.Exec(ctx, "INSERT INTO other SELECT repeat(md5(i::text), 30) FROM generate_series(1, 2000) i"); err == nil {
				wrote += 2000 * 1030
			}
			time.Sleep(time.Duration(wrote/rate*1e9) - time.Since(begun))
		}
	}()
	events := harness.Connect(b, url)
	write := func(d time.Duration) {
		for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			harness.Exec(b, events, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', nextval('n'), '{}')")
		}
	}
	harness.Exec(b, events, "CREATE SEQUENCE n")
	write(durable + 15*time.Second)
	var wal float64
	for b.Loop() {
		var before, after string
		row := func(to *string) {
			if err := events.QueryRow(ctx, "SELECT pg_current_wal_lsn()::text").Scan(to); err != nil {
				b.Fatal(err)
			}
		}
		row(&before)
		begun := time.Now()
		if err := nats.Kill(); err != nil {
			b.Fatal(err)
		}
		if err := nats.Start(); err != nil {
			b.Fatal(err)
		}
		write(5 * time.Second)
		o.AwaitReady()
		for { // until what is written now is there
			st, err := harness.JetStream(b, nats.URL()).Stream(ctx, o.Stream)
			if err == nil {
				var n uint64
				if err := events.QueryRow(ctx, "SELECT count(*) FROM outbox").Scan(&n); err != nil {
					b.Fatal(err)
				}
				if st.CachedInfo().State.Msgs >= n {
					break
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
		row(&after)
		if err := events.QueryRow(ctx, "SELECT pg_wal_lsn_diff($1, $2)::float8", after, before).Scan(&wal); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(wal/time.Since(begun).Seconds()/1e6, "WAL-MB/s")
	}
	cancel()
	<-done
	b.ReportMetric(longestSilence(b, nats.URL(), o.Stream).Seconds()*1000, "silence-ms")
}

// longestSilence is the longest time between two messages of a stream.
func longestSilence(b *testing.B, url, stream string) time.Duration {
	b.Helper()
	s, err := harness.JetStream(b, url).Stream(b.Context(), stream)
	if err != nil {
		b.Fatal(err)
	}
	var at []time.Time
	last := s.CachedInfo().State.LastSeq
	c, err := s.OrderedConsumer(b.Context(), jetstream.OrderedConsumerConfig{})
	if err != nil {
		b.Fatal(err)
	}
	for uint64(len(at)) < last {
		m, err := c.Next()
		if err != nil {
			b.Fatal(err)
		}
		meta, err := m.Metadata()
		if err != nil {
			b.Fatal(err)
		}
		at = append(at, meta.Timestamp)
	}
	slices.SortFunc(at, time.Time.Compare)
	longest := time.Duration(0)
	for i := 1; i < len(at); i++ {
		longest = max(longest, at[i].Sub(at[i-1]))
	}
	return longest
}
