package sink

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
)

// Whoever publishes an event of a home, its message names the home, and has the same id: also a dead letter,
// and whatever window it is in. An event of another home at the same position has another one.
func TestAMessageHasTheSameIDWhoeverPublishesIt(t *testing.T) {
	t.Parallel()
	for _, tooLarge := range []bool{false, true} {
		of := func(home, window int, id string) (origin, msgID string) {
			enc := testEncoder(t, Config{DeadLetter: true, MaxPayload: 2048, Home: home})
			g := event(0, "doc 1", []byte("{}"))
			if tooLarge {
				size(&g.e, 5000)
			}
			g.e.ID, g.h.ID = id, id
			g.h.N, g.h.Of, g.h.Timeline = window, window+1, uint32(window+1)
			var m message
			if r := enc.encode(&m, &g.e, &g.h, 41); (r == TooLarge) != tooLarge {
				t.Fatal(r)
			}
			if tooLarge {
				enc.deadLetter(&m, &g.e, &g.h, 41, TooLarge)
			}
			h, err := nats.DecodeHeadersMsg(m.header)
			must.Succeed(t, err)
			if n := len(m.header) + len(m.data); n > 2048 {
				t.Errorf("a message of %d bytes", n)
			}
			return strings.Join(h[outbox.HeaderOrigin], "|"), strings.Join(h[headerMsgID], "|")
		}
		origin, id := of(7, 0, "a")
		if origin != "7" || id != "7-0/16B3748-0-ca978112ca1bbdca" {
			t.Errorf("origin %q, id %q", origin, id)
		}
		if again, same := of(7, 5, "a"); again != origin || same != id {
			t.Errorf("origin %q, id %q in another window", again, same)
		}
		if _, other := of(8, 0, "a"); other == id {
			t.Errorf("another home has id %q as well", other)
		}
		if _, other := of(7, 0, "b"); other == id {
			t.Errorf("another event has id %q as well", other)
		}
		if origin, id := of(0, 0, "a"); origin+id != "" {
			t.Errorf("without clusters: origin %q, id %q", origin, id)
		}
	}
}

// A row of the table, which a replay reads, may be any cluster's: its message names none.
func TestARowOfTheTableNamesNoHome(t *testing.T) {
	t.Parallel()
	cfg := config("")
	cfg.Home = 7
	x, err := NewEncoder(cfg)
	must.Succeed(t, err)
	g := event(0, "doc", []byte("{}"))
	m, err := x.Message(&g.e, &g.h)
	must.Succeed(t, err)
	if len(m.Header) != 1 || m.Header[outbox.HeaderName] != g.h.String() {
		t.Errorf("%v", m.Header)
	}
}

// ring is the streams of two clusters: their own, and what the second has claimed of the first. (On one
// server: to source a stream is the same from anywhere.) Events of both have the same positions.
type ring struct {
	s     *natsserver.Server
	c     [3]*Conn // OUTBOX_1, OUTBOX_2, OF_1
	all   [3][]given
	names []string
}

const aggregate = "ALL"

// What of 130 events home 1 has published, as home 2 of its own at the same positions, and what its successor
// has claimed: that comes in one window.
const (
	homes   = 40
	claimed = 30
	events  = 130
)

// newRing publishes them, in batches where they are many.
func newRing(t *testing.T, options natsserver.Options) *ring {
	r := &ring{s: natstest.Server(t, options), names: []string{"OUTBOX_1", "OUTBOX_2", "OF_1"}}
	all := edits(t, events)
	r.all = [...][]given{all[:homes], all[:homes], slices.Clone(all[claimed:])}
	for i := range r.all[2] {
		h := &r.all[2][i].h
		h.N, h.Of, h.Due, h.Thru = i, len(r.all[2]), all[events-1].h.Due, all[events-1].h.Due
	}
	for i, name := range r.names {
		cfg := batched(r.s.URL())
		cfg.Stream, cfg.Home = name, []int{1, 2, 1}[i]
		r.c[i] = door(t, cfg)
		p := slow(t, r.c[i], 0)
		mustPublish(t, p, r.all[i])
	}
	return r
}

// source makes the stream that sources some of them, or changes it.
func (r *ring) source(t *testing.T, window time.Duration, names ...string) {
	t.Helper()
	cfg := jetstream.StreamConfig{Name: aggregate, Duplicates: window}
	for _, name := range names {
		cfg.Sources = append(cfg.Sources, &jetstream.StreamSource{Name: name})
	}
	js, done := r.open(t)
	defer done()
	_, err := js.CreateOrUpdateStream(t.Context(), cfg)
	must.Succeed(t, err)
}

func (r *ring) open(t *testing.T) (jetstream.JetStream, func()) {
	t.Helper()
	nc, err := nats.Connect(r.s.URL(), nats.NoReconnect(), nats.Timeout(time.Minute))
	must.Succeed(t, err)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(time.Minute))
	must.Succeed(t, err)
	return js, nc.Close
}

// await waits until the aggregate has n messages.
func (r *ring) await(t *testing.T, n uint64) {
	t.Helper()
	js, done := r.open(t)
	defer done()
	await.Until(t, "the aggregate", func() error {
		st, err := js.Stream(t.Context(), aggregate)
		if err == nil && st.CachedInfo().State.Msgs < n {
			return fmt.Errorf("it has %d messages, want %d", st.CachedInfo().State.Msgs, n)
		}
		return err
	})
}

