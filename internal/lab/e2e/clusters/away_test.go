package clusters

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// cluster is one of several active databases.
type cluster struct {
	pg   *pgserver.Server
	url  string
	conn *pgx.Conn
	o    *harness.Outflow // publishes its own rows
}

// link is from where to where rows go.
type link struct{ from, to int }

// mesh makes n clusters, each of which replicates its outbox and its control table to each of the others
// through a link. Settings are further ones of all.
func mesh(t *testing.T, major, n int, natsURL string, settings ...string) (all []*cluster,
	links map[link]*faultproxy.Proxy) {
	t.Helper()
	return meshOn(t, major, slices.Repeat([]string{natsURL}, n), settings...)
}

// meshOn is mesh where each cluster has a NATS, the one at its place in the list.
func meshOn(t *testing.T, major int, natsURLs []string, settings ...string) (all []*cluster,
	links map[link]*faultproxy.Proxy) {
	t.Helper()
	n := len(natsURLs)
	for i, natsURL := range natsURLs {
		c := &cluster{pg: pgtest.Own(t, major)}
		var err error
		c.url, err = c.pg.CreateDatabase(t.Context(), "app")
		harness.Must(t, err)
		c.conn = harness.Connect(t, c.url)
		name := fmt.Sprint("home", i+1)
		c.o = harness.New(t, c.url, natsURL, name, clusterSettings(i, n)...)
		c.o.UseStream(fmt.Sprint("HOME", i+1))
		c.o.Set(settings...)
		c.o.Init()
		harness.Exec(t, c.conn, "CREATE PUBLICATION replicated FOR TABLE outbox, outflow_control")
		all = append(all, c)
	}
	links = map[link]*faultproxy.Proxy{}
	for i, to := range all {
		for k, from := range all {
			if i == k {
				continue
			}
			proxy, url, err := faultproxy.To(from.url)
			harness.Must(t, err)
			t.Cleanup(proxy.Close)
			links[link{k, i}] = proxy
			harness.Exec(t, to.conn, fmt.Sprintf("CREATE SUBSCRIPTION from_%d CONNECTION '%s' PUBLICATION "+
				"replicated WITH (origin = none, copy_data = false, slot_name = 'to_%d')", k+1, url, i+1))
		}
	}
	return all, links
}

func clusterSettings(i, n int) []string {
	return []string{fmt.Sprint("CLUSTER_ID=", i+1), fmt.Sprint("CLUSTER_COUNT=", n),
		"CLUSTER_CONTROL=outflow_control", "REORDER_HORIZON=50ms"}
}

// reader is an outflow at a cluster that publishes what another one brings.
func reader(t *testing.T, all []*cluster, at, of int, natsURL string) *harness.Outflow {
	t.Helper()
	o := harness.New(t, all[at].url, natsURL, "reader", clusterSettings(at, len(all))...)
	o.UseStream(fmt.Sprintf("READER%d", at+1))
	o.Set(fmt.Sprintf("CLUSTER_SUBSCRIPTION=from_%d", of+1))
	o.Init()
	return o
}

// awayMajors are those of the majors that are asked for on which a home's rows can be read elsewhere, from 16
// on, or else the newest one.
func awayMajors(t *testing.T) []int {
	t.Helper()
	majors := slices.DeleteFunc(pgtest.Majors(t), func(major int) bool { return major < 16 })
	if len(majors) == 0 {
		return []int{pgserver.Newest}
	}
	return majors
}

func sameBytes(t *testing.T, who string, got, want []*oracle.Message) {
	t.Helper()
	for i := range min(len(got), len(want)) {
		m, o := got[i], want[i]
		if m.Subject != o.Subject || !bytes.Equal(m.Data, o.Data) ||
			!maps.EqualFunc(m.Header, o.Header, slices.Equal) {
			t.Fatalf("%s: message %d of %d is %s %v %s, at home %s %v %s", who, i+1, len(want), m.Subject,
				m.Header, m.Data, o.Subject, o.Header, o.Data)
		}
	}
	if len(got) != len(want) {
		t.Fatalf("%s: %d messages, at home %d", who, len(got), len(want))
	}
}

