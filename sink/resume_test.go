package sink

import (
	"bytes"
	"context"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/sink/stream"
)

// again connects to a server that may still be starting, and reads the stream.
func again(t *testing.T, cfg Config) (c *Conn, s relay.StreamState) {
	t.Helper()
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		err := func() (err error) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if c, err = Connect(ctx, cfg); err != nil {
				return err
			}
			if err = c.CheckStream(ctx); err == nil {
				err = c.Watch(ctx)
			}
			if err == nil {
				s, err = c.Tail(ctx)
			}
			if err != nil {
				c.Close()
			}
			return err
		}()
		if err == nil {
			t.Cleanup(c.Close)
			return c, s
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// resume goes on on a new connection, as a session does.
func resume(t *testing.T, cfg Config, old *Publisher) *Publisher {
	t.Helper()
	old.conn.Close()
	c, s := again(t, cfg)
	if want := old.Header(s.LastSeq); s.LastSeq > 0 &&
		(want == nil || s.Newest == nil || *want != *s.Newest) {
		t.Fatalf("the stream ends with %d, %v; it was %v", s.LastSeq, s.Newest, want)
	}
	stored, err := c.Stored(t.Context(), old.Acked(), s.LastSeq, false)
	must.Succeed(t, err)
	for _, m := range stored {
		if want := old.Header(m.Seq); want == nil || m.Header == nil || *want != *m.Header {
			t.Fatalf("message %d is %v; it was %v", m.Seq, m.Header, want)
		}
	}
	p, err := c.Resume(old, s.LastSeq)
	must.Succeed(t, err)
	return p
}

// publishOn is publish that goes on with next where the publisher fails.
func publishOn(t *testing.T, p *Publisher, all []given, next func(*Publisher) *Publisher) *Publisher {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	clock := newStillClock()
	for i := 0; i < len(all) || p.Acked() < p.Sent(); {
		err := ctx.Err()
		must.Succeed(t, err)
		if i == len(all) || p.Full() {
			wait := p.Flush(clock.now())
			if wait == 0 {
				wait = 100 * time.Millisecond
			}
			err = notified(ctx, p, wait, clock)
		} else if err = p.Publish(&all[i].e, &all[i].h); err == nil {
			i++
		}
		if err != nil {
			p, clock = next(p), newStillClock()
		}
	}
	return p
}

// A server that is killed and started again, and one whose connection is cut, in the middle: what is
// published goes on behind what is there, and the stream is what was published.
func TestAPublisherGoesOnBehindWhatIsThere(t *testing.T) {
	t.Parallel()
	s := natstest.Process(t)
	cfg := config(s.URL())
	cfg.MsgID = true
	door(t, cfg).Close()
	c, _ := again(t, cfg)
	events := tier.Size(30_000)
	all := edits(t, events)
	rnd := rand.New(rand.NewPCG(3, 4))
	resumed := 0
	next := func(p *Publisher) *Publisher { resumed++; return resume(t, cfg, p) }
	p, clock := c.Publisher(0), newStillClock()
	for from := 0; from < len(all); {
		n := min(1+rnd.IntN(tier.Size(3000)), len(all)-from)
		for i := from; i < from+n; i++ {
			for p.Full() {
				p.Flush(clock.now())
				if err := notified(t.Context(), p, 100*time.Millisecond, clock); err != nil {
					p, clock = next(p), newStillClock()
				}
			}
			if err := p.Publish(&all[i].e, &all[i].h); err != nil {
				p, clock = next(p), newStillClock()
				i--
			}
		}
		from += n
		switch rnd.IntN(4) {
		case 0:
			must.Succeed(t, s.Kill())
			must.Succeed(t, s.Start())
			p, clock = next(p), newStillClock()
		case 1:
			p.Flush(clock.now())
			p, clock = next(p), newStillClock()
		case 2: // messages in the buffer, one held back
			p, clock = next(p), newStillClock()
		}
	}
	p = publishOn(t, p, nil, next)
	if p.Acked() != uint64(len(all)) || resumed == 0 {
		t.Errorf("%d acknowledged, %d times resumed", p.Acked(), resumed)
	}
	if n, b := p.InFlight(); n != 0 || b != 0 {
		t.Errorf("%d messages and %d bytes in flight", n, b)
	}
	same(t, readAll(t, s.URL(), "OUTBOX"), all)
}

// What the server takes in late from the old connection is the very message that is sent again, or is
// refused.
func TestResumeBesideTheOldConnection(t *testing.T) {
	t.Parallel()
	s := natstest.Process(t)
	cfg := config(s.URL())
	door(t, cfg).Close()
	rounds := tier.Size(40)
	all := edits(t, rounds*300)
	c, _ := again(t, cfg)
	p := c.Publisher(0)
	for round := range rounds {
		must.Succeed(t, s.Pause())
		for i := range 300 {
			g := &all[300*round+i]
			must.Succeed(t, p.Publish(&g.e, &g.h))
		}
		p.Flush(time.Now())
		// The old connection is left open: the server reads both.
		must.Succeed(t, s.Resume())
		old := p
		for done := false; !done; {
			c, st := again(t, cfg)
			next, err := c.Resume(p, st.LastSeq)
			if err != nil && st.LastSeq < p.Acked() {
				continue // the old connection was told of more since the stream was read
			}
			must.Succeed(t, err)
			p = next
			// else a message of the old one came first, and was ours
			done = publish(t.Context(), p, nil) == nil
		}
		old.conn.Close()
	}
	same(t, readAll(t, s.URL(), "OUTBOX"), all)
}

// The last message that is sent again asks for an acknowledgement, however many there are: nothing else may
// come that would prove it.
func TestResumeAsksForAnAcknowledgement(t *testing.T) {
	t.Parallel()
	cfg := config(natstest.Server(t).URL())
	cfg.Stream = "ASKS"
	counts := []int{1, 2, 10, ackEvery - 1, ackEvery, ackEvery + 1, 3*ackEvery + 10}
	all := edits(t, 400)
	p, sent := door(t, cfg).Publisher(0), 0
	for _, n := range counts {
		p.out = new(recorder) // what is sent leads nowhere
		for i := range n {
			must.Succeed(t, p.Publish(&all[sent+i].e, &all[sent+i].h))
		}
		p.Flush(time.Now())
		sent += n
		old := p
		p = resume(t, cfg, old)
		if dues := p.window.pending; p.Sent() != uint64(sent) || dues[len(dues)-1].seq != uint64(sent) ||
			len(dues) < n/ackEvery || !p.outstanding() {
			t.Fatalf("%d messages: sent up to %d, acknowledgements are due of %+v, on the wire up to %d", n,
				p.Sent(), dues, p.written)
		}
		for clock := newStillClock(); p.Acked() < uint64(sent); {
			if err := notified(t.Context(), p, 100*time.Millisecond, clock); err != nil {
				t.Fatalf("%d messages: %v", n, err)
			}
		}
	}
	same(t, readAll(t, cfg.URL, cfg.Stream), all[:sent])
}

// What was acknowledged and not looked at yet counts: a stream that ends before it has lost something.
func TestResumeKnowsWhatWasAcknowledged(t *testing.T) {
	t.Parallel()
	p, _, ack := offline(t)
	for range 3 {
		put(t, p, 10)
	}
	p.Flush(time.Unix(0, 0))
	ack(103)
	if _, err := p.conn.Resume(p, 102); err == nil {
		t.Error("it goes on behind 102, and 103 was acknowledged")
	}
	p, _, ack = offline(t)
	for range 3 {
		put(t, p, 10)
	}
	p.Flush(time.Unix(0, 0))
	ack(103)
	if before, newest := p.Header(102), p.Header(103); before != nil || newest == nil {
		t.Errorf("103 was acknowledged: the header of 102 is %v, that of 103 %v", before, newest)
	}
	if h := stream.HeaderOf([]byte("NATS/1.0\r\nOutflow: what\r\n\r\n")); h != nil {
		t.Errorf("a header that is none is %v", h)
	}
}

func TestResumeRefusesWhatIsNotItsOwn(t *testing.T) {
	t.Parallel()
	url := natstest.Server(t).URL()
	cfg := config(url)
	cfg.Stream = "REFUSES"
	all := edits(t, 30)
	c := door(t, cfg)
	p := c.Publisher(0)
	mustPublish(t, p, all[:10])
	for i := range all[10:15] {
		must.Succeed(t, p.Publish(&all[10+i].e, &all[10+i].h))
	}
	// 15 is held back
	for seq, want := range map[uint64]bool{9: false, 10: true, 11: true, 14: true, 15: false, 16: false} {
		h := p.Header(seq)
		if (h != nil) != want || want && *h != all[seq-1].h {
			t.Errorf("the header of %d is %v", seq, h)
		}
		if !want {
			other, _ := again(t, cfg)
			if _, err := other.Resume(p, seq); err == nil {
				t.Errorf("it goes on behind %d", seq)
			}
		}
	}
	c.Close()
	other, _ := again(t, cfg)
	must.Succeed(t, other.RenewIngress(t.Context()))
	other, _ = again(t, cfg)
	if _, err := other.Resume(p, 10); err == nil {
		t.Error("it goes on with another ingress")
	}
}

// What was sent in batches is sent again in batches: one by one, a server that syncs each message would take
// as long for them as an acknowledgement is waited for.
func TestWhatWasSentInBatchesIsSentAgainInBatches(t *testing.T) {
	t.Parallel()
	s := natstest.Process(t, natsserver.Options{SyncAlways: true})
	cfg := batched(s.URL())
	c := door(t, cfg)
	all := edits(t, 1900)
	const large = 1000
	// in no batch, and ends the one before it
	all[large] = event(large, "doc", bytes.Repeat([]byte("x"), maxBatched+1))
	p := slow(t, c, 0)
	mustPublish(t, p, all[:100])
	must.Succeed(t, s.Pause())
	for i := range all[100:] { // none of it can be acknowledged, and all of it fits
		must.Succeed(t, p.Publish(&all[100+i].e, &all[100+i].h))
	}
	p.Flush(time.Now())
	must.Succeed(t, s.Kill())
	must.Succeed(t, s.Start())
	p = resume(t, cfg, p)
	publishOn(t, p, nil, func(p *Publisher) *Publisher { return resume(t, cfg, p) })
	got := readAll(t, s.URL(), "OUTBOX")
	same(t, got, all)
	if n, batches := inBatches(t, got); n < len(all)-101 || batches > len(all)/maxBatch+3 {
		t.Errorf("%d of %d messages are in %d batches", n, len(all), batches)
	}
	if strings.Contains(got[large].Header, headerBatchID) {
		t.Error("a large message is in a batch")
	}
}

// Batches go on where they went before, and may: not on a server that is fast, and not once they were
// refused.
func TestBatchesGoOnOnlyWhereTheyMay(t *testing.T) {
	t.Parallel()
	cfg := batched(natstest.Server(t).URL())
	cfg.Stream = "WITHOUT"
	p := door(t, cfg).Publisher(0)
	if p = resume(t, cfg, p); p.batch.on || p.batch.allowed == nil {
		t.Errorf("allowed: %t, and on: %t, where the server was fast", p.batch.allowed != nil, p.batch.on)
	}
	p.batch.on = true
	if p = resume(t, cfg, p); !p.batch.on {
		t.Error("they do not go on")
	}
	cfg.Batches.refused.Store(true)
	if p = resume(t, cfg, p); p.batch.on {
		t.Error("they go on after they were refused")
	}
}
