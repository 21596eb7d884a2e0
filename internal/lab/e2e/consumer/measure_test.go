package consumer

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// TestTheFiguresOfScalingAreMeasured logs the figures of docs/scaling-consumers.md. It checks that
// everything has its effect, and that half of the takeovers after a kill take no longer than the lease, and
// half of those that are planned no longer than half a second.
func TestTheFiguresOfScalingAreMeasured(t *testing.T) {
	tier.OnlyLong(t, "it measures, and takes minutes of an idle machine")
	t.Run("throughput", func(t *testing.T) {
		m := newMeasured(t)
		all := m.recorded(40_000, 128)
		for round := range 3 {
			for _, n := range []int{1, 2, 4, 8} {
				m.throughput(fmt.Sprintf("c%d_%d", n, round), n, all)
			}
		}
	})
	// The handlers, and not PostgreSQL, need the processor: a core for each instance.
	t.Run("cores", func(t *testing.T) {
		m := newMeasured(t)
		all := m.recorded(10_000, 128)
		t.Setenv("GOMAXPROCS", "1")
		for round := range 3 {
			for n := 1; n <= runtime.NumCPU() && n <= 16; n *= 2 {
				m.throughput(fmt.Sprintf("b%d_%d", n, round), n, all, "-work", "2000")
			}
		}
	})
	for _, lease := range []time.Duration{2 * time.Second, 10 * time.Second} {
		t.Run("lease "+lease.String(), func(t *testing.T) {
			m := newMeasured(t)
			var killed, stopped, joined []time.Duration
			two := m.start("v", 2, "-lease", lease.String())
			m.settle("v")
			for range 10 {
				harness.Must(t, two[1].p.Signal(syscall.SIGTERM))
				stopped = append(stopped, m.wait("v"))
				harness.Must(t, two[1].p.Wait())
				two[1].start()
				joined = append(joined, m.wait("v"))
				m.settle("v")
				harness.Must(t, two[0].p.Kill())
				killed = append(killed, m.wait("v"))
				two[0].start()
				m.settle("v")
			}
			figure := func(what string, d []time.Duration, most time.Duration) {
				slices.Sort(d)
				median := d[len(d)/2]
				t.Logf("%s: the longest that an event waited: median %v, at most %v", what, median,
					d[len(d)-1])
				if median > most {
					t.Errorf("%s: want a median of %v at most", what, most)
				}
			}
			figure("kill -9", killed, lease)
			figure("SIGTERM", stopped, 500*time.Millisecond)
			figure("one joins", joined, 500*time.Millisecond)
			stop(t, two...)
		})
	}
}

// measured is a stream, and a database for the effects of its consumers.
type measured struct {
	t         *testing.T
	url, nats string
	o         *harness.Outflow
	conn      *pgx.Conn
	n         int // events that were written one by one
}

func newMeasured(t *testing.T) *measured {
	m := &measured{t: t, url: pgtest.Database(t, pgtest.Own(t, 0, "max_connections=400"))}
	m.nats = natstest.Process(t).URL()
	m.o = harness.New(t, m.url, m.nats, "measured", "REORDER_SORT=commit", "REORDER_HORIZON=0s")
	m.o.Init()
	m.o.Start()
	m.conn = harness.Connect(t, m.url)
	return m
}

func (m *measured) start(name string, n int, args ...string) (all []*instance) {
	for range n {
		all = append(all, newInstance(m.t, append(args, "-name", name, "-database", m.url, "-nats", m.nats,
			"-partitions", "16")...))
	}
	return all
}

// recorded has so many recorded operations in the stream, and returns how many they are. Each recorded
// document is so many of these.
func (m *measured) recorded(n, documents int) int {
	m.t.Helper()
	all := dealt(m.t, n, documents)
	harness.StartLoad(m.t, m.url, all, 8, 0, 1).Wait(m.t)
	harness.AwaitMessages(m.t, harness.JetStream(m.t, m.nats), m.o.Stream, len(all))
	return len(all)
}

// throughput starts n instances of a new consumer, and logs how long they take for all events.
func (m *measured) throughput(name string, n, events int, args ...string) {
	m.t.Helper()
	began := time.Now()
	instances := m.start(name, n, args...)
	m.await(name, events/2)
	at := m.progress(name, events)
	m.await(name, events)
	took := time.Since(began)
	m.t.Logf("%d instances: %.0f events/s; halfway the instances stood at %d to %d %% of the stream", n,
		float64(events)/took.Seconds(), at[0], at[len(at)-1])
	stop(m.t, instances...)
}

func stop(t *testing.T, all ...*instance) {
	t.Helper()
	for _, i := range all {
		harness.Must(t, i.p.Signal(syscall.SIGTERM))
		harness.Must(t, i.p.Wait())
	}
}

func (m *measured) effects(name string) (n int) {
	_ = m.conn.QueryRow(m.t.Context(), `SELECT sum(events) FROM `+name+`.state`).Scan(&n) // not there yet
	return n
}

func (m *measured) await(name string, n int) {
	m.t.Helper()
	harness.Eventually(m.t, fmt.Sprintf("%d effects of %s", n, name), func() error {
		if got := m.effects(name); got < n {
			return fmt.Errorf("%d of %d", got, n)
		}
		return nil
	})
}

// progress returns where in the stream the partitions of each instance stand on average, in per cent of its
// events, sorted.
func (m *measured) progress(name string, of int) (percent []int) {
	m.t.Helper()
	rows, err := m.conn.Query(m.t.Context(), `SELECT (avg(seq) * 100 / $1)::int FROM `+name+`.outflow_mark
		WHERE source = 'live' GROUP BY owner ORDER BY 1`, of)
	harness.Must(m.t, err)
	percent, err = pgx.CollectRows(rows, pgx.RowTo[int])
	harness.Must(m.t, err)
	return percent
}

// settle waits until both instances have half of the partitions.
func (m *measured) settle(name string) {
	m.t.Helper()
	harness.Eventually(m.t, "the partitions are shared", func() error {
		rows, err := m.conn.Query(m.t.Context(), `SELECT count(*)::int FROM `+name+`.outflow_mark m
			JOIN `+name+`.outflow_member i ON m.owner = i.instance AND m.source = 'live'
			WHERE i.expires > clock_timestamp() GROUP BY m.owner`)
		if err != nil {
			return err
		}
		counts, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err != nil || len(counts) != 2 || counts[0] != 8 || counts[1] != 8 {
			return fmt.Errorf("%v, %w", counts, err)
		}
		return nil
	})
	m.write(32)
	m.await(name, m.n)
}

// write writes an event to each of so many documents.
func (m *measured) write(documents int) {
	m.t.Helper()
	var values []string
	for d := range documents {
		m.n++
		values = append(values, fmt.Sprintf(`('doc-%d', 'ann', %d, '[[0, 0, "x"]]')`, d, m.n))
	}
	harness.Exec(m.t, m.conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES `+
		strings.Join(values, ", "))
}

// wait writes an event to each of 32 documents, again and again for a while, and returns the longest time
// until all of a round had their effect. A round goes out when the one before it is done.
func (m *measured) wait(name string) (longest time.Duration) {
	m.t.Helper()
	end := time.Now().Add(2 * time.Second)
	for time.Now().Before(end) {
		began := time.Now()
		m.write(32)
		for m.effects(name) < m.n {
			if time.Since(began) > 5*time.Minute {
				m.t.Fatal("no effects for five minutes")
			}
			time.Sleep(5 * time.Millisecond) // the pace of looking
		}
		longest = max(longest, time.Since(began).Round(time.Millisecond))
	}
	return longest
}
