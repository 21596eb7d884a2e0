package clusters

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// homeStream is where a cluster publishes the events of a home.
type homeStream struct {
	js     jetstream.JetStream
	name   string
	others bool // not the home's own
}

func (s homeStream) last(ctx context.Context) (uint64, error) {
	stream, err := s.js.Stream(ctx, s.name)
	if err != nil {
		return 0, err
	}
	return stream.CachedInfo().State.LastSeq, nil
}

// numbered is the id of a home's event.
func numbered(home int, n int64) string { return fmt.Sprintf("%08x-0000-4000-8000-%012x", home, n) }

// writeNumbered commits a home's events 0 to total-1 at a rate, 100 in a transaction.
func writeNumbered(ctx context.Context, conn *pgx.Conn, home int, total int64, rate int,
	ops []recording.Op, written *atomic.Int64) error {
	const together = 100
	begun := time.Now()
	for from := int64(0); from < total; from += together {
		var ids, docs, actors, payloads []string
		var counters []int64
		for n := from; n < min(from+together, total); n++ {
			op, round := ops[n%int64(len(ops))], n/int64(len(ops))
			ids, docs = append(ids, numbered(home, n)), append(docs, fmt.Sprintf("%s %d", op.Doc, round))
			actors, counters = append(actors, op.Actor), append(counters, op.Counter)
			payloads = append(payloads, string(op.Payload))
		}
		if _, err := conn.Exec(ctx, `INSERT INTO outbox (id, doc_id, actor_id, counter, payload)
			SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::bigint[], $5::jsonb[])`, ids, docs,
			actors, counters, payloads); err != nil {
			return err
		}
		done := written.Add(int64(len(ids)))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Until(begun.Add(time.Duration(done) * time.Second / time.Duration(rate)))):
		}
	}
	return nil
}

// TestNothingIsTwiceWhileNothingFails: three homes take writes, OUTFLOW_TEST_RATE events a second in all,
// until there are OUTFLOW_TEST_EVENTS, and nothing fails. Each event is in a stream once, in the mode islands
// in the home's own.
func TestNothingIsTwiceWhileNothingFails(t *testing.T) {
	tier.OnlyLong(t, "it writes 10,000,000 events, and other tests have parts in which nothing fails")
	const delay = 30 * time.Second
	t.Run("islands", func(t *testing.T) {
		s := newIslands(t, pgserver.Newest, 3, 3)
		s.delay = delay
		s.switchOn()
		var streams [][]homeStream
		for home, of := range s.of {
			var all []homeStream
			for at, o := range of {
				all = append(all, homeStream{js: s.js[at], name: o.Stream, others: at != home})
			}
			streams = append(streams, all)
			harness.Exec(t, s.all[home].conn, "SELECT pg_drop_replication_slot('said')") // keeps all WAL
		}
		for home := range s.all {
			s.of[home][home].AwaitReady()
		}
		writeWithoutFaults(t, s.all, streams)
	})
	t.Run("shared", func(t *testing.T) {
		natsURL := natstest.Process(t).URL()
		all, _ := mesh(t, pgserver.Newest, 3, natsURL, inSharedMode...)
		js := harness.JetStream(t, natsURL)
		var streams [][]homeStream
		for home, c := range all {
			c.o.Set("CLUSTER_MAXIMUM_DELAY=" + delay.String())
			c.o.Init()
			c.o.Start()
			c.o.AwaitReady()
			for at := range all {
				if at == home {
					continue
				}
				o := harness.New(t, all[at].url, natsURL, c.o.Slot, clusterSettings(at, len(all))...)
				o.UseStream(c.o.Stream)
				o.Set(inSharedMode...)
				o.Set("CLUSTER_MAXIMUM_DELAY="+delay.String(),
					fmt.Sprint("CLUSTER_SUBSCRIPTION=from_", home+1))
				o.Init()
				o.Start()
				o.AwaitState("standby")
			}
			streams = append(streams, []homeStream{{js: js, name: c.o.Stream}})
		}
		writeWithoutFaults(t, all, streams)
	})
}

func writeWithoutFaults(t *testing.T, all []*cluster, streams [][]homeStream) {
	t.Helper()
	each := int64(harness.EnvInt(t, "OUTFLOW_TEST_EVENTS", 10_000_000) / len(all))
	rate := harness.EnvInt(t, "OUTFLOW_TEST_RATE", 3_000) / len(all)
	ops := harness.RecordedOps(t, 100_000)
	written := make([]atomic.Int64, len(all))
	g, ctx := errgroup.WithContext(t.Context())
	begun := time.Now()
	for home, c := range all {
		g.Go(func() error { return writeNumbered(ctx, c.conn, home, each, rate, ops, &written[home]) })
	}
	published := func() (n int64) {
		for home, of := range streams {
			var line []string
			for _, s := range of {
				last, err := s.last(t.Context())
				harness.Must(t, err)
				if n += int64(last); s.others && last > 0 {
					t.Fatalf("another cluster has published %d events of home %d", last, home+1)
				}
				line = append(line, strconv.FormatUint(last, 10))
			}
			t.Logf("%v: home %d: %d written, %v published", time.Since(begun).Round(time.Second), home+1,
				written[home].Load(), line)
		}
		return n
	}
	writing := make(chan error, 1)
	go func() { writing <- g.Wait() }()
	for done := false; !done; {
		select {
		case err := <-writing:
			harness.Must(t, err)
			done = true
		case <-time.After(30 * time.Second):
			published()
		}
	}
	t.Logf("%.0f events/s written", float64(each)*float64(len(all))/time.Since(begun).Seconds())
	harness.Eventually(t, "all events are published", func() error {
		if n := published(); n < each*int64(len(all)) {
			return fmt.Errorf("%d of %d", n, each*int64(len(all)))
		}
		return nil
	})
	for home, of := range streams {
		times := make([]uint8, each)
		twice, missing := 0, 0
		for _, s := range of {
			harness.Must(t, oracle.Read(t.Context(), s.js, s.name, func(m *oracle.Message) error {
				n, err := strconv.ParseInt(m.Outflow.ID[24:], 16, 64)
				if err != nil || n >= each || m.Outflow.ID != numbered(home, n) {
					return errors.New("nobody has written event " + m.Outflow.ID)
				}
				times[n] = min(times[n]+1, 2)
				return nil
			}))
		}
		for _, n := range times {
			switch n {
			case 0:
				missing++
			case 2:
				twice++
			}
		}
		t.Logf("home %d: %d events, %d missing, %d twice", home+1, each, missing, twice)
		if missing > 0 || twice > 0 {
			t.Errorf("home %d: %d events missing, %d twice", home+1, missing, twice)
		}
	}
}