// restart restarts the server.
func (r *ring) restart(t *testing.T, options natsserver.Options) {
	for _, c := range r.c {
		c.Close()
	}
	r.s.Shutdown()
	r.s = natstest.Server(t, options)
}

// ends publishes one more message in each stream, with an id of its own, and returns when the aggregate has
// them: then it has read whatever came before.
func (r *ring) ends(t *testing.T) {
	t.Helper()
	for i, name := range r.names {
		cfg := config(r.s.URL())
		cfg.Stream, cfg.Home = name, 10+i
		c := door(t, cfg)
		p := c.Publisher(state(t, c).LastSeq)
		mustPublish(t, p, []given{event(events, "end", []byte("{}"))})
	}
	await.Until(t, "the ends", func() error {
		count := r.count(t)
		for i, name := range r.names {
			if count[idOf(10+i, events)] == 0 {
				return fmt.Errorf("the one of %s is missing", name)
			}
		}
		return nil
	})
}

// idOf is the start of an id: that of a home's i-th event.
func idOf(home, i int) string { return fmt.Sprintf("%d-%v", home, event(i, "", nil).e.Pos) }

// count counts the messages of the aggregate by the start of their ids.
func (r *ring) count(t *testing.T) map[string]int {
	t.Helper()
	count := map[string]int{}
	for _, m := range readAll(t, r.s.URL(), aggregate) {
		_, id, _ := strings.Cut(m.Header, headerMsgID+": ")
		id, _, _ = strings.Cut(id, "\n")
		count[id[:strings.LastIndexByte(id, '-')]]++
	}
	return count
}

// A stream that sources those of all clusters has each event once, in the order of the stream that it took it
// from, with the headers that say whose it is: also when its server restarts.
func TestAnAggregateDropsWhatTwoClustersPublished(t *testing.T) {
	t.Parallel()
	options := natsserver.Options{Dir: t.TempDir(), Tune: unhurried}
	r := newRing(t, options)
	if !slices.ContainsFunc(readAll(t, r.s.URL(), "OF_1"), func(m stored) bool {
		return strings.Contains(m.Header, "Nats-Batch-")
	}) {
		t.Error("nothing of it came in a batch")
	}
	r.source(t, time.Hour, r.names...)
	r.await(t, events+homes)
	r.restart(t, options)
	r.ends(t)
	count := r.count(t)
	for home, n := range map[int]int{1: events, 2: homes} {
		for i := range n {
			if got := count[idOf(home, i)]; got != 1 {
				t.Errorf("event %d of home %d is there %d times", i, home, got)
			}
		}
	}
	for i, m := range readAll(t, r.s.URL(), aggregate) {
		for _, line := range []string{"Nats-Expected-", "Nats-Batch-"} {
			if strings.Contains(m.Header, line) {
				t.Errorf("message %d has a header %s", i+1, line)
			}
		}
		if !strings.Contains(m.Header, outbox.HeaderOrigin+": ") ||
			!strings.Contains(m.Header, "Nats-Stream-Source: ") {
			t.Errorf("message %d: %s", i+1, m.Header)
		}
	}
	newest := map[string]string{}
	for _, m := range readAll(t, r.s.URL(), aggregate) {
		_, source, _ := strings.Cut(m.Header, "Nats-Stream-Source: ")
		source, _, _ = strings.Cut(source, " ")
		_, pos, _ := strings.Cut(m.Header, "lsn=")
		pos, _, _ = strings.Cut(pos, " ")
		if pos <= newest[source] {
			t.Errorf("of %s %s came after %s", source, pos, newest[source])
		}
		newest[source] = pos
	}
}

// What the window does not cover is there twice: a second message that comes later, and, after a restart of
// the aggregate's server, one that it had dropped and that nothing of the same stream followed.
func TestAnAggregateForgetsBehindItsWindow(t *testing.T) {
	t.Parallel()
	options := natsserver.Options{Dir: t.TempDir(), Tune: unhurried}
	r := newRing(t, options)
	r.source(t, time.Hour, r.names[:2]...)
	r.await(t, 2*homes)
	p := r.c[2].Publisher(events - claimed)
	mustPublish(t, p, r.all[0][:1]) // the successor's newest one is a double
	r.source(t, time.Hour, r.names...)
	r.await(t, events+homes)
	await.Until(t, "the source", func() error {
		js, done := r.open(t)
		defer done()
		st, err := js.Stream(t.Context(), aggregate)
		if err != nil {
			return err
		}
		for _, s := range st.CachedInfo().Sources {
			if s.Lag != 0 || s.Active < 0 {
				return fmt.Errorf("it lags by %d", s.Lag)
			}
		}
		return nil
	})
	if got := r.count(t)[idOf(1, 0)]; got != 1 {
		t.Fatalf("within the window it is there %d times", got)
	}
	r.source(t, 100*time.Millisecond, r.names...)
	js, done := r.open(t)
	st, err := js.Stream(t.Context(), aggregate)
	must.Succeed(t, err)
	await.Until(t, "the window", func() error {
		info, err := st.Info(t.Context())
		if age := info.TimeStamp.Sub(info.State.LastTime); err == nil && age < 200*time.Millisecond {
			return fmt.Errorf("its newest message is %v old", age)
		}
		return err
	})
	done()
	r.restart(t, options)
	r.ends(t)
	if got := r.count(t)[idOf(1, 0)]; got != 2 {
		t.Errorf("after the window and a restart it is there %d times", got)
	}
}
