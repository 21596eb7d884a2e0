package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// twins are an outflow with a NATS server of its own, and another on a slot and a server of its own that nothing happens to.
type twins struct {
	t            *testing.T
	url          string
	conn         *pgx.Conn
	nats         *natstest.ServerProcess
	victim, twin *outflow
	js, twinJS   jetstream.JetStream
}

// startTwins starts both. Settings are of both.
func startTwins(t *testing.T, pg *pgserver.Server, twinNATS, name string, settings ...string) *twins {
	t.Helper()
	s := &twins{t: t, nats: natstest.Process(t)}
	s.victim, s.conn, s.url = installation(t, pg, s.nats.URL(), name, settings...)
	s.twin = newOutflow(t, s.url, twinNATS, slotName(name+"_twin"), settings...)
	s.twin.named(strings.ToUpper(s.twin.slot))
	s.js, s.twinJS = js(t, s.nats.URL()), js(t, twinNATS)
	for _, o := range []*outflow{s.victim, s.twin} {
		o.init()
		o.start()
	}
	return s
}

// on makes t the test that what follows belongs to.
func (s *twins) on(t *testing.T) { s.t, s.victim.t, s.twin.t = t, t, t }

// stored waits until the stream has n messages, those that it lost not counted.
func (s *twins) stored(n int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("%d messages", n), func() error {
		st, err := s.js.Stream(s.t.Context(), s.victim.stream)
		if err != nil {
			return err
		}
		if got := st.CachedInfo().State.Msgs; got < uint64(n) {
			return fmt.Errorf("%d messages", got)
		}
		return nil
	})
}

// recorded waits until the checkpoint record has had n revisions: init makes two, and a session one each max(1 s, durable_after/32).
func (s *twins) recorded(n uint64) {
	s.t.Helper()
	awaitMessages(s.t, s.js, "KV_"+checkpoint.Bucket(s.victim.stream), int(n))
}

// equal compares the two streams, message by message, and the victim's with the table.
func (s *twins) equal(n int) {
	s.t.Helper()
	s.stored(n)
	awaitMessages(s.t, s.twinJS, s.twin.stream, n)
	s.victim.mustBeComplete(s.conn, s.nats.URL())
	sameMessages(s.t, messages(s.t, s.js, s.victim.stream), messages(s.t, s.twinJS, s.twin.stream))
}

// sameMessages compares subject, headers and data, in order.
func sameMessages(t *testing.T, got, want []*oracle.Message) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%d messages, the twin has %d", len(got), len(want))
	}
	for i := range min(len(got), len(want)) {
		a, b := got[i], want[i]
		if a.Subject != b.Subject || a.Header.Get(outbox.HeaderName) != b.Header.Get(outbox.HeaderName) || len(a.Header) != len(b.Header) ||
			!bytes.Equal(a.Data, b.Data) {
			t.Fatalf("message %d is\n%s %v %s\nthe twin has\n%s %v %s", i+1, a.Subject, a.Header, a.Data, b.Subject, b.Header, b.Data)
		}
	}
}

// crash ends NATS and outflow and tears what loses says, as a crash of their machine does. It returns what was torn of the stream. (NATS
// is stopped, not killed: the consumers' states, which it writes a moment late, are not what is to be lost.)
func (s *twins) crash(stream, bucket *loss) natsserver.Torn {
	s.t.Helper()
	s.victim.kill()
	must(s.t, s.nats.Stop())
	torn := stream.tear(s.t, s.nats.Dir(), s.victim.stream)
	bucket.tear(s.t, s.nats.Dir(), "KV_"+checkpoint.Bucket(s.victim.stream))
	return torn
}

// loss is the end that a stream loses, and what becomes of the last sequence.
type loss struct {
	form natsserver.Form
	keep func(last uint64) uint64
}

func part(form natsserver.Form, lost float64) *loss {
	return &loss{form, func(last uint64) uint64 { return uint64(float64(last) * (1 - lost)) }}
}

func newest(form natsserver.Form, n uint64) *loss {
	return &loss{form, func(last uint64) uint64 { return last - n }}
}

func allBut(form natsserver.Form, n uint64) *loss {
	return &loss{form, func(uint64) uint64 { return n }}
}

