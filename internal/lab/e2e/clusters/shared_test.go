package clusters

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/outbox"
)

// maximumDelay is cluster.maximum_delay, the least that there is.
const maximumDelay = 5 * time.Second

// inSharedMode are the settings that switch the take-over on.
var inSharedMode = []string{"CLUSTER_MODE=shared", fmt.Sprint("CLUSTER_MAXIMUM_DELAY=", maximumDelay),
	"SINK_DURABLE_AFTER=0s"}

// sharedHome are clusters in the shared mode, each of the others with an outflow for the first one's stream.
type sharedHome struct {
	*testing.T
	natsURL string
	records jetstream.KeyValue
	all     []*cluster
	home    *cluster
	links   map[link]*faultproxy.Proxy
	others  []*harness.Outflow
	reader  *oracle.Reader
}

func newSharedHome(t *testing.T, major, n int) *sharedHome {
	t.Helper()
	s := &sharedHome{T: t, natsURL: natstest.Server(t, natsserver.Options{SyncAlways: true}).URL()}
	s.all, s.links = mesh(t, major, n, s.natsURL, inSharedMode...)
	s.home = s.all[0]
	harness.Must(t, oracle.CreateSlot(t.Context(), s.home.conn, "judge"))
	s.reader = oracle.NewReader(oracle.Source{Slot: "judge", Control: "public.outflow_control"})
	var err error
	s.records, err = harness.JetStream(t, s.natsURL).KeyValue(t.Context(),
		checkpoint.Bucket(s.home.o.Stream))
	harness.Must(t, err)
	for at := 1; at < n; at++ {
		s.others = append(s.others, s.elsewhere(at))
	}
	return s
}

// elsewhere is an outflow at a cluster for the stream of the first one.
func (s *sharedHome) elsewhere(at int) *harness.Outflow {
	s.Helper()
	o := harness.New(s, s.all[at].url, s.natsURL, s.home.o.Slot, clusterSettings(at, len(s.all))...)
	o.UseStream(s.home.o.Stream)
	o.Set(inSharedMode...)
	o.Set("CLUSTER_SUBSCRIPTION=from_1")
	o.Init()
	return o
}

// owner is the number of the cluster that makes the stream, as an outflow that runs knows.
func owner(o *harness.Outflow) int {
	n, _ := o.Series("outflow_cluster_owner")
	return int(n)
}

// awaitOwner waits until one of the outflows is the owner by what it says, and returns which. One that is not
// the home says that it publishes for it.
func (s *sharedHome) awaitOwner(what string, of map[int]*harness.Outflow) (at int) {
	s.Helper()
	begun := time.Now()
	harness.Eventually(s, what, func() error {
		for n, o := range of {
			if owner(o) == n {
				at = n
				return nil
			}
		}
		return errors.New("nobody")
	})
	s.Logf("%s: cluster %d, after %v", what, at, time.Since(begun).Round(time.Millisecond))
	if n, said := of[at].Series("outflow_cluster_publishes"); said != (at != 1) || said && n != 1 {
		s.Errorf("cluster %d says that it publishes for the home: %v, %v", at, said, n)
	}
	return at
}

// record reads who makes the stream, and the epoch. A process knows it later, and its page costs more.
func (s *sharedHome) record() (owner, epoch int, err error) {
	entry, err := s.records.Get(s.Context(), s.home.o.Slot)
	if err != nil {
		return 0, 0, err
	}
	rec, err := checkpoint.Decode(entry.Value())
	if err != nil {
		return 0, 0, err
	}
	return rec.Owner, int(rec.Epoch), nil
}

// awaitRecorded waits until one of the clusters is the owner by the record, and returns which.
func (s *sharedHome) awaitRecorded(what string, of ...int) (by int) {
	s.Helper()
	begun := time.Now()
	harness.Eventually(s, what, func() (err error) {
		if by, _, err = s.record(); err == nil && !slices.Contains(of, by) {
			err = fmt.Errorf("cluster %d", by)
		}
		return err
	})
	s.Logf("%s: cluster %d, after %v", what, by, time.Since(begun).Round(time.Millisecond))
	return by
}

// awaitReplicated waits until all rows of the home that have come to the owner are published, while the home
// is gone: or at least until something that has not come is known to have closed the newest message.
func (s *sharedHome) awaitReplicated(at int) {
	s.Helper()
	js := harness.JetStream(s, s.natsURL)
	conn := harness.Connect(s, s.all[at-1].url)
	harness.Eventually(s, "what was replicated is published", func() error {
		rows := harness.Value[int](s, conn, "SELECT count(*)::int FROM outbox")
		come := harness.LSN(s, conn, "SELECT coalesce(pg_replication_origin_progress('pg_' || oid, false), "+
			"'0/0')::text FROM pg_subscription WHERE subname = 'from_1' AND subdbid = (SELECT oid FROM "+
			"pg_database WHERE datname = current_database())")
		all := harness.Messages(s, js, s.home.o.Stream)
		switch n := len(all); {
		case n >= rows:
			return nil
		case n > 0 && uint64(all[n-1].Outflow.Thru) > uint64(come):
			s.Logf("%d messages of %d rows: %v, which has not come, has closed the newest", n, rows,
				all[n-1].Outflow.Thru)
			return nil
		default:
			return fmt.Errorf("%d messages of %d rows", n, rows)
		}
	})
}

