package clusters

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// islands are clusters that share nothing: each has a NATS of its own, and each but the first an outflow for
// the first one's rows.
type islands struct {
	*testing.T
	nats   []string // by cluster.id - 1, as the following
	js     []jetstream.JetStream
	all    []*cluster
	stream []string // where each cluster has the first one's events
	others []*harness.Outflow
	read   map[int][]*oracle.Message // of that, as it was read last
}

// newIslands makes them without the mode.
func newIslands(t *testing.T, major, n int) *islands {
	t.Helper()
	s := &islands{T: t, read: map[int][]*oracle.Message{}}
	for range n {
		url := natstest.Server(t).URL()
		s.nats, s.js = append(s.nats, url), append(s.js, harness.JetStream(t, url))
	}
	s.all, _ = meshOn(t, major, s.nats)
	s.stream = []string{s.all[0].o.Stream}
	for at := 1; at < n; at++ {
		o := harness.New(t, s.all[at].url, s.nats[at], "of_1", clusterSettings(at, n)...)
		o.UseStream("OF_1")
		o.Set("CLUSTER_SUBSCRIPTION=from_1")
		s.others, s.stream = append(s.others, o), append(s.stream, o.Stream)
	}
	return s
}

// mode are the settings that switch it on at a cluster.
func (s *islands) mode(at int) []string {
	var subscriptions []string
	for k := range s.all {
		if k != at {
			subscriptions = append(subscriptions, fmt.Sprintf("%d=from_%d", k+1, k+1))
		}
	}
	return []string{"CLUSTER_MODE=islands", "CLUSTER_MAXIMUM_DELAY=5s",
		"CLUSTER_SUBSCRIPTIONS=" + strings.Join(subscriptions, ",")}
}

// switchOn switches it on for all outflows, and starts them.
func (s *islands) switchOn() {
	s.Helper()
	home := s.all[0].o
	home.Set(s.mode(0)...)
	home.Init()
	for i, o := range s.others {
		harness.Must(s, oracle.CreateSlot(s.Context(), s.all[i+1].conn, "said"))
		o.Set(s.mode(i + 1)...)
		o.Init()
		o.Start()
	}
	home.Start()
}

// last is the sequence of the newest message in the stream of a cluster.
func (s *islands) last(at int) uint64 {
	s.Helper()
	stream, err := s.js[at].Stream(s.Context(), s.stream[at])
	harness.Must(s, err)
	return stream.CachedInfo().State.LastSeq
}

// messages are those of the first cluster's events that a cluster has published.
func (s *islands) messages(at int) []*oracle.Message {
	s.Helper()
	if all := s.read[at]; len(all) == 0 || all[len(all)-1].Seq != s.last(at) {
		s.read[at] = harness.Messages(s, s.js[at], s.stream[at])
	}
	return s.read[at]
}

// missing counts the rows of a cluster's table that are the first one's and in no stream.
func (s *islands) missing(at int) error {
	s.Helper()
	published := map[string]bool{}
	for k := range s.all {
		for _, m := range s.messages(k) {
			published[m.Outflow.ID] = true
		}
	}
	rows, err := harness.Connect(s, s.all[at].url).Query(s.Context(), "SELECT id::text FROM outbox")
	if err != nil {
		return err
	}
	defer rows.Close()
	n := 0
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return err
		}
		if !published[id] {
			n++
		}
	}
	if n > 0 {
		return fmt.Errorf("%d rows are in no stream", n)
	}
	return rows.Err()
}

// claimedBy are the ranges of the first cluster's commits that a cluster has claimed, without what was said
// to be published before: from its own WAL.
func (s *islands) claimedBy(at int) (ranges []relay.Claimed) {
	s.Helper()
	content := regexp.MustCompile(`prefix\[text\]:'` + regexp.QuoteMeta(relay.ClusterPrefix) +
		`' content\[text\]:'([^']*)'`)
	rows, err := s.all[at].conn.Query(s.Context(),
		"SELECT data FROM pg_logical_slot_peek_changes('said', NULL, NULL) WHERE data LIKE '%: INSERT: %'")
	harness.Must(s, err)
	defer rows.Close()
	var said outbox.LSN
	for rows.Next() {
		var line string
		harness.Must(s, rows.Scan(&line))
		found := content.FindStringSubmatch(line)
		if found == nil {
			continue
		}
		row, err := relay.ParseClusterRow(found[1])
		harness.Must(s, err)
		switch {
		case row.By == 1 && row.Kind == relay.Published:
			said = max(said, row.To)
		case row.By == at+1 && row.Home == 1 && row.Kind == relay.Claim:
			ranges = append(ranges, relay.Claimed{From: max(row.From, said), To: row.To})
		}
	}
	harness.Must(s, rows.Err())
	return ranges
}