// tear does nothing for nil.
func (l *loss) tear(t *testing.T, dir, stream string) natsserver.Torn {
	t.Helper()
	if l == nil {
		return natsserver.Torn{}
	}
	all, err := natsserver.Tear(dir, stream, natsserver.Back, func(uint64, time.Time) bool { return true })
	must(t, err)
	keep := l.keep(all.Last)
	torn, err := natsserver.Tear(dir, stream, l.form, func(seq uint64, _ time.Time) bool { return seq <= keep })
	must(t, err)
	if torn.Messages == 0 {
		t.Fatalf("nothing of the %d messages of %s was lost", all.Last, stream)
	}
	t.Logf("%s, %v: %v", stream, l.form, torn)
	return torn
}

// change writes other ordering settings into the WAL for both, at one place, while neither runs.
func (s *twins) change(to relay.Settings) {
	s.t.Helper()
	if code := s.twin.term(); code != 0 {
		s.t.Fatalf("stop of the twin: exit code %d", code)
	}
	mustExec(s.t, s.conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', $1), pg_logical_emit_message(true, 'outflow.settings', $2)",
		to.Content(s.victim.slot), to.Content(s.twin.slot))
	for _, o := range []*outflow{s.victim, s.twin} {
		o.set("REORDER_HORIZON="+to.Horizon.String(), "REORDER_SORT="+to.Sort.String())
	}
	s.twin.start()
}

// consume makes a durable consumer and lets it read everything that is there.
func (s *twins) consume(durable string) {
	s.t.Helper()
	st, err := s.js.Stream(s.t.Context(), s.victim.stream)
	must(s.t, err)
	c, err := st.CreateConsumer(s.t.Context(), jetstream.ConsumerConfig{Durable: durable, AckPolicy: jetstream.AckAllPolicy})
	must(s.t, err)
	it, err := c.Messages()
	must(s.t, err)
	defer it.Stop()
	for last := st.CachedInfo().State.LastSeq; ; {
		m, err := it.Next(jetstream.NextMaxWait(patience))
		must(s.t, err)
		meta, err := m.Metadata()
		must(s.t, err)
		if meta.Sequence.Stream >= last {
			must(s.t, m.DoubleAck(s.t.Context()))
			return
		}
	}
}

// report is what outflow status says.
type report struct {
	Health string
	Slot   struct{ Confirmed outbox.LSN }
	Place  relay.Checkpoint
	Stream struct {
		Loss     string
		Affected []string `json:"durables_affected"`
	}
}

func (o *outflow) status() (r report) {
	o.t.Helper()
	out, errOut, code := o.exec("status", "--json")
	if code != 0 {
		o.t.Fatalf("outflow status: exit code %d\n%s", code, errOut)
	}
	must(o.t, json.Unmarshal([]byte(out), &r))
	return r
}

// atOnce does something n times at the same time, more of them than tests may run in parallel, and returns when all have ended. A fatal
// failure ends the one that it happens in first.
func atOnce(t *testing.T, n int, do func(i int)) {
	t.Helper()
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { do(i) })
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// tail is a case of TestLostTail.
type tail struct {
	name           string
	stream, bucket *loss
	horizon        string
	change         *relay.Settings // written while outflow is down
	initAgain      bool            // the record with the first place is lost
}

const back, hole = natsserver.Back, natsserver.Hole

var tails = []tail{
	{name: "stream back", stream: part(back, 0.4), horizon: "20ms"},
	{name: "stream back with a horizon of 0 and a change of settings", stream: part(back, 0.7), horizon: "0s",
		change: &relay.Settings{Horizon: 30 * time.Millisecond, Sort: outbox.ByCommit}},
	{name: "stream hole", stream: part(hole, 0.4), horizon: "0s"},
	{name: "stream hole with a change of settings", stream: part(hole, 0.7), horizon: "20ms", change: &relay.Settings{}},
	{name: "whole stream", stream: allBut(back, 0), horizon: "20ms"},
	{name: "bucket back", bucket: newest(back, 2), horizon: "20ms"},
	{name: "bucket hole", bucket: newest(hole, 2), horizon: "0s"},
	{name: "bucket back to before the first place", bucket: allBut(back, 1), horizon: "20ms", initAgain: true},
	{name: "both back", stream: part(back, 0.5), bucket: newest(back, 2), horizon: "20ms",
		change: &relay.Settings{Horizon: 5 * time.Millisecond, Sort: outbox.ByCommit}},
	{name: "both hole", stream: part(hole, 0.5), bucket: newest(hole, 2), horizon: "20ms"},
	{name: "stream hole, bucket back", stream: part(hole, 0.3), bucket: newest(back, 2), horizon: "0s",
		change: &relay.Settings{Horizon: 50 * time.Millisecond}},
}