// awaitMore waits until something more is published.
func (s *sharedHome) awaitMore() {
	s.Helper()
	stream, err := harness.JetStream(s, s.natsURL).Stream(s.Context(), s.home.o.Stream)
	harness.Must(s, err)
	before := stream.CachedInfo().State.LastSeq
	harness.Eventually(s, "more is published", func() error {
		info, err := stream.Info(s.Context())
		if err == nil && info.State.LastSeq == before {
			err = fmt.Errorf("%d messages", before)
		}
		return err
	})
}

// mustBeTheHomes judges the stream by the home's WAL and the stream's cuts, when all is published.
func (s *sharedHome) mustBeTheHomes() (cuts int) {
	s.Helper()
	js := harness.JetStream(s, s.natsURL)
	var v oracle.Judgement
	harness.Eventually(s, "all of the home's events", func() error {
		conn, err := pgx.Connect(s.Context(), s.home.url)
		if err != nil {
			return err
		}
		defer conn.Close(s.Context()) //nolint:errcheck // what it was for is done
		if err := s.reader.Read(s.Context(), conn); err != nil {
			return err
		}
		truth := s.reader.Truth()
		at, err := oracle.Cuts(s.Context(), js, s.home.o.Stream)
		if err != nil {
			return err
		}
		v, err = oracle.Judge(s.Context(), js, s.home.o.Stream, truth, oracle.Config{Slot: s.home.o.Slot,
			Settings: oracle.Settings{Horizon: 50 * time.Millisecond, Sort: oracle.BySeqKey,
				MaxEvents: 65536, MaxBytes: 64 << 20}, Cuts: at})
		if err == nil && (v.Published-v.Cuts < v.Events || v.Held > 0) {
			err = errors.New(v.String())
		}
		return err
	})
	s.Log(v.String())
	if !v.OK() || v.Published != v.Events+v.Cuts {
		s.Errorf("stream and WAL differ: %s", v.String())
	}
	return v.Cuts
}

// stored counts the events in the home's stream, each of which must be there once.
func (s *sharedHome) stored() int {
	s.Helper()
	ids := map[string]bool{}
	for _, m := range harness.Messages(s, harness.JetStream(s, s.natsURL), s.home.o.Stream) {
		id := outbox.HeaderID(m.Header.Get(outbox.HeaderName))
		if ids[id] {
			s.Fatalf("event %s is in the stream twice", id)
		}
		ids[id] = true
	}
	return len(ids)
}

// awaitStored waits until so many are there.
func (s *sharedHome) awaitStored(n int) {
	s.Helper()
	harness.Eventually(s, "the home goes on", func() error {
		if is := s.stored(); is < n {
			return fmt.Errorf("%d events of %d", is, n)
		}
		return nil
	})
}

// faults are those of fault.
var faults = []string{"kill", "server", "database", "sleep", "stop", "cut"}

// fault makes an outflow silent: it is killed, alone or with its database's server; that server is killed;
// it stands still, and with sleep what it sent before onTheirWay returned is on its way to NATS, where it
// arrives before it goes on; its link to NATS is cut. It returns what ends that.
func (s *sharedHome) fault(kind string, o *harness.Outflow, link *faultproxy.Proxy, pg *pgserver.Server,
	onTheirWay func(),
) (end func()) {
	s.Helper()
	switch kind {
	case "kill":
		o.Kill()
		return o.Start
	case "server", "database":
		if kind == "server" {
			o.Kill()
		}
		harness.Must(s, pg.Kill())
		return func() {
			harness.Must(s, pg.Start(s.Context()))
			if kind == "server" {
				o.Start()
			}
		}
	case "sleep", "stop":
		if kind == "sleep" {
			link.Mute(faultproxy.ToServer, true)
			onTheirWay()
		}
		harness.Must(s, o.Process.Pause())
		return func() {
			link.Heal()
			harness.Must(s, o.Process.Resume())
		}
	default:
		link.Refuse(true)
		link.Cut()
		return link.Heal
	}
}

// silence is from a failure of the owner to the next one, or the home's return.
type silence struct {
	from, taken, to time.Time
	gone            bool // so is the home's database: no more rows come
}