// mustLoseNothing judges all streams together, when all is published. before says how far the home's stream
// was at each kill: what is twice was published by then, and not said.
func (s *islands) mustLoseNothing(before []uint64) {
	s.Helper()
	harness.Eventually(s, "all of the home's events", func() error { return s.missing(0) })
	last := before[len(before)-1]
	home, twice, elsewhere := map[string]*oracle.Message{}, 0, map[string]int{}
	for at := range s.all {
		var ranges []relay.Claimed
		if at > 0 {
			ranges = s.claimedBy(at)
		}
		for _, m := range s.messages(at) {
			if from, err := outbox.HomeOf(m.Header); err != nil || from != 1 {
				s.Fatalf("cluster %d, message %d: home %d, %v", at+1, m.Seq, from, err)
			}
			id := m.Outflow.ID
			if at == 0 {
				if home[id] != nil {
					s.Errorf("event %s is twice in the home's stream", id)
				}
				home[id] = m
				continue
			}
			if by := elsewhere[id]; by != 0 {
				s.Errorf("clusters %d and %d have published event %s", by, at+1, id)
			}
			elsewhere[id] = at + 1
			covered := false
			for _, r := range ranges {
				covered = covered || r.Covers(outbox.LSN(m.Outflow.Pos.LSN))
			}
			if !covered {
				s.Errorf("cluster %d has published event %s at %v, which it has not claimed: %v", at+1, id,
					m.Outflow.Pos.LSN, ranges)
			}
			if h := home[id]; h != nil {
				if twice++; h.Seq > last || h.Header.Get("Nats-Msg-Id") != m.Header.Get("Nats-Msg-Id") {
					s.Errorf("event %s is message %d of the home, which had %d when it was killed last", id,
						h.Seq, last)
				}
			}
		}
	}
	s.Logf("%d events: %d published by others, %d of them twice", len(home)+len(elsewhere)-twice,
		len(elsewhere), twice)
	if len(elsewhere) == 0 {
		s.Error("nobody has published for the home")
	}
}

// TestAnotherClusterPublishesForASilentHome: whenever the home, or its outflow alone, is killed, another
// cluster publishes its rows into a stream of its own, and the home goes on with what nobody has claimed when
// it is back. Nothing is missing; nothing is twice but what the home had published and not said.
func TestAnotherClusterPublishesForASilentHome(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", rand.Int()))
	t.Logf("OUTFLOW_TEST_SEED=%d", seed)
	for _, major := range awayMajors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			s := newIslands(t, major, 3)
			home := s.all[0]
			s.switchOn()
			home.o.AwaitReady()
			rounds := harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", harness.Sized(40, 2))
			load := harness.StartEndlessLoad(t, home.url, harness.RecordedOps(t, 1000), 4, 60, seed)
			var before []uint64
			for round := range rounds {
				begin := load.Written.Load()
				harness.Eventually(t, "the load goes on", func() error {
					if n := load.Written.Load() - begin; n < 60 {
						return fmt.Errorf("%d written", n)
					}
					return nil
				})
				others := s.last(1) + s.last(2)
				home.o.Kill()
				server := round%2 == 0
				if server {
					harness.Must(t, home.pg.Kill())
				}
				before = append(before, s.last(0))
				begun := time.Now()
				if server {
					harness.Eventually(t, "others publish what was replicated", func() error {
						return errors.Join(s.missing(1), s.missing(2))
					})
				} else {
					harness.Eventually(t, "others publish", func() error {
						if s.last(1)+s.last(2) == others {
							return errors.New("nothing")
						}
						return nil
					})
				}
				t.Logf("round %d: %d messages of others after %v", round,
					s.last(1)+s.last(2)-others, time.Since(begun).Round(time.Millisecond))
				if server {
					harness.Must(t, home.pg.Start(t.Context()))
				}
				home.o.Start()
				harness.Eventually(t, "the home publishes again", func() error {
					if s.last(0) == before[round] {
						return errors.New("nothing")
					}
					return nil
				})
			}
			load.Ending.Store(true)
			load.Wait(t)
			s.mustLoseNothing(before)
		})
	}
}

// TestTheIslandsModeIsSwitchedOn: a stream whose home made it without the mode takes it up when all is
// published, and is refused without it from then on; a reader's stream begins anew. While the home lives,
// nobody publishes for it.
func TestTheIslandsModeIsSwitchedOn(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	majors := awayMajors(t)
	s := newIslands(t, majors[len(majors)-1], 2)
	home, away := s.all[0].o, s.others[0]
	harness.Insert(t, s.all[0].conn, "a", 1, "{}")
	alone := home.Env
	home.Set(s.mode(0)...)
	islands := home.Env
	home.MustFail(3, []string{"run"}, "mapping_changed")
	home.MustFail(3, []string{"init"}, "not_published", "outflow drain")
	home.Env = alone
	home.Drain()
	home.Env = islands
	home.Set("CLUSTER_SUBSCRIPTIONS=2=nobody")
	home.MustFail(3, []string{"init"}, `no subscription "nobody"`)
	home.Env = islands
	home.Init()
	home.Init()
	home.Env = alone
	home.MustFail(3, []string{"init"}, "cluster_mode", "outflow uninstall")
	home.MustFail(3, []string{"drain"}, "mapping_changed")
	home.Env = islands
	home.MustFail(3, []string{"init", "--snapshot"}, "cluster_mode")

	away.Init()
	away.Set(s.mode(1)...)
	away.MustFail(3, []string{"init"}, "cluster_mode", "outflow uninstall")
	away.MustRun("uninstall", "--with-stream", "--yes")
	away.Init()
	away.Start()
	away.AwaitReady()
	home.Start()
	harness.Insert(t, s.all[0].conn, "a", 2, "{}")
	harness.AwaitMessages(t, s.js[0], home.Stream, 2)
	for i, m := range s.messages(0) {
		if got := m.Header.Get(outbox.HeaderOrigin); got != []string{"", "1"}[i] {
			t.Errorf("message %d is of home %q", m.Seq, got)
		}
	}
	if said := home.MustRun("status"); !strings.Contains(said, "hello") {
		t.Errorf("status says\n%s", said)
	}
	if n := s.last(1); n > 0 {
		t.Errorf("cluster 2 has published %d messages for a home that lives", n)
	}
	home.Env = alone
	home.MustStop(t)
	home.MustFail(3, []string{"run"}, "cluster_mode", "Set cluster.mode to islands")
}
