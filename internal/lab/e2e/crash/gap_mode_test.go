package crash

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// gapLoad writes a recording whose counters take spans, through connections that stall before they commit.
type gapLoad struct {
	ops   []recording.Op
	stall time.Duration // the longest
	never int           // one transaction in so many is rolled back for good; 0: none
	rate  int           // rows per second, about; 0: as fast as it goes
	over  chan struct{} // closed: no further transaction is begun
	group *errgroup.Group
	kept  []int // rows by connection
}

func startGapLoad(t *testing.T, url string, l *gapLoad, seed uint64) {
	t.Helper()
	const connections, atOnce = 16, 5
	var ctx context.Context
	l.group, ctx = errgroup.WithContext(t.Context())
	from := make(chan int)
	l.over = make(chan struct{})
	l.group.Go(func() error {
		defer close(from)
		for n := 0; n < len(l.ops); n += atOnce {
			if l.rate > 0 {
				time.Sleep(atOnce * time.Second / time.Duration(l.rate)) // the pace of the load
			}
			select {
			case from <- n:
			case <-l.over:
				return nil
			case <-ctx.Done():
				return nil
			}
		}
		return nil
	})
	l.kept = make([]int, connections)
	for c := range connections {
		rnd := rand.New(rand.NewPCG(seed, uint64(c)))
		l.group.Go(func() error {
			conn, err := pgx.Connect(ctx, url)
			if err != nil {
				return err
			}
			defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // every commit was answered
			for n := range from {
				ops := l.ops[n:min(n+atOnce, len(l.ops))]
				batch := &pgx.Batch{}
				batch.Queue("BEGIN")
				for i := range ops {
					first, span := spanned(ops[i].Counter)
					batch.Queue("INSERT INTO outbox (doc_id, actor_id, counter, span, payload) VALUES ($1, "+
						"$2, $3, "+
						"$4, $5)", ops[i].Doc, ops[i].Actor, first, span, string(ops[i].Payload))
				}
				if rnd.IntN(50) == 0 {
					batch.Queue("SELECT pg_sleep($1)", l.stall.Seconds()*rnd.Float64())
				}
				if l.never > 0 && rnd.IntN(l.never) == 0 {
					batch.Queue("ROLLBACK")
				} else {
					batch.Queue("COMMIT")
					l.kept[c] += len(ops)
				}
				if err := conn.SendBatch(ctx, batch).Close(); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// wait waits for the end of the writing and returns the number of rows.
func (l *gapLoad) wait(t *testing.T) (rows int) {
	t.Helper()
	harness.Must(t, l.group.Wait())
	for _, n := range l.kept {
		rows += n
	}
	return rows
}

// spanned makes counters that take 2, 3 and 1 in turn of those that take 1.
func spanned(counter int64) (first, span int64) {
	round, at := (counter-1)/3, (counter-1)%3
	return 1 + 6*round + []int64{0, 2, 5}[at], []int64{2, 3, 1}[at]
}

// gapTwins are two outflows of one table in gap mode, and the WAL that both are judged by.
type gapTwins struct {
	*harness.Twins
	twinNATS *natstest.ServerProcess
	reader   *oracle.Reader
}

func newGapTwins(t *testing.T, settings ...string) *gapTwins {
	t.Helper()
	url, err := pgtest.Own(t, 0).CreateDatabase(t.Context(), "traces")
	harness.Must(t, err)
	s := &gapTwins{Twins: &harness.Twins{T: t, URL: url, Conn: harness.Connect(t, url),
		NATS: natstest.Process(t)},
		twinNATS: natstest.Process(t)}
	s.Instance = harness.New(t, url, s.NATS.URL(), "victim", settings...)
	s.Twin = harness.New(t, url, s.twinNATS.URL(), "twin", settings...)
	s.JS, s.TwinJS = harness.JetStream(t, s.NATS.URL()), harness.JetStream(t, s.twinNATS.URL())
	harness.New(t, url, s.NATS.URL(), "first", "STREAM=FIRST").Init() // makes the table
	harness.Exec(t, s.Conn, "ALTER TABLE outbox ADD COLUMN span int")
	for _, o := range s.both() {
		o.Set("COLUMNS_SPAN=span")
		o.Init()
	}
	columns := oracle.DefaultColumns
	columns.Span = "span"
	s.reader = oracle.NewReader(oracle.Source{Slot: "judge", Columns: columns})
	harness.Must(t, oracle.CreateSlot(t.Context(), s.Conn, "judge"))
	for _, o := range s.both() {
		o.Start()
	}
	return s
}

func (s *gapTwins) both() []*harness.Outflow { return []*harness.Outflow{s.Instance, s.Twin} }

// mustAgree compares both streams with what the WAL makes, and with each other, and returns what is in them.
func (s *gapTwins) mustAgree(rows int, set oracle.Settings) []*oracle.Message {
	s.T.Helper()
	s.AwaitStored(rows)
	harness.AwaitMessages(s.T, s.TwinJS, s.Twin.Stream, rows)
	ctx := s.T.Context()
	harness.Must(s.T, s.reader.Read(ctx, s.Conn))
	v, err := oracle.Judge(ctx, s.JS, s.Instance.Stream, s.reader.Truth(),
		oracle.Config{Slot: s.Instance.Slot, Settings: set})
	harness.Must(s.T, err)
	if s.T.Log(v.String()); !v.OK() || v.Published != rows {
		s.T.Errorf("stream and WAL differ: %s", v.String())
	}
	all := harness.Messages(s.T, s.JS, s.Instance.Stream)
	harness.SameMessages(s.T, all, harness.Messages(s.T, s.TwinJS, s.Twin.Stream))
	return all
}

// TestGapModeIsExactThroughKills: sixteen writers stall before they commit, and outflow is killed again and
// again: nothing is late as long as no counter is missing for longer than the bound, and the stream is its
// twin's.
func TestGapModeIsExactThroughKills(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ops := harness.RecordedOps(t, harness.EnvInt(t, "OUTFLOW_TEST_OPS", harness.Sized(12_000, 3_000)))
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	t.Logf("seed %d", seed)
	// A sequence that is not known yet waits for as long: its first counters come out of order as well.
	s := newGapTwins(t, "REORDER_MODE=gap", "REORDER_BOUND=10m", "REORDER_COLD=10m")
	l := &gapLoad{ops: ops, stall: time.Duration(harness.Sized(5000, 500)) * time.Millisecond}
	startGapLoad(t, s.URL, l, seed)
	rnd := rand.New(rand.NewPCG(seed, 99))
	for range harness.Sized(10, 3) {
		time.Sleep(time.Duration(rnd.Int64N(int64(600 * time.Millisecond)))) // when it is killed is random
		s.Instance.Kill()
		s.Instance.Start()
	}
	set := oracle.DefaultSettings
	set.Horizon, set.Sort, set.Gap = 0, oracle.ByGap, oracle.DefaultGap
	set.Gap.Bound, set.Gap.Cold = 10*time.Minute, 10*time.Minute
	next, jumped := map[uint64]int64{}, false
	for _, m := range s.mustAgree(l.wait(t), set) {
		h := &m.Outflow
		if h.Late {
			t.Fatalf("message %d is late: %v", m.Seq, h)
		}
		if h.Counter != 1+next[h.Sequence] {
			t.Fatalf("message %d: counter %d of a sequence that has come to %d", m.Seq, h.Counter,
				next[h.Sequence])
		}
		next[h.Sequence] = h.Counter + h.Span - 1
		jumped = jumped || h.Due > h.Pos.LSN
	}
	if !jumped {
		t.Error("nothing had to wait: the load is not what this is about")
	}
}

// TestSwitchingModesUnderLoadLeavesEqualStreams: settings of either mode follow each other while counters are
// missing for good, and one outflow is killed on the way: what is held at a change leaves at the same place
// in both streams.
func TestSwitchingModesUnderLoadLeavesEqualStreams(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	t.Logf("seed %d", seed)
	s := newGapTwins(t)
	l := &gapLoad{ops: harness.RecordedOps(t, 80_000), stall: 300 * time.Millisecond, never: 40, rate: 800}
	startGapLoad(t, s.URL, l, seed)
	s.AwaitStored(100)
	const limits = " max_events=65536 max_bytes=67108864"
	for _, set := range []struct{ content, env string }{
		{"v=2 slot=%s mode=gap bound=1h0m0s cold=0s memory=16384 first_counter=1 gap_scope=sequence" + limits,
			"MODE=gap BOUND=1h COLD=0s"},
		{"v=2 slot=%s mode=gap bound=200ms cold=20ms memory=16 first_counter=1 gap_scope=document" + limits,
			"MODE=gap BOUND=200ms COLD=20ms MEMORY=16 GAP_SCOPE=document"},
		{"v=1 slot=%s horizon=50ms sort=commit" + limits, "MODE=horizon HORIZON=50ms SORT=commit"},
		{"v=2 slot=%s mode=gap bound=300ms cold=0s memory=4 first_counter=1 gap_scope=sequence" + limits,
			"MODE=gap BOUND=300ms COLD=0s MEMORY=4 GAP_SCOPE=sequence"},
	} {
		s.Instance.Kill()
		s.Instance.Start()
		s.Instance.Kill() // one in disorder, one in order
		s.Twin.MustStop(t)
		harness.Exec(t, s.Conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', $1), "+
			"pg_logical_emit_message(true, 'outflow.settings', $2)",
			fmt.Sprintf(set.content, "victim"), fmt.Sprintf(set.content, "twin"))
		for _, o := range s.both() {
			for _, field := range strings.Fields(set.env) {
				o.Set("REORDER_" + field)
			}
			o.Start()
		}
		s.Instance.AwaitReady()
		s.Twin.AwaitReady()
	}
	close(l.over)
	sorts, late := map[oracle.Sort]int{}, 0
	for _, m := range s.mustAgree(l.wait(t), oracle.DefaultSettings) {
		if sorts[m.Outflow.Sort]++; m.Outflow.Late {
			late++
		}
	}
	t.Logf("messages by the rule of their window: %v; late: %d", sorts, late)
	for _, o := range s.both() {
		if strings.Contains(o.Log.String(), "wrote a change") {
			t.Errorf("%s wrote a change of its own: the comparison says nothing then", o.Slot)
		}
	}
	if len(sorts) != 3 {
		t.Errorf("messages by sort rule: %v, want all", sorts)
	}
}