// logTakeOvers says how long the next owner and its first message took, less the time for which an owner may
// be silent. That one has given a sign of life in the last quarter of that, so what is stored in the first
// half was on its way.
func (s *sharedHome) logTakeOvers(all []silence) {
	s.Helper()
	after := map[string][]time.Duration{}
	add := func(what string, at, from time.Time) {
		after[what] = append(after[what], at.Sub(from)-maximumDelay)
	}
	messages := harness.Messages(s, harness.JetStream(s, s.natsURL), s.home.o.Stream)
	for _, in := range all {
		add("owner", in.taken, in.from)
		early := in.from.Add(maximumDelay / 2)
		at := sort.Search(len(messages), func(i int) bool { return messages[i].Stored.After(early) })
		if at == len(messages) || messages[at].Stored.After(in.to) {
			continue
		}
		what := "message"
		if in.gone {
			what = "message of what was replicated"
		}
		add(what, messages[at].Stored, in.from)
	}
	for what, after := range after {
		slices.Sort(after)
		s.Logf("first %s behind maximum_delay: %d, median %v, maximum %v", what, len(after),
			after[len(after)/2].Round(time.Millisecond),
			after[len(after)-1].Round(time.Millisecond))
	}
}

// TestAnotherClusterTakesOverTheStream: whenever the home, its outflow or its server alone is killed, stands
// still or can't reach NATS, another cluster goes on with its stream, be its rows late or not; whoever has it
// fails as well, and a third one goes on or it comes back; the home takes it back, or is there again while it
// is being suspected. In the end the stream is what the rules make of the home's WAL and the cuts: nothing is
// missing, twice or out of order.
func TestAnotherClusterTakesOverTheStream(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", rand.Int()))
	t.Logf("OUTFLOW_TEST_SEED=%d", seed)
	for _, major := range awayMajors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, uint64(major)))
			s := newSharedHome(t, major, 3)
			all, links := map[int]*harness.Outflow{1: s.home.o}, map[int]*faultproxy.Proxy{}
			for i, o := range s.others {
				all[i+2] = o
			}
			for n, o := range all {
				proxy, url, err := faultproxy.To(s.natsURL)
				harness.Must(t, err)
				t.Cleanup(proxy.Close)
				links[n] = proxy
				o.Set("NATS_URL=" + url)
			}
			s.home.o.Start()
			s.awaitOwner("the home has the stream", map[int]*harness.Outflow{1: s.home.o})
			for _, o := range s.others {
				o.Start()
				o.AwaitState("standby")
			}
			load := harness.StartEndlessLoad(t, s.home.url, harness.RecordedOps(t, 10_000), 4, 30, seed)
			more := func(n int64) {
				t.Helper()
				n += load.Written.Load()
				harness.Eventually(t, "the load goes on", func() error {
					if is := load.Written.Load(); is < n {
						return fmt.Errorf("%d written", is)
					}
					return nil
				})
			}
			var silent []silence
			epochs := 1                    // at least
			first := rnd.IntN(len(faults)) // each has its turn
			for round := range harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", harness.Sized(60, 4)) {
				more(int64(rnd.IntN(40)))
				// half of the time one of the others does not get the rows
				late := s.links[link{0, 1 + rnd.IntN(4)}]
				if late != nil {
					late.Refuse(true)
					late.Cut()
				}
				kind := faults[(first+round)%len(faults)]
				t.Logf("round %d: the home: %s, late: %v", round, kind, late != nil)
				in := silence{from: time.Now(), gone: kind == "server" || kind == "database"}
				end := s.fault(kind, s.home.o, links[1], s.home.pg, func() { more(20) })
				if rnd.IntN(4) == 0 { // it is there again at about the time when it is suspected
					time.Sleep(maximumDelay/2 + time.Duration(rnd.Int64N(int64(maximumDelay))))
				} else {
					by := s.awaitRecorded("taken over", 2, 3)
					in.taken = time.Now()
					epochs += 2
					if late != nil && kind != "server" {
						late.Heal()
					}
					if rnd.IntN(3) == 0 { // whoever has it comes back, or another one takes it
						again := faults[rnd.IntN(len(faults))]
						t.Logf("round %d: cluster %d: %s", round, by, again)
						in.to = time.Now()
						silent = append(silent, in)
						in.from = in.to
						back := s.fault(again, all[by], links[by], s.all[by-1].pg, func() {})
						if rnd.IntN(2) == 0 {
							by = s.awaitRecorded("a third one goes on", 5-by)
							in.taken = time.Now()
							epochs++
						} else {
							time.Sleep(time.Duration(rnd.Int64N(int64(2 * time.Second))))
							in.from = time.Time{}
						}
						back()
					}
					if in.gone {
						s.awaitReplicated(by)
					} else {
						s.awaitMore()
					}
					if in.to = time.Now(); !in.from.IsZero() {
						silent = append(silent, in)
					}
				}
				end()
				if late != nil {
					late.Heal()
				}
				s.awaitRecorded("the home is back", 1)
			}
			load.Ending.Store(true)
			load.Wait(t)
			cuts := s.mustBeTheHomes()
			_, epoch, err := s.record()
			harness.Must(t, err)
			t.Logf("%d take-overs, %d cuts", epoch-1, cuts)
			s.logTakeOvers(silent)
			if epoch < epochs {
				t.Errorf("epoch %d, want %d at least", epoch, epochs)
			}
		})
	}
}