// TestLostTail is claim C8: the machine of NATS and outflow crashes, and what NATS had not synced is gone: of the stream, of the
// checkpoint record, or of both. It comes again from the WAL, in the same order. All cases run at the same time: a loss counts only
// when a second reading, 5 s later, agrees.
func TestLostTail(t *testing.T) {
	slow(t)
	t.Parallel()
	pg, twinNATS := pgtest.Server(t), natstest.Server(t).URL()
	ops := number(t, "OUTFLOW_TEST_OPS", 600)
	all, loads := make([]*twins, len(tails)), make([]*load, len(tails))
	atOnce(t, len(tails), func(i int) {
		all[i] = startTwins(t, pg, twinNATS, "tail", "REORDER_HORIZON="+tails[i].horizon, "SINK_DURABLE_AFTER=40s")
		loads[i] = startLoad(t, all[i].url, traces(t, ops), 4, 75, 3)
		all[i].lose(&tails[i], ops/2)
	})
	for i, c := range tails {
		t.Run(c.name, func(t *testing.T) {
			s := all[i]
			s.on(t)
			loads[i].wait(t)
			s.equal(ops)
			if c.shows() {
				s.victim.mustSay("the log", s.victim.log.String(), "a loss was read", "consumers=[reader]", "published again")
			}
			if code := s.victim.term(); code != 0 {
				t.Errorf("stop: exit code %d", code)
			}
			if strings.Contains(s.victim.log.String(), "wrote a change") {
				t.Error("outflow wrote a change of settings of its own: the comparison says nothing then")
			}
		})
	}
}

// shows tells whether the record says that something is missing.
func (c *tail) shows() bool { return c.stream != nil && c.bucket == nil }

// shown freezes outflow at a moment when its newest record knows messages that are to be lost, if that is what shows the loss.
func (s *twins) shown(c *tail) {
	s.t.Helper()
	eventually(s.t, c.name+": the record knows what is lost", func() error {
		must(s.t, s.victim.child.Pause())
		st, err := s.js.Stream(s.t.Context(), s.victim.stream)
		must(s.t, err)
		if place := s.victim.status().Place; c.stream != nil && place.Seq <= c.stream.keep(st.CachedInfo().State.LastSeq) {
			must(s.t, s.victim.child.Resume())
			return fmt.Errorf("place %v of %d messages", place, st.CachedInfo().State.LastSeq)
		}
		return nil
	})
}

// lose lets the crash come once n messages are there, and starts everything again.
func (s *twins) lose(c *tail, n int) {
	s.t.Helper()
	s.stored(n)
	s.recorded(4)
	s.shown(c)
	s.victim.kill()
	s.consume("reader") // everything that there is
	s.crash(c.stream, c.bucket)
	if c.change != nil {
		set := *c.change
		set.MaxEvents, set.MaxBytes = relay.DefaultMaxEvents, relay.DefaultMaxBytes
		s.change(set)
	}
	must(s.t, s.nats.Start())
	if c.shows() {
		eventually(s.t, c.name+": outflow status names loss and consumers", func() error { // not before it could list them
			if r := s.victim.status(); r.Stream.Loss == "" || !slices.Equal(r.Stream.Affected, []string{"reader"}) {
				return fmt.Errorf("loss %q, durable consumers %q", r.Stream.Loss, r.Stream.Affected)
			}
			return nil
		})
	}
	if c.initAgain {
		s.victim.fails(3, []string{"run"}, "outflow init")
		s.victim.init()
	}
	s.victim.start()
}
