package sink

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

func TestMain(m *testing.M) {
	natstest.RunChild()
	goleak.VerifyTestMain(m)
}

// given is an event with its packed header.
type given struct {
	e relay.Event
	h outbox.Header
}

// edits are the first n edits of a recorded session, each a transaction of its own.
func edits(t testing.TB, n int) []given {
	t.Helper()
	ops, err := recording.Load(recording.FriendsForever)
	must.Succeed(t, err)
	all := make([]given, n)
	for i := range all {
		op := ops[i%len(ops)]
		all[i] = event(i, op.Doc, op.Payload)
		all[i].e.Actor = op.Actor
	}
	return all
}

// event is the only event of the i-th transaction.
func event(i int, doc string, payload []byte) given {
	pos := outbox.Position{LSN: outbox.LSN(0x16B3748 + 0x40*i)}
	g := given{e: relay.Event{Pos: pos, Doc: doc, Key: "k", ID: "id", Payload: payload,
		PayloadSize: len(payload)}}
	g.h = outbox.Header{Pos: pos, Of: 1, Due: pos.LSN, Thru: pos.LSN, Timeline: 1, ID: g.e.ID, Key: g.e.Key}
	return g
}

func config(url string) Config {
	return Config{URL: url, Table: "public.outbox", Stream: "OUTBOX", Keyed: true}
}

func connect(t testing.TB, cfg Config) *Conn {
	t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for {
		c, err := Connect(t.Context(), cfg)
		if err == nil {
			t.Cleanup(c.Close)
			return c
		}
		// a server may stand still for longer than Connect waits
		if outbox.ClassOf(err) != outbox.Transient || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// door connects and sees to the stream.
func door(t testing.TB, cfg Config) *Conn {
	t.Helper()
	c := connect(t, cfg)
	must.Succeed(t, c.EnsureStream(t.Context(), stream.Options{}))
	return c
}

func state(t testing.TB, c *Conn) relay.StreamState {
	t.Helper()
	s, err := c.State(t.Context())
	must.Succeed(t, err)
	return s
}

// publish publishes and returns the first error; without one, everything is acknowledged.
func publish(ctx context.Context, p *Publisher, all []given) error {
	clock := newStillClock()
	for i := range all {
		for p.Full() {
			p.Flush(clock.now())
			if err := notified(ctx, p, time.Second, clock); err != nil {
				return err
			}
		}
		if err := p.Publish(&all[i].e, &all[i].h); err != nil {
			return err
		}
	}
	for p.Acked() < p.Sent() {
		wait := p.Flush(clock.now())
		if wait == 0 {
			wait = time.Second
		}
		if err := notified(ctx, p, wait, clock); err != nil {
			return err
		}
	}
	return p.Check(clock.now())
}

// notified waits for a notice of the publisher, for d at most.
func notified(ctx context.Context, p *Publisher, d time.Duration, clock *stillClock) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.Notify():
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return p.Check(clock.now())
}

// stillClock is a clock that stands still with this process: an acknowledgement that nobody could take is not
// late.
type stillClock struct{ at, real time.Time }

func newStillClock() *stillClock { return &stillClock{time.Now(), time.Now()} }

func (c *stillClock) now() time.Time {
	now := time.Now()
	c.at = c.at.Add(min(now.Sub(c.real), time.Second+100*time.Millisecond)) // await waits for a second
	c.real = now
	return c.at
}

func mustPublish(t testing.TB, p *Publisher, all []given) {
	t.Helper()
	must.Succeed(t, publish(t.Context(), p, all))
}

// stored is a message as it lies in the stream.
type stored struct {
	Subject string
	Header  string
	Data    string
}

// readAll reads the stream by itself, without the code under test. A sequence that is missing is left empty.
func readAll(t testing.TB, url, stream string) []stored {
	t.Helper()
	nc, _ := natstest.Connect(t, url, nats.NoReconnect())
	return readFrom(t, nc, stream)
}

func readFrom(t testing.TB, nc *nats.Conn, stream string) []stored {
	t.Helper()
	js, err := nc.JetStream(nats.MaxWait(20 * time.Second))
	must.Succeed(t, err)
	info, err := js.StreamInfo(stream)
	must.Succeed(t, err)
	all := make([]stored, info.State.LastSeq)
	for i := range all {
		m, err := js.GetMsg(stream, uint64(i+1))
		if err != nil {
			if strings.Contains(err.Error(), "not found") {
				continue
			}
			t.Fatal(err)
		}
		all[i] = stored{Subject: m.Subject, Data: string(m.Data), Header: headerText(m.Header)}
	}
	return all
}

// headerText writes a header's lines in the order of their names.
func headerText(h nats.Header) string {
	var lines []string
	for name, values := range h {
		lines = append(lines, name+": "+strings.Join(values, "|"))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// same compares what was published with what is stored.
func same(t testing.TB, got []stored, want []given) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("the stream has %d messages, want %d", len(got), len(want))
	}
	for i, w := range want {
		if got[i].Data != string(w.e.Payload) || !strings.Contains(got[i].Header, "Outflow: "+w.h.String()) {
			t.Fatalf("message %d is %+v, want %s with %s", i+1, got[i], w.h.String(), w.e.Payload)
		}
	}
}

func wantFault(t testing.TB, err error, class outbox.Class, code string) *outbox.Fault {
	t.Helper()
	f := outbox.FaultOf(err)
	if f == nil || f.Class != class || f.Code != code {
		t.Fatalf("got error %v (%+v), want a fault %v %s", err, f, class, code)
	}
	return f
}
