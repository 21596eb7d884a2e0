package sink

import (
	"errors"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// recorder is a way out that leads nowhere.
type recorder struct {
	seqs    []uint64
	replies []uint64 // sequences of the messages that asked for an acknowledgement
	flushes int
	bytes   int
}

func (r *recorder) send(m *message, reply []byte) {
	r.seqs = append(r.seqs, m.seq)
	r.bytes += m.size()
	if reply != nil {
		r.replies = append(r.replies, m.seq)
	}
}

func (r *recorder) flush(bool) { r.flushes++ }

// offline is a publisher without a connection; ack acknowledges.
func offline(t testing.TB) (p *Publisher, r *recorder, ack func(uint64)) {
	t.Helper()
	cfg := config("").withDefaults()
	cfg.MaxPayload = 64 << 20
	enc, err := newEncoder(cfg)
	must.Succeed(t, err)
	c := &Conn{cfg: cfg, enc: enc, lost: make(chan struct{}),
		config: &stream.Config{Subjects: []string{"_outflow.3f9a.>"}}}
	p = c.newPublisher(100)
	r = &recorder{}
	p.out = r
	return p, r, func(seq uint64) { p.acked.Store(seq); p.signal() }
}

func put(t testing.TB, p *Publisher, size int) {
	t.Helper()
	g := event(0, "doc", make([]byte, size))
	must.Succeed(t, p.Publish(&g.e, &g.h))
}

func TestLastMessageAsksAtOnceWhenNothingIsOutstanding(t *testing.T) {
	t.Parallel()
	p, r, _ := offline(t)
	put(t, p, 10)
	if len(r.seqs) != 0 {
		t.Fatal("the last message was not held back")
	}
	if n, _ := p.InFlight(); n != 1 || p.Sent() != 101 || p.Acked() != 100 {
		t.Fatalf("in flight %d, sent %d, acked %d", n, p.Sent(), p.Acked())
	}
	if wait := p.Flush(time.Unix(0, 0)); wait != 0 || len(r.replies) != 1 || r.replies[0] != 101 {
		t.Fatalf("wait %v, replies to %d", wait, r.replies)
	}
	if p.Flush(time.Unix(0, 0)) != 0 || len(r.seqs) != 1 {
		t.Error("sent again")
	}
}

func TestTheLastMessageWaitsForWhatIsOutstanding(t *testing.T) {
	t.Parallel()
	at := func(d time.Duration) time.Time { return time.Unix(1000, 0).Add(d) }
	outstanding := func(t *testing.T) (*Publisher, *recorder, func(uint64)) {
		p, r, ack := offline(t)
		put(t, p, 10)
		p.Flush(at(0))
		put(t, p, 10)
		if wait := p.Flush(at(time.Millisecond)); wait != holdBack || len(r.seqs) != 1 {
			t.Fatalf("wait %v, sent %d", wait, r.seqs)
		}
		return p, r, ack
	}
	t.Run("for the outstanding acknowledgement", func(t *testing.T) {
		p, r, ack := outstanding(t)
		ack(101)
		<-p.Notify()
		if wait := p.Flush(at(time.Millisecond)); wait != 0 || r.replies[1] != 102 {
			t.Errorf("wait %v, replies to %d", wait, r.replies)
		}
	})
	t.Run("two milliseconds", func(t *testing.T) {
		p, r, _ := outstanding(t)
		if wait := p.Flush(at(2500 * time.Microsecond)); wait != 500*time.Microsecond || len(r.seqs) != 1 {
			t.Fatalf("wait %v, sent %d", wait, r.seqs)
		}
		if wait := p.Flush(at(3 * time.Millisecond)); wait != 0 || r.replies[1] != 102 {
			t.Errorf("wait %v, replies to %d", wait, r.replies)
		}
	})
	t.Run("with company", func(t *testing.T) {
		p, r, ack := outstanding(t)
		put(t, p, 10)
		// company prolongs nothing
		if wait := p.Flush(at(2500 * time.Microsecond)); wait != 500*time.Microsecond || r.flushes != 1 {
			t.Fatalf("wait %v, %d writes", wait, r.flushes)
		}
		ack(101)
		if wait := p.Flush(at(2600 * time.Microsecond)); wait != 0 || r.flushes != 2 || len(r.seqs) != 3 ||
			r.replies[1] != 103 {
			t.Errorf("wait %v, %d writes, sent %d, replies to %d: want one write of both", wait, r.flushes,
				r.seqs, r.replies)
		}
	})
	t.Run("not for what is not on the wire", func(t *testing.T) {
		p, r, _ := offline(t)
		for range 2 * ackEvery {
			put(t, p, 10)
		}
		if wait := p.Flush(at(0)); wait != 0 || r.flushes != 1 {
			t.Errorf("wait %v, %d writes: replies are asked for, but nobody has been asked yet", wait,
				r.flushes)
		}
	})
}

func TestOneReplyIsAskedForManyMessages(t *testing.T) {
	t.Parallel()
	p, r, _ := offline(t)
	for range 1000 {
		put(t, p, 100)
	}
	p.Flush(time.Now())
	if len(r.replies) != 21 || r.replies[0] != 101 || r.replies[1] != 151 || r.replies[19] != 1051 ||
		r.replies[20] != 1100 {
		t.Errorf("1000 messages: replies to %d", r.replies)
	}
	p, r, _ = offline(t)
	for range 100 {
		put(t, p, 64<<10)
	}
	if len(r.replies) < 24 || len(r.replies) > 33 {
		t.Errorf("100 messages of 64 KiB: %d replies, want about one per 256 KiB", len(r.replies))
	}
}

func TestInFlightIsBounded(t *testing.T) {
	t.Parallel()
	p, r, ack := offline(t)
	for i := 0; !p.Full(); i++ {
		put(t, p, 10)
	}
	if n, _ := p.InFlight(); n != MaxInFlight {
		t.Errorf("full at %d messages", n)
	}
	p.Flush(time.Now())
	ack(r.replies[0])
	if p.Full() {
		t.Error("still full after an acknowledgement")
	}

	p, r, ack = offline(t)
	for i := 0; !p.Full(); i++ {
		put(t, p, 300_000)
	}
	if r.bytes > MaxInFlightBytes {
		t.Errorf("%d bytes on the wire", r.bytes)
	}
	if p.Flush(time.Now()) == 0 && r.bytes > MaxInFlightBytes {
		t.Errorf("%d bytes on the wire after the flush", r.bytes)
	}
	ack(p.window.sent)
	if _, bytes := p.InFlight(); bytes != 300_000+p.held[0].size()-len(p.held[0].data) {
		t.Errorf("%d bytes left, one message is held back", bytes)
	}
	ack(p.Sent())
	p.Flush(time.Now())
	ack(p.Sent())
	if n, bytes := p.InFlight(); n != 0 || bytes != 0 {
		t.Errorf("%d messages, %d bytes left", n, bytes)
	}
}

// A message above the limit goes alone, and what is before it asks for the acknowledgement that lets it go.
func TestLargeMessageGoesAlone(t *testing.T) {
	t.Parallel()
	p, r, ack := offline(t)
	put(t, p, 10) // the first one asks anyway
	p.Flush(time.Now())
	ack(101)
	put(t, p, 10)
	put(t, p, 20<<20)
	if len(r.replies) != 2 || r.replies[1] != 102 {
		t.Fatalf("replies to %d", r.replies)
	}
	if !p.Full() || p.Flush(time.Now()) == 0 {
		t.Error("it does not wait")
	}
	ack(102)
	if p.Full() {
		t.Error("full, though it may go")
	}
	if p.Flush(time.Now()) != 0 || len(r.replies) != 3 || !p.Full() {
		t.Errorf("replies to %d, full %v", r.replies, p.Full())
	}
	ack(103)
	if p.Full() {
		t.Error("still full")
	}
}

func TestAnAcknowledgementThatIsOverdueIsNoticed(t *testing.T) {
	t.Parallel()
	at := func(s float64) time.Time { return time.Unix(1000, 0).Add(time.Duration(s * float64(time.Second))) }
	p, _, ack := offline(t)
	ok := func(all ...float64) {
		t.Helper()
		for _, s := range all {
			must.Succeed(t, p.Check(at(s)))
		}
	}
	ok(0)
	put(t, p, 10)
	p.Flush(at(3600)) // an hour of silence before does not count
	ok(3600, 3601, 3602, 3603, 3604, 3604.9)
	put(t, p, 10)
	p.Flush(at(3604.9))
	p.Flush(at(3604.91))
	ack(101) // one of two came, and was seen outside of Check
	p.Full()
	ok(3605.1, 3606, 3607, 3608, 3609, 3610)
	f := wantFault(t, p.Check(at(3610.1)), outbox.Transient, "ack_timeout")
	ack(102)
	if err := p.Check(at(3610.1)); !errors.Is(err, f) {
		t.Errorf("an acknowledgement after the time-out undoes it: %v", err)
	}
	g := event(0, "doc", nil)
	if err := p.Publish(&g.e, &g.h); err == nil {
		t.Error("publishes after an error")
	}
}

// A process that stood still has not read what came meanwhile: the time begins anew.
func TestAckTimeoutAfterStandstill(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	p, _, ack := offline(t)
	put(t, p, 10)
	p.Flush(now)
	for range 3 {
		for range 4 {
			must.Succeed(t, p.Check(now))
			now = now.Add(time.Second)
		}
		now = now.Add(time.Minute)
	}
	must.Succeed(t, p.Check(now))
	for range 4 {
		now = now.Add(time.Second)
		must.Succeed(t, p.Check(now))
	}
	wantFault(t, p.Check(now.Add(time.Second)), outbox.Transient, "ack_timeout")
	ack(101)
}

// A caller that reads from a slow disk for long comes back to messages that it has not flushed: nobody can
// have acknowledged them.
func TestWhatWasNotWrittenIsNotLate(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	p, r, ack := offline(t)
	put(t, p, 10)
	put(t, p, 10) // the first one asks, but stays in the buffer
	for range 2 {
		must.Succeed(t, p.Check(now))
		now = now.Add(time.Minute)
	}
	p.Flush(now)
	if err := p.Check(now); err != nil || r.flushes != 1 {
		t.Fatal(err, r.flushes)
	}
	must.Succeed(t, p.Check(now.Add(ackTimeout-1)))
	ack(102)
	must.Succeed(t, p.Check(now.Add(time.Hour)))
}

func TestPoisonLeavesThePublisherAsItWas(t *testing.T) {
	t.Parallel()
	p, r, _ := offline(t)
	put(t, p, 10)
	bad := event(1, "", nil)
	bad.e.Null = relay.NullDoc
	wantFault(t, p.Publish(&bad.e, &bad.h), outbox.Poison, "null_doc_id")
	if len(r.seqs) != 0 || p.Sent() != 101 {
		t.Errorf("sent %d, predicted %d", r.seqs, p.Sent())
	}
	p.Flush(time.Now())
	if len(r.replies) != 1 || r.replies[0] != 101 {
		t.Errorf("the message before it: %d", r.replies)
	}
}

// The limits are what they are said to be, to the byte.
func TestTheLimitsInFlightHoldToTheByte(t *testing.T) {
	t.Parallel()
	f := inflight{sinceReply: ackEveryBytes - 10}
	if f.needsReply(9) || !f.needsReply(10) {
		t.Error("an acknowledgement is asked for at another size")
	}
	f = inflight{countSince: ackEvery - 2}
	if before := f.needsReply(1); before || !(&inflight{countSince: ackEvery - 1}).needsReply(1) {
		t.Error("an acknowledgement is asked for at another number of messages")
	}
	f = inflight{bytes: MaxInFlightBytes - 10}
	if !f.fits(10) || f.fits(11) {
		t.Error("full at another size")
	}
	if f = (inflight{}); !f.fits(MaxInFlightBytes + 1) {
		t.Error("a message above the limit never goes")
	}
}
