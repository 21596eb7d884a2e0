package pipeline

import (
	"context"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// brokerConn is the JetStream side of a session.
type brokerConn struct {
	js   *jetstream
	of   *process
	lost chan struct{}
	gone chan struct{} // closed when it is dead
	dead bool
	pub  *publisher

	watching bool
	err      error // why it is lost, where it was no end of the connection

	wire    []sent
	running bool
	extra   time.Duration // what is on its way after the end takes so much longer
	gap     time.Duration // and comes this far apart
	// the process that owns it sleeps until then: nothing leaves it and nothing comes in
	frozen time.Time
	orphan bool      // it lost the slot and does not know
	ackAt  time.Time // when the last acknowledgement comes
	sent   int

	noise *noise
	lag   time.Duration // questions take up to so much longer
	// when the broker goes on after a pause, it comes to this connection a moment later
	off  time.Duration
	skew func() time.Duration // by how much the process's clock differs
}

// sent is a message on its way.
type sent struct {
	line
	last  uint64 // the expected last sequence
	reply bool
	at    time.Time // when it arrives
	lost  uint64    // Outflow-Lost
	fence uint64    // the newest cut that its sender knows
	cut   *outbox.Cut
	// of a cut: called with what became of it
	answer func(ok bool)
}

func (l *brokerConn) lock()   { l.js.w.mu.Lock() }
func (l *brokerConn) unlock() { l.js.w.mu.Unlock() }

// send puts a message on the wire. The lock is held.
func (l *brokerConn) send(s sent) {
	if l.dead {
		return
	}
	s.at = time.Now().Add(l.noise.about(l.js.latency))
	l.wire = append(l.wire, s)
	l.sent++
	l.js.w.step("sent", s.last+1)
	if !l.running {
		l.running = true
		go l.deliver()
	}
}

func (l *brokerConn) deliver() {
	l.lock()
	defer l.unlock()
	for len(l.wire) > 0 {
		at := later(later(l.wire[0].at.Add(l.extra), l.js.paused.Add(l.off)), l.frozen)
		if d := time.Until(at); d > 0 {
			l.unlock()
			time.Sleep(d)
			l.lock()
			continue
		}
		s := l.wire[0]
		l.wire = l.wire[1:]
		l.extra += l.gap
		l.js.arrive(l, s)
	}
	l.running = false
}

// cut ends the connection; what is on its way is lost, or comes late.
func (l *brokerConn) cut(dropped bool) {
	if l.dead {
		return
	}
	l.dead = true
	close(l.gone)
	if l.err == nil {
		close(l.lost)
	}
	if dropped {
		l.wire = nil
	} else if len(l.wire) > 0 {
		l.extra = time.Duration(l.js.rnd.Int64N(
			int64(pick(l.js.rnd, 20*time.Millisecond, 200*time.Millisecond, 1500*time.Millisecond))))
		if l.js.rnd.IntN(2) == 0 {
			l.gap = l.noise.about(time.Millisecond)
		}
	}
}

// hears lets the connection hear of a stranger. The lock is held.
func (l *brokerConn) hears() {
	if l.dead || l.err != nil {
		return
	}
	l.err = &outbox.Fault{Class: outbox.Gap, Code: "foreign_message", Observed: true,
		Message: "somebody else published"}
	close(l.lost)
	if l.pub != nil && l.pub.err == nil {
		l.pub.err = l.err
	}
	l.js.w.step("heard", 0)
}

// ask takes the time of one question and its answer.
func (l *brokerConn) ask(ctx context.Context) error {
	l.lock()
	d := l.noise.about(max(2*l.js.latency, time.Until(l.js.paused), time.Until(l.frozen)) +
		l.noise.upTo(l.lag))
	l.unlock()
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return ctx.Err()
	case <-l.gone:
	}
	l.lock()
	defer l.unlock()
	if l.dead {
		return errDown
	}
	return nil
}

