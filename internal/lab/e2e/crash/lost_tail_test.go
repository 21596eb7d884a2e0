package crash

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// startTwins starts both. Settings are of both.
func startTwins(t *testing.T, pg *pgserver.Server, twinNATS, name string, settings ...string) *harness.Twins {
	t.Helper()
	s := &harness.Twins{T: t, NATS: natstest.Process(t)}
	s.Instance, s.Conn, s.URL = harness.Install(t, pg, s.NATS.URL(), name, settings...)
	s.Twin = harness.New(t, s.URL, twinNATS, harness.SlotName(name+"_twin"), settings...)
	s.Twin.UseStream(strings.ToUpper(s.Twin.Slot))
	s.JS, s.TwinJS = harness.JetStream(t, s.NATS.URL()), harness.JetStream(t, twinNATS)
	for _, o := range []*harness.Outflow{s.Instance, s.Twin} {
		o.Init()
		o.Start()
	}
	return s
}

// on makes t the test that what follows belongs to.
func on(s *harness.Twins, t *testing.T) { s.T, s.Instance.T, s.Twin.T = t, t, t }

// recorded waits until the checkpoint record has had n revisions: init makes two, and a session one each
// max(1 s, durable_after/32).
func recorded(s *harness.Twins, n uint64) {
	s.T.Helper()
	harness.AwaitMessages(s.T, s.JS, "KV_"+checkpoint.Bucket(s.Instance.Stream), int(n))
}

// crash ends NATS and outflow and tears what loses says, as a crash of their machine does. It returns what
// was torn of the stream. (NATS is stopped, not killed: the consumers' states, which it writes a moment late,
// are not what is to be lost.)
func crash(s *harness.Twins, stream, bucket *harness.Loss) natsserver.Torn {
	s.T.Helper()
	s.Instance.Kill()
	harness.Must(s.T, s.NATS.Stop())
	torn := stream.Tear(s.T, s.NATS.Dir(), s.Instance.Stream)
	bucket.Tear(s.T, s.NATS.Dir(), "KV_"+checkpoint.Bucket(s.Instance.Stream))
	return torn
}

func part(form natsserver.Form, lost float64) *harness.Loss {
	return &harness.Loss{Form: form, Keep: func(last uint64) uint64 {
		return uint64(float64(last) * (1 - lost))
	}}
}

func allBut(form natsserver.Form, n uint64) *harness.Loss {
	return &harness.Loss{Form: form, Keep: func(uint64) uint64 { return n }}
}

// change writes other ordering settings into the WAL for both, at one place, while neither runs.
func change(s *harness.Twins, to relay.Settings) {
	s.T.Helper()
	if code := s.Twin.Stop(); code != 0 {
		s.T.Fatalf("stop of the twin: exit code %d", code)
	}
	harness.Exec(s.T, s.Conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', $1), "+
		"pg_logical_emit_message(true, 'outflow.settings', $2)",
		to.Content(s.Instance.Slot), to.Content(s.Twin.Slot))
	for _, o := range []*harness.Outflow{s.Instance, s.Twin} {
		o.Set("REORDER_HORIZON="+to.Horizon.String(), "REORDER_SORT="+to.Sort.String())
	}
	s.Twin.Start()
}

// consume makes a durable consumer and lets it read everything that is there.
func consume(s *harness.Twins, durable string) {
	s.T.Helper()
	st, err := s.JS.Stream(s.T.Context(), s.Instance.Stream)
	harness.Must(s.T, err)
	c, err := st.CreateConsumer(s.T.Context(),
		jetstream.ConsumerConfig{Durable: durable, AckPolicy: jetstream.AckAllPolicy})
	harness.Must(s.T, err)
	it, err := c.Messages()
	harness.Must(s.T, err)
	defer it.Stop()
	for last := st.CachedInfo().State.LastSeq; ; {
		m, err := it.Next(jetstream.NextMaxWait(harness.Patience))
		harness.Must(s.T, err)
		meta, err := m.Metadata()
		harness.Must(s.T, err)
		if meta.Sequence.Stream >= last {
			harness.Must(s.T, m.DoubleAck(s.T.Context()))
			return
		}
	}
}

// tail is a case of TestALostTailComesAgainInTheSameOrder.
type tail struct {
	name           string
	stream, bucket *harness.Loss
	horizon        string
	change         *relay.Settings // written while outflow is down
	initAgain      bool            // the record with the first checkpoint is lost
}

const back, hole = natsserver.Back, natsserver.Hole

var tails = []tail{
	{name: "stream back", stream: part(back, 0.4), horizon: "20ms"},
	{name: "stream back with a horizon of 0 and a change of settings", stream: part(back, 0.7), horizon: "0s",
		change: &relay.Settings{Horizon: 30 * time.Millisecond, Sort: outbox.ByCommit}},
	{name: "stream hole", stream: part(hole, 0.4), horizon: "0s"},
	{name: "stream hole with a change of settings", stream: part(hole, 0.7), horizon: "20ms",
		change: &relay.Settings{}},
	{name: "whole stream", stream: allBut(back, 0), horizon: "20ms"},
	{name: "bucket back", bucket: harness.LoseNewest(back, 2), horizon: "20ms"},
	{name: "bucket hole", bucket: harness.LoseNewest(hole, 2), horizon: "0s"},
	{name: "bucket back to before the first checkpoint", bucket: allBut(back, 1), horizon: "20ms",
		initAgain: true},
	{name: "both back", stream: part(back, 0.5), bucket: harness.LoseNewest(back, 2), horizon: "20ms",
		change: &relay.Settings{Horizon: 5 * time.Millisecond, Sort: outbox.ByCommit}},
	{name: "both hole", stream: part(hole, 0.5), bucket: harness.LoseNewest(hole, 2), horizon: "20ms"},
	{name: "stream hole, bucket back", stream: part(hole, 0.3), bucket: harness.LoseNewest(back, 2),
		horizon: "0s", change: &relay.Settings{Horizon: 50 * time.Millisecond}},
}

