package clusters

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// islands are clusters that share nothing: each has a NATS of its own. The first ones are homes, which have
// an outflow at each of the others as well.
type islands struct {
	*testing.T
	nats  []*natstest.ServerProcess // by cluster.id - 1, as all that is of a home or at a cluster
	js    []jetstream.JetStream
	all   []*cluster
	links map[link]*faultproxy.Proxy
	of    [][]*harness.Outflow         // of each home, at each cluster
	read  map[[2]int][]*oracle.Message // of each home, at each cluster: its stream, as it was read last
	hangs []hang
	delay time.Duration // cluster.maximum_delay
}

// hang is when the NATS of a cluster hung.
type hang struct {
	at       int
	from, to time.Time
}

func (s *islands) hung(at int, when time.Time) bool {
	return slices.ContainsFunc(s.hangs, func(h hang) bool {
		return h.at == at && h.from.Before(when) && when.Before(h.to)
	})
}

// stored is when at the latest NATS has stored what was sent to it by a time: it may have hung right before.
func (s *islands) stored(at int, by time.Time) time.Time {
	for _, h := range s.hangs {
		if end := h.to.Add(maximumDelay / 2); h.at == at && h.from.Before(by) && by.Before(end) {
			return end
		}
	}
	return by
}

// newIslands makes them without the mode.
func newIslands(t *testing.T, major, n, homes int) *islands {
	t.Helper()
	s := &islands{T: t, read: map[[2]int][]*oracle.Message{}, delay: maximumDelay}
	urls := make([]string, n)
	for at := range urls {
		nats := natstest.Process(t)
		urls[at] = nats.URL()
		s.nats, s.js = append(s.nats, nats), append(s.js, harness.JetStream(t, urls[at]))
	}
	s.all, s.links = meshOn(t, major, urls)
	for home := range homes {
		var of []*harness.Outflow
		for at, c := range s.all {
			o := c.o
			if at != home {
				o = harness.New(t, c.url, urls[at], fmt.Sprint("of_", home+1), clusterSettings(at, n)...)
				o.UseStream(fmt.Sprint("OF_", home+1))
				o.Set(fmt.Sprint("CLUSTER_SUBSCRIPTION=from_", home+1))
			}
			of = append(of, o)
		}
		s.of = append(s.of, of)
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
	return []string{"CLUSTER_MODE=islands", "CLUSTER_MAXIMUM_DELAY=" + s.delay.String(),
		"CLUSTER_SUBSCRIPTIONS=" + strings.Join(subscriptions, ",")}
}

// switchOn switches it on for all outflows, and starts them.
func (s *islands) switchOn() {
	s.Helper()
	harness.AtOnce(s.T, len(s.all), func(at int) {
		harness.Must(s, oracle.CreateSlot(s.Context(), s.all[at].conn, "said"))
		for _, of := range s.of {
			of[at].Set(s.mode(at)...)
			of[at].Init()
		}
	})
	for home, of := range s.of {
		for at, o := range of {
			if at != home {
				o.Start()
			}
		}
	}
	for home, of := range s.of {
		of[home].Start()
	}
}

// load begins to write rows of a home, which its actors name.
func (s *islands) load(home, connections, rate int, seed uint64) *harness.Load {
	s.Helper()
	ops := harness.RecordedOps(s.T, 1000)
	for i := range ops {
		ops[i].Actor = fmt.Sprintf("%s@%d", ops[i].Actor, home+1)
	}
	return harness.StartEndlessLoad(s.T, s.all[home].url, ops, connections, rate, seed)
}

// last is the sequence of the newest message of a home in the stream of a cluster.
func (s *islands) last(home, at int) uint64 {
	s.Helper()
	stream, err := s.js[at].Stream(s.Context(), s.of[home][at].Stream)
	harness.Must(s, err)
	return stream.CachedInfo().State.LastSeq
}

// byOthers counts the messages of a home that other clusters have published.
func (s *islands) byOthers(home int) (n uint64) {
	s.Helper()
	for at := range s.all {
		if at != home {
			n += s.last(home, at)
		}
	}
	return n
}

// messages are those of a home that a cluster has published.
func (s *islands) messages(home, at int) []*oracle.Message {
	s.Helper()
	of := [2]int{home, at}
	if all := s.read[of]; len(all) == 0 || all[len(all)-1].Seq != s.last(home, at) {
		s.read[of] = harness.Messages(s, s.js[at], s.of[home][at].Stream)
	}
	return s.read[of]
}

// written are the ids of a home's rows that a cluster's table has.
func (s *islands) written(home, at int) (ids []string, err error) {
	conn, err := pgx.Connect(s.Context(), s.all[at].url)
	if err != nil {
		return nil, err
	}
	defer conn.Close(s.Context()) //nolint:errcheck // what it was for is done
	rows, err := conn.Query(s.Context(), "SELECT id::text FROM outbox WHERE actor_id LIKE $1",
		fmt.Sprint("%@", home+1))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// missing counts the rows of a home that a cluster's table has and no stream.
func (s *islands) missing(home, at int) error {
	s.Helper()
	ids, err := s.written(home, at)
	if err != nil {
		return err
	}
	return s.unpublished(home, ids)
}

// unpublished counts those of a home's events that are in no stream.
func (s *islands) unpublished(home int, ids []string) error {
	s.Helper()
	published := map[string]bool{}
	for at := range s.all {
		for _, m := range s.messages(home, at) {
			published[m.Outflow.ID] = true
		}
	}
	n := 0
	for _, id := range ids {
		if !published[id] {
			n++
		}
	}
	if n > 0 {
		return fmt.Errorf("%d of %d rows of home %d are in no stream", n, len(ids), home+1)
	}
	return nil
}

// saidRow is a cluster row, and when it was committed, by its writer's clock.
type saidRow struct {
	relay.ClusterRow
	at time.Time
}

// said are the cluster rows of a cluster's WAL, of all writers.
func (s *islands) said(at int) (all []saidRow) {
	s.Helper()
	conn := harness.Connect(s, s.all[at].url)
	harness.Exec(s, conn, "SET TimeZone = 'UTC'")
	rows, err := conn.Query(s.Context(), "SELECT data FROM pg_logical_slot_peek_changes('said', NULL, NULL, "+
		"'include-timestamp', 'on') WHERE data LIKE 'COMMIT%' OR data LIKE '%: INSERT: %prefix[text]:''"+
		relay.ClusterPrefix+"''%'")
	harness.Must(s, err)
	content := regexp.MustCompile(`content\[text\]:'([^']*)'`)
	commit := regexp.MustCompile(`^COMMIT \d+ \(at (.*)\)$`)
	var line string
	told := 0 // rows of whose commit the time is known
	_, err = pgx.ForEachRow(rows, []any{&line}, func() error {
		if found := content.FindStringSubmatch(line); found != nil {
			row, err := relay.ParseClusterRow(found[1])
			all = append(all, saidRow{ClusterRow: row})
			return err
		}
		found := commit.FindStringSubmatch(line)
		if found == nil {
			return fmt.Errorf("line %q", line)
		}
		time, err := time.Parse("2006-01-02 15:04:05.999999-07", found[1])
		for ; told < len(all); told++ {
			all[told].at = time
		}
		return err
	})
	harness.Must(s, err)
	return all
}

// claimed is what a cluster publishes of a home's commits by one of its claims.
type claimed struct {
	relay.Claimed
	hello uint64    // the newest one of the home that it had read
	at    time.Time // when it was committed
	twice int       // of the events, those that the home has published as well
}

// claims are those of a cluster for a home, by its own WAL: what the home had said to have published before,
// or another one had claimed, is not in them.
func claims(said []saidRow, home, at int) (all []*claimed) {
	var settled outbox.LSN
	echoed := map[int]uint64{}
	for _, r := range said {
		switch {
		case r.By == home+1 && r.Kind == relay.Published:
			settled = max(settled, r.To)
		case r.Home != home+1:
		case r.Kind == relay.Echo:
			echoed[r.By] = max(echoed[r.By], r.Hello)
		case r.Kind == relay.Claim && r.Hello >= echoed[r.By]: // else it is void
			if from := max(r.From, settled); r.By == at+1 && from < r.To {
				all = append(all, &claimed{relay.Claimed{From: from, To: r.To}, r.Hello, r.at, 0})
			}
			settled = max(settled, r.To)
		}
	}
	return all
}

// known is from when on a home leaves what a claim has. It publishes nothing from when it yields, or gives a
// sign of life after half of the delay, until all others have echoed the hello that follows, which the claim
// does not know. Where there is none: when the claim was committed.
func (s *islands) known(c *claimed, own []saidRow, home int) time.Time {
	var silent, last time.Time // since when it is; of its newest row
	for _, r := range own {
		if r.By != home+1 || r.Home != 0 {
			continue
		}
		if r.Kind == relay.Yield || r.at.Sub(last) >= maximumDelay/2 {
			silent = r.at
		}
		last = r.at
		if r.Kind != relay.Hello {
			continue
		}
		if r.Hello > c.hello {
			if silent.IsZero() || s.hung(home, silent) { // what was on its way is stored after that
				return s.stored(home, r.at)
			}
			return silent
		}
		silent = time.Time{}
	}
	return c.at
}

// together is what the streams of all clusters have of a home's events.
type together struct {
	events, elsewhere int // different ones; those that others have published
	twice             int // of those, what the home has published as well
	others            int // and what two others have
	most              int // twice for one claim
}

// judge judges all streams of a home together, when all is published. Nothing is missing. In a stream nothing
// is twice, or out of order. Others have published what they had claimed, and knew of nobody else to publish.
// What is twice the home had published before it could know of the claim.
func (s *islands) judge(home int) (all together) {
	s.Helper()
	ids, err := s.written(home, home)
	harness.Must(s, err)
	if err := s.unpublished(home, ids); err != nil {
		s.Error(err)
	}
	written := map[string]bool{}
	for _, id := range ids {
		written[id] = true
	}
	own := s.said(home)
	mine := s.checkStream(home, home, written, nil)
	by := map[string]int{}
	for at := range s.all {
		if at == home {
			continue
		}
		ranges := claims(s.said(at), home, at)
		for id, m := range s.checkStream(home, at, written, ranges) {
			all.elsewhere++
			if by[id] != 0 {
				all.others++
			}
			by[id] = at + 1
			first := mine[id]
			if first == nil {
				continue
			}
			all.twice++
			c := coveredBy(ranges, m)
			c.twice++
			all.most = max(all.most, c.twice)
			if first.Header.Get("Nats-Msg-Id") != m.Header.Get("Nats-Msg-Id") ||
				!bytes.Equal(first.Data, m.Data) {
				s.Errorf("home %d and cluster %d have published event %s as %v and %v", home+1, at+1, id,
					first.Header, m.Header)
			}
			if known := s.known(c, own, home); !first.Stored.Before(known) {
				s.Errorf("home %d has published event %s (%v) at %v, and knew at %v of the claim of "+
					"cluster %d, %+v", home+1, id, m.Outflow.Pos, first.Stored, known, at+1, *c)
			}
		}
	}
	all.events = len(ids)
	s.Logf("home %d: %+v", home+1, all)
	return all
}

func coveredBy(ranges []*claimed, m *oracle.Message) *claimed {
	for _, c := range ranges {
		if c.Covers(outbox.LSN(m.Outflow.Pos.LSN)) {
			return c
		}
	}
	return nil
}

// checkStream judges the stream of a home at one cluster by itself, and returns its messages by their event.
func (s *islands) checkStream(home, at int, written map[string]bool,
	ranges []*claimed) map[string]*oracle.Message {
	s.Helper()
	all, newest := map[string]*oracle.Message{}, map[string]*oracle.Message{}
	for _, m := range s.messages(home, at) {
		id := m.Outflow.ID
		wrong := func(format string, args ...any) {
			s.Errorf("home %d, cluster %d, message %d, event %s at %v: %s", home+1, at+1, m.Seq, id,
				m.Outflow.Pos, fmt.Sprintf(format, args...))
		}
		if of, err := outbox.HomeOf(m.Header); err != nil || of != home+1 {
			wrong("it is of home %d, %v", of, err)
		}
		if !written[id] {
			wrong("the home has no such row")
		}
		if first := all[id]; first != nil {
			wrong("it was message %d", first.Seq)
		}
		all[id] = m
		if at != home && coveredBy(ranges, m) == nil {
			wrong("not claimed")
		}
		actor, _, _ := strings.Cut(m.Outflow.Key, ":")
		of := m.Subject + " " + actor
		// One that was committed later may come behind one with a greater counter.
		if before := newest[of]; before == nil || before.Outflow.Key < m.Outflow.Key {
			newest[of] = m
		} else if before.Outflow.Pos.LSN >= m.Outflow.Pos.LSN {
			wrong("%s is behind %s", m.Outflow.Key, before.Outflow.Key)
		}
	}
	return all
}

// awaitHeard waits until all others have read that a home has published: before that they claim nothing.
func (s *islands) awaitHeard(home int) {
	s.Helper()
	harness.AwaitMessages(s.T, s.js[home], s.of[home][home].Stream, 1)
	first := outbox.LSN(s.messages(home, home)[0].Outflow.Pos.LSN)
	for at := range s.all {
		harness.Eventually(s, fmt.Sprintf("home %d is heard at cluster %d", home+1, at+1), func() error {
			said := s.said(at)
			if !slices.ContainsFunc(said, func(r saidRow) bool {
				return r.By == home+1 && r.Kind == relay.Published && r.To >= first
			}) {
				return fmt.Errorf("%d rows", len(said))
			}
			return nil
		})
	}
}

// losesWhatWasLeft gives a home's record the content that it had before the home left something to others
// last, as a broker may that crashes. Messages that were published behind that are still there.
func (s *islands) losesWhatWasLeft(home int) {
	s.Helper()
	o := s.of[home][home]
	kv, err := s.js[home].KeyValue(s.Context(), checkpoint.Bucket(o.Stream))
	harness.Must(s, err)
	all, err := kv.History(s.Context(), o.Slot)
	harness.Must(s, err)
	left := -1
	for _, e := range slices.Backward(all) {
		rec, err := checkpoint.Decode(e.Value())
		harness.Must(s, err)
		if left < 0 {
			left = len(rec.Left)
		}
		if len(rec.Left) < left {
			_, err = kv.Put(s.Context(), o.Slot, e.Value())
			harness.Must(s, err)
			return
		}
	}
	s.Fatalf("all %d revisions have %d ranges that are left to others", len(all), left)
}

// TestAnotherClusterPublishesForASilentHome: whenever the home, or its outflow alone, is killed, another
// cluster publishes its rows into a stream of its own, and the home goes on with what nobody has claimed when
// it is back, also where its record has lost what that is. Nothing is missing; nothing is twice but what the
// home had published and not said.
func TestAnotherClusterPublishesForASilentHome(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", rand.Int()))
	t.Logf("OUTFLOW_TEST_SEED=%d", seed)
	for _, major := range awayMajors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			s := newIslands(t, major, 3, 1)
			home := s.all[0]
			s.switchOn()
			home.o.AwaitReady()
			rounds := harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", harness.Sized(40, 2))
			load := s.load(0, 4, 60, seed)
			s.awaitHeard(0)
			for round := range rounds {
				begin := load.Written.Load()
				harness.Eventually(t, "the load goes on", func() error {
					if n := load.Written.Load() - begin; n < 60 {
						return fmt.Errorf("%d written", n)
					}
					return nil
				})
				others := s.byOthers(0)
				home.o.Kill()
				server := round%2 == 0
				if server {
					harness.Must(t, home.pg.Kill())
				}
				before := s.last(0, 0)
				begun := time.Now()
				if server {
					harness.Eventually(t, "others publish what was replicated", func() error {
						return errors.Join(s.missing(0, 1), s.missing(0, 2))
					})
				} else {
					harness.Eventually(t, "others publish", func() error {
						if s.byOthers(0) == others {
							return errors.New("nothing")
						}
						return nil
					})
				}
				t.Logf("round %d: %d messages of others after %v", round, s.byOthers(0)-others,
					time.Since(begun).Round(time.Millisecond))
				if server {
					harness.Must(t, home.pg.Start(t.Context()))
				}
				home.o.Start()
				harness.Eventually(t, "the home publishes again", func() error {
					if s.last(0, 0) == before {
						return errors.New("nothing")
					}
					return nil
				})
			}
			home.o.Kill()
			s.losesWhatWasLeft(0)
			there := s.last(0, 0)
			home.o.Start()
			harness.AwaitMessages(t, s.js[0], home.o.Stream, int(there)+1)
			load.Ending.Store(true)
			load.Wait(t)
			harness.Eventually(t, "all of the home's events", func() error { return s.missing(0, 0) })
			switch all := s.judge(0); {
			case all.elsewhere == 0:
				t.Error("nobody has published for the home")
			case all.others > 0:
				t.Errorf("two others have published %d events", all.others)
			}
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
	s := newIslands(t, majors[len(majors)-1], 2, 1)
	home, away := s.of[0][0], s.of[0][1]
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
	for i, m := range s.messages(0, 0) {
		if got := m.Header.Get(outbox.HeaderOrigin); got != []string{"", "1"}[i] {
			t.Errorf("message %d is of home %q", m.Seq, got)
		}
	}
	if said := home.MustRun("status"); !strings.Contains(said, "hello") {
		t.Errorf("status says\n%s", said)
	}
	if n := s.byOthers(0); n > 0 {
		t.Errorf("cluster 2 has published %d messages for a home that lives", n)
	}
	home.Env = alone
	home.MustStop(t)
	home.MustFail(3, []string{"run"}, "cluster_mode", "Set cluster.mode to islands")
}

// TestAPlannedStopPublishesNothingTwice: a reader that was made anew while the home lived publishes what
// comes after the home was stopped, and nothing else.
func TestAPlannedStopPublishesNothingTwice(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	majors := awayMajors(t)
	s := newIslands(t, majors[len(majors)-1], 2, 1)
	home, away := s.of[0][0], s.of[0][1]
	s.switchOn()
	home.AwaitReady()
	insert := func(from, to int) {
		harness.Exec(t, s.all[0].conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) "+
			"SELECT 'd', 'anna@1', n, '{}' FROM generate_series($1::int, $2::int) n", from, to)
	}
	insert(1, 1)
	s.awaitHeard(0)
	away.MustStop(t)
	away.MustRun("uninstall", "--with-stream", "--yes")
	away.Init()
	away.Start()
	away.AwaitReady()
	load := s.load(0, 2, 200, 1)
	harness.Eventually(t, "a load", func() error {
		if n := load.Written.Load(); n < 500 {
			return fmt.Errorf("%d written", n)
		}
		return nil
	})
	load.Ending.Store(true)
	load.Wait(t)
	n := harness.Value[int](t, s.all[0].conn, "SELECT count(*)::int FROM outbox")
	harness.AwaitMessages(t, s.js[0], home.Stream, n)
	before := len(s.messages(0, 1)) // none, unless this machine has stood still
	home.MustStop(t)
	const later = 5
	insert(2, 1+later)
	harness.Eventually(t, "what comes then is published", func() error {
		return errors.Join(s.missing(0, 0), s.missing(0, 1))
	})
	twice, said := len(s.messages(0, 1))-before-later, home.Log.String()
	if twice > 0 && !strings.Contains(said, "were not told") && !strings.Contains(said, "stopped before") {
		t.Errorf("%d of %d events came twice, and nothing had failed", twice, n)
	}
}