func (l *brokerConn) Check(ctx context.Context) error { return l.ask(ctx) }

func (l *brokerConn) State(ctx context.Context) (relay.StreamState, error) {
	err := l.ask(ctx)
	l.lock()
	defer l.unlock()
	js := l.js
	s := relay.StreamState{
		Exists: js.exists, Created: js.created, LastSeq: uint64(len(js.messages)),
		NewestSeq: uint64(js.newest()), Replicated: js.replicated,
	}
	if js.now != nil {
		s.Now = js.now()
	}
	for _, m := range js.messages {
		if m != nil {
			s.Messages++
		}
	}
	if n := js.newest(); n > 0 {
		s.Newest, s.Cut = js.messages[n-1].packed(), js.messages[n-1].cut
	}
	return s, err
}

func (m *storedMessage) packed() *outbox.Header {
	if m.stranger || m.cut != nil {
		return nil
	}
	h := m.header
	return &h
}

func (l *brokerConn) Watch(ctx context.Context) error {
	if err := l.ask(ctx); err != nil {
		return err
	}
	l.lock()
	defer l.unlock()
	l.watching = !l.js.deaf
	return nil
}

func (l *brokerConn) Stored(ctx context.Context, above, upTo uint64, more bool) (all []relay.Stored,
	err error) {
	if above == upTo {
		return nil, nil
	}
	err = l.ask(ctx)
	l.lock()
	defer l.unlock()
	limit := uint64(l.js.limit)
	if more {
		limit = uint64(l.js.more)
	}
	for q := upTo; q > above && upTo-q < limit; q-- {
		if q > uint64(len(l.js.messages)) || q <= uint64(l.js.removed) || l.js.messages[q-1] == nil {
			continue
		}
		m := l.js.messages[q-1]
		all = append(all, relay.Stored{Seq: q, Header: m.packed(), Cut: m.cut, Time: time.Now()})
	}
	slices.Reverse(all)
	return all, err
}

func (l *brokerConn) Recent(ctx context.Context, above, upTo uint64, n int) (all []outbox.Counter,
	err error) {
	select {
	case <-time.After(l.js.recall):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	err = l.ask(ctx)
	l.lock()
	defer l.unlock()
	for q := upTo; q > max(above, uint64(l.js.removed)) && len(all) < n; q-- {
		if m := l.js.messages[q-1]; m != nil && m.packed() != nil {
			all = append(all, m.header.Counter)
		}
	}
	return all, err
}

func (l *brokerConn) Tail(ctx context.Context) (relay.StreamState, error) {
	s, err := l.State(ctx)
	l.lock()
	defer l.unlock()
	if err == nil && l.js.moving { // as the real one, it says nothing else then
		return relay.StreamState{}, &outbox.Fault{Class: outbox.Transient, Code: relay.CodeStreamMoved,
			Message: "the stream changed while it was read"}
	}
	return s, err
}

func (l *brokerConn) Publisher(last, lost, fence uint64) Publisher {
	l.pub = &publisher{conn: l, last: last, acknowledged: last, lost: lost, lostTo: last, fence: fence,
		notify: make(chan struct{}, 1), since: l.js.ackEvery - 1}
	l.of.latest = l.pub
	return l.pub
}

func (l *brokerConn) Resume(last uint64) (Publisher, error) {
	old := l.of.latest
	p := l.Publisher(last, 0, 0)
	l.lock()
	defer l.unlock()
	l.pub.resume(old)
	l.js.w.step("resumed", last)
	l.js.resumed++
	return p, nil
}

func (l *brokerConn) Lost() <-chan struct{} { return l.lost }

func (l *brokerConn) Err() error {
	l.lock()
	defer l.unlock()
	if l.err != nil {
		return l.err
	}
	return errDown
}

func (l *brokerConn) Close() {
	l.lock()
	defer l.unlock()
	l.cut(false)
}