// TestALostTailComesAgainInTheSameOrder is claim C8: the machine of NATS and outflow crashes, and what NATS
// had not synced is gone: of the stream, of the checkpoint record, or of both. It comes again from the WAL,
// in the same order. Cases run at the same time: a loss counts only when a recheck, 5 s later, agrees.
func TestALostTailComesAgainInTheSameOrder(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	pg, twinNATS, tails := pgtest.Server(t), natstest.Server(t).URL(), harness.Part(2, tails)
	ops := harness.EnvInt(t, "OUTFLOW_TEST_OPS", 600)
	all, loads := make([]*harness.Twins, len(tails)), make([]*harness.Load, len(tails))
	harness.AtOnce(t, len(tails), func(i int) {
		all[i] = startTwins(t, pg, twinNATS, "tail", "REORDER_HORIZON="+tails[i].horizon,
			"SINK_DURABLE_AFTER=80s")
		loads[i] = harness.StartLoad(t, all[i].URL, harness.RecordedOps(t, ops), 4, 75, 3)
		lose(all[i], &tails[i], ops/2)
	})
	for i, c := range tails {
		t.Run(c.name, func(t *testing.T) {
			s := all[i]
			on(s, t)
			loads[i].Wait(t)
			s.MustBeEqual(ops)
			explained(s, c.stream != nil && c.stream.Form == hole)
			if c.shows() {
				s.Instance.MustContain("the log", s.Instance.Log.String(), "a loss was read",
					"consumers=[reader]", "published again")
			}
			s.Instance.MustStop(t)
			if strings.Contains(s.Instance.Log.String(), "wrote a change") {
				t.Error("outflow wrote a change of settings of its own: the comparison says nothing then")
			}
		})
	}
}

// explained holds that a hole in the stream is explained by the message behind it, and no other message says
// that anything was lost.
func explained(s *harness.Twins, holed bool) {
	s.T.Helper()
	last, holes := uint64(0), 0
	for _, m := range harness.Messages(s.T, s.JS, s.Instance.Stream) {
		want := ""
		if m.Seq > last+1 {
			want = fmt.Sprint(last + 1)
			holes++
		}
		if got := m.Header.Get(outbox.HeaderLost); got != want {
			s.T.Errorf("message %d behind %d says that messages were lost from %q, want %q", m.Seq, last, got,
				want)
		}
		last = m.Seq
	}
	if holed != (holes > 0) {
		s.T.Errorf("%d holes in the stream", holes)
	}
}

// shows tells whether the record says that something is missing.
func (c *tail) shows() bool { return c.stream != nil && c.bucket == nil }

// shown freezes outflow at a moment when its newest record knows messages that are to be lost, if that is
// what shows the loss. It is frozen for a moment only each time, and runs while it is looked at: where
// commands are slow it would come to nothing otherwise.
func shown(s *harness.Twins, c *tail) {
	s.T.Helper()
	harness.Eventually(s.T, c.name+": the record knows what is lost", func() error {
		cp := s.Instance.Status().Checkpoint
		harness.Must(s.T, s.Instance.Process.Pause())
		st, err := s.JS.Stream(s.T.Context(), s.Instance.Stream)
		harness.Must(s.T, err)
		if c.stream != nil && cp.Seq <= c.stream.Keep(st.CachedInfo().State.LastSeq) {
			harness.Must(s.T, s.Instance.Process.Resume())
			return fmt.Errorf("checkpoint %v of %d messages", cp, st.CachedInfo().State.LastSeq)
		}
		return nil
	})
}

// lose lets the crash come once n messages are there, and starts everything again.
func lose(s *harness.Twins, c *tail, n int) {
	s.T.Helper()
	s.AwaitStored(n)
	recorded(s, 4)
	shown(s, c)
	s.Instance.Kill()
	consume(s, "reader") // everything that there is
	crash(s, c.stream, c.bucket)
	if c.change != nil {
		set := *c.change
		set.MaxEvents, set.MaxBytes = relay.DefaultMaxEvents, relay.DefaultMaxBytes
		change(s, set)
	}
	harness.Must(s.T, s.NATS.Start())
	if c.shows() {
		// not before it could list them
		harness.Eventually(s.T, c.name+": outflow status names loss and consumers", func() error {
			if r := s.Instance.Status(); r.Stream.Loss == "" ||
				!slices.Equal(r.Stream.Affected, []string{"reader"}) {
				return fmt.Errorf("loss %q, durable consumers %q", r.Stream.Loss, r.Stream.Affected)
			}
			return nil
		})
	}
	if c.initAgain {
		s.Instance.MustFail(3, []string{"run"}, "outflow init")
		s.Instance.Init()
	}
	s.Instance.Start()
}
