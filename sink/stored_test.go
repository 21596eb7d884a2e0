package sink

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// watched connects as a session does that is to publish, and reads the stream.
func watched(t *testing.T, cfg Config) (*Conn, relay.StreamState) {
	t.Helper()
	c := door(t, cfg)
	must.Succeed(t, c.Watch(t.Context()))
	return c, state(t, c)
}

// intrude stores a message in the stream as somebody who knows the ingress.
func intrude(t *testing.T, c *Conn, url string) {
	t.Helper()
	nc, _ := natstest.Connect(t, url, nats.NoReconnect())
	m, err := nc.Request(c.Ingress()+"outbox.x", []byte("foreign"), time.Minute)
	if err != nil || strings.Contains(string(m.Data), "error") {
		t.Fatal(err, m)
	}
}

// Of the messages behind a sequence those are read that can have been in flight together: as many as that, as
// many bytes as that. Those that were deleted are left out.
func TestWhatMayHaveBeenInFlightIsRead(t *testing.T) {
	t.Parallel()
	url := natstest.Server(t).URL()
	cfg := config(url)
	cfg.Stream = "STORED"
	c, _ := watched(t, cfg)
	all := edits(t, 2500)
	big := make([]byte, 900<<10)
	for range 12 {
		all = append(all, event(len(all), "big", big))
	}
	mustPublish(t, c.Publisher(0), all[:2500])
	read := func(above, upTo uint64) []relay.Stored {
		got, err := c.Stored(t.Context(), above, upTo, false)
		must.Succeed(t, err)
		return got
	}
	for name, w := range map[string]struct{ above, upTo, first uint64 }{
		"nothing": {2500, 2500, 2501}, "one": {2499, 2500, 2500}, "some": {1000, 1010, 1001},
		"from the first on": {0, 30, 1}, "too many": {0, 2500, 501},
	} {
		got := read(w.above, w.upTo)
		if len(got) != int(w.upTo+1-w.first) {
			t.Errorf("%s: %d messages", name, len(got))
		}
		for i, m := range got {
			if m.Seq != w.first+uint64(i) || m.Header == nil || *m.Header != all[m.Seq-1].h {
				t.Fatalf("%s: message %d is %+v", name, i, m)
			}
		}
	}
	again, st := watched(t, cfg)
	mustPublish(t, again.Publisher(st.LastSeq), all[2500:])
	if got := read(0, 2512); len(got) < 10 || len(got) > 12 { // the tenth makes it 8 MiB
		t.Errorf("%d large messages", len(got))
	}
	asked := time.Now()
	more, err := again.Stored(t.Context(), 0, 2512, true)
	must.Succeed(t, err)
	gaveUp := time.Since(asked) >= moreTimeout && len(more) >= 10 && len(more) <= 12
	if !gaveUp && (len(more) != 2512 || more[0].Seq != 1) {
		t.Errorf("%d messages where more than what was in flight is asked for", len(more))
	}
	js, err := again.nc.JetStream(nats.MaxWait(time.Minute))
	must.Succeed(t, err)
	must.Succeed(t, js.DeleteMsg(cfg.Stream, 7))
	if got := read(5, 9); len(got) != 3 || got[0].Seq != 6 || got[1].Seq != 8 {
		t.Errorf("without the seventh: %+v", got)
	}
	c.Close()
	if _, err := c.Stored(t.Context(), 0, 5, false); err == nil {
		t.Error("a connection that is closed reads")
	}
}

// A stranger publishes when the stream has been read and nothing is published yet: he is seen, though nothing
// is sent.
func TestStrangerBeforeTheFirstMessage(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	cfg := config(s.URL())
	cfg.Stream = "EARLY"
	c, st := watched(t, cfg)
	intrude(t, c, s.URL())
	p := c.Publisher(st.LastSeq)
	select {
	case <-c.Lost():
	case <-time.After(3 * time.Minute):
		t.Fatal("the stranger was not noticed")
	}
	wantFault(t, p.Check(time.Now()), outbox.Gap, "foreign_message")
}

// A stranger publishes while messages flow. Either he is seen on the connection, or what was sent is refused
// before any message behind his was taken for stored: then his message is among those behind the last
// acknowledged one.
func TestStrangerWhileMessagesFlow(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	all := edits(t, 300)
	seen, refused := 0, 0
	for trial := range 40 {
		cfg := config(s.URL())
		cfg.Stream = "FLOW" + strconv.Itoa(trial)
		c, st := watched(t, cfg)
		p, clock := c.Publisher(st.LastSeq), newStillClock()
		var failed error
		for i := 0; failed == nil; i++ {
			if i == 20+3*trial {
				intrude(t, c, s.URL())
			}
			if i < len(all) {
				if failed = p.Publish(&all[i].e, &all[i].h); failed != nil {
					break
				}
			}
			if p.Flush(clock.now()); i >= len(all) || p.Full() {
				failed = notified(t.Context(), p, time.Millisecond, clock)
			} else {
				failed = p.Check(clock.now())
			}
		}
		c.Close()
		if outbox.ClassOf(failed) == outbox.Gap {
			seen++
			continue
		}
		wantFault(t, failed, outbox.Transient, "wrong_last_sequence")
		refused++
		next, st := watched(t, cfg)
		found, err := next.Stored(t.Context(), p.Acked(), st.LastSeq, false)
		must.Succeed(t, err)
		if !slices.ContainsFunc(found, func(m relay.Stored) bool { return m.Header == nil }) {
			t.Errorf("trial %d: %d was acknowledged, and behind it nobody is a stranger: %+v", trial,
				p.Acked(), found)
		}
	}
	t.Logf("seen %d, refused first %d", seen, refused)
}