// TestAHomesStreamIsMadeOfItsRowsElsewhere: three clusters that replicate to each other and all take writes.
// Outflows on the second and on the third one make the stream of the first one, byte for byte, through kills
// of the one on the second, of its server, of the home's outflow, with other settings, and of the link. The
// long form takes an hour for three majors.
func TestAHomesStreamIsMadeOfItsRowsElsewhere(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", rand.Int()))
	t.Logf("OUTFLOW_TEST_SEED=%d", seed)
	for _, major := range awayMajors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, uint64(major)))
			natsURL := natstest.Server(t).URL()
			all, links := mesh(t, major, 3, natsURL)
			home, away := all[0], all[1]
			readers := []*harness.Outflow{reader(t, all, 1, 0, natsURL), reader(t, all, 2, 0, natsURL)}
			home.o.Start()
			for _, o := range readers {
				o.Start()
			}
			rounds := harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", harness.Sized(1600, 6))
			const perRound, others = 150, 20
			load := harness.StartEndlessLoad(t, home.url, harness.RecordedOps(t, 80_000), 4, 200, seed)
			for round := range rounds {
				harness.Eventually(t, "the load goes on", func() error {
					if n := load.Written.Load(); n < int64(round*perRound) {
						return fmt.Errorf("%d written", n)
					}
					return nil
				})
				for i, c := range all[1:] { // rows of their own, which are no part of the home's stream
					conn := harness.Connect(t, c.url)
					harness.Exec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT "+
						"'of another', $1, n, '{}' FROM generate_series($2::int, $3::int) n", fmt.Sprint(i),
						round*others, (round+1)*others-1)
					harness.Must(t, conn.Close(t.Context())) // the server allows a hundred
				}
				faults := []string{"reader", "server", "link", "home", "refuse", "worker"}
				switch faults[(round+rnd.IntN(2))%len(faults)] {
				case "reader":
					readers[0].Kill()
					readers[0].Start()
				case "server":
					harness.Must(t, away.pg.Kill())
					harness.Must(t, away.pg.Start(t.Context()))
				case "link":
					links[link{0, 1}].Cut()
				case "refuse": // until the home has gone on
					links[link{0, 1}].Refuse(true)
					links[link{0, 1}].Cut()
					harness.Eventually(t, "the home goes on", func() error {
						if n := load.Written.Load(); n < int64(round*perRound+perRound/2) {
							return fmt.Errorf("%d written", n)
						}
						return nil
					})
					links[link{0, 1}].Heal()
				case "home":
					home.o.Kill()
					home.o.Set(fmt.Sprintf("REORDER_HORIZON=%dms", 20+rnd.IntN(100)),
						"REORDER_MODE="+[]string{"gap", "horizon"}[round%2])
					home.o.Start()
				case "worker":
					conn := harness.Connect(t, away.url)
					harness.Exec(t, conn, "SELECT pg_terminate_backend(pid) FROM pg_stat_subscription "+
						"WHERE pid IS NOT NULL")
					harness.Must(t, conn.Close(t.Context()))
				}
			}
			load.Ending.Store(true)
			load.Wait(t)
			js := harness.JetStream(t, natsURL)
			n := harness.Value[int](t, home.conn, "SELECT count(*)::int FROM outbox WHERE doc_id <> "+
				"'of another'")
			harness.AwaitMessages(t, js, home.o.Stream, n)
			want := harness.Messages(t, js, home.o.Stream)
			for _, o := range readers {
				harness.AwaitMessages(t, js, o.Stream, n)
				sameBytes(t, o.Stream, harness.Messages(t, js, o.Stream), want)
			}
			t.Logf("%d rounds, %d messages", rounds, n)
		})
	}
}
