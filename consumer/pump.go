package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/outbox"
)

// How often the pump looks around.
const (
	tickTime  = time.Second
	ticksLook = 5 // ticks between two looks at the stream
)

// pump reads messages, judges their order, and gives them to the lanes.
type pump struct {
	*phase
	reader Reader
	until  uint64 // end there; 0: go on

	at    mark           // the newest message read, or one behind it up to which the filter has nothing
	head  *outbox.Header // of the newest message read; nil before the first
	seen  []uint64       // by lane: the newest message that it was given, or told of
	acked uint64
	told  mark // up to where idle lanes were told, at the look before

	ticks     int
	busy      bool // a message was read since the last look
	forgotten bool // what was before is forgotten
	end       mark // candidate: at the last look the filter had nothing from at up to here
}

func newPump(p *phase, until uint64, at mark) *pump {
	return &pump{phase: p, until: until, at: at, told: at, seen: make([]uint64, len(p.lanes))}
}

// close ends the reading: what the source hands out from now on nobody takes.
func (p *pump) close() {
	if p.reader != nil {
		p.reader.Close()
	}
}

// run reads until the consumer stops, or until is reached.
func (p *pump) run() (err error) {
	if p.reader, err = p.from.Open(p.work, p.at.Seq); err != nil {
		return err
	}
	for {
		tick, cancel := context.WithTimeout(p.wait, p.cfg.tick)
		more, err := p.during(tick)
		cancel()
		if err != nil || !more {
			return err
		}
		if err := p.tick(); err != nil {
			return err
		}
	}
}

// during reads until the tick ends. There is no more when the consumer stops or until is reached.
func (p *pump) during(tick context.Context) (more bool, err error) {
	for p.until == 0 || p.at.Seq < p.until {
		switch {
		case p.work.Err() != nil:
			return false, context.Cause(p.work)
		case p.stop.Err() != nil:
			return false, nil
		case tick.Err() != nil:
			return true, nil
		}
		m, err := p.reader.Read(tick)
		if err != nil && tick.Err() == nil {
			return false, fmt.Errorf("read stream %s: %w", p.cfg.Stream, err)
		}
		if err != nil {
			continue
		}
		if err := p.take(m); err != nil {
			return false, err
		}
	}
	return false, nil
}

// take gives a message to its lane, once there is room for it.
func (p *pump) take(m *Message) error {
	e, err := p.dec.event(m)
	if err != nil {
		return &Fault{Kind: ErrForeign, What: "stream " + p.cfg.Stream, Err: err}
	}
	here := markOf(m.Sequence, &e.head)
	if p.source == live {
		if err := p.judge(here, &e.head); err != nil {
			return err
		}
		if e.seq <= p.upTo {
			e.Replayed = true
		}
	}
	number, err := p.room(e)
	if err != nil {
		return err
	}
	partition := partitionOf(e.hash, len(p.lanes))
	p.at, p.head, p.busy, p.seen[partition] = here, &e.head, true, m.Sequence
	p.met.got(partition)
	p.met.read(m.Sequence)
	p.lanes[partition].push(item{event: e, number: number, again: p.begin.again})
	if done := p.flow.look().done; done > p.acked && done-p.acked >= uint64(p.cfg.MaxInFlight)/4 {
		p.ack()
	}
	return nil
}

// room waits until the flow has room. Meanwhile the lanes work; the pump looks around.
func (p *pump) room(e *Event) (uint64, error) {
	for {
		tick, cancel := context.WithTimeout(p.wait, p.cfg.tick)
		number, err := p.flow.add(tick, e.seq, e.size, e.Time)
		cancel()
		if err == nil {
			return number, nil
		}
		if p.work.Err() != nil {
			return 0, context.Cause(p.work)
		}
		if p.stop.Err() != nil {
			return 0, errStopping
		}
		if err := p.tick(); err != nil {
			return 0, err
		}
	}
}

func (p *pump) ack() {
	if p.reader == nil {
		return
	}
	done := p.flow.look().done
	if done > p.acked {
		if err := p.reader.Ack(done); err == nil { // one that is lost is made good by the next
			p.acked = done
		}
	}
}

// tick looks around, and at the stream every few times.
func (p *pump) tick() error {
	p.ack()
	f := p.flow.look()
	p.met.inFlight(f.messages, f.bytes)
	p.met.done(f.done)
	if p.ticks++; p.ticks%ticksLook != 0 {
		return nil
	}
	if err := p.look(f); err != nil {
		return err
	}
	p.busy = false
	p.tell()
	return p.forget()
}

// look asks the stream for its state, and the reader whether everything has come here.
func (p *pump) look(f flowing) error {
	st, err := stateOf(p.work, p.from)
	if err != nil {
		return fmt.Errorf("stream %s: %w", p.cfg.Stream, err)
	}
	handed, err := p.reader.Check(p.work)
	if err != nil {
		return err
	}
	done := f.done
	if f.messages == 0 {
		done = p.at.Seq
	}
	p.met.behind(st.Last, done, f.oldest)
	if p.source != live {
		return p.replayed()
	}
	if !st.Created.Equal(p.begin.created) {
		return fmt.Errorf("stream %s was made anew", p.cfg.Stream) // the next session says what that means
	}
	if p.cfg.Filter == ">" {
		return nil // each message shows whether some are missing before it
	}
	if known := max(handed, p.at.Seq); st.First > known+1 {
		if err := p.gap(known+1, st.First-1, true); err != nil {
			return err
		}
		p.at.Seq = st.First - 1
	}
	return p.idle(st)
}

// replayed ends the reading of a replay of which nothing is left: it was purged, or is too old.
func (p *pump) replayed() error {
	next, err := p.from.Next(p.work, p.at.Seq+1)
	if err == nil && (next == 0 || next > p.until) {
		p.cfg.Log.Warn("the rest of a replay was removed before it was read", "from", p.at.Seq+1, "to", p.until)
		p.at, p.head = mark{Seq: p.until}, nil
	}
	return err
}

// idle moves on over messages that the filter leaves out, while it has nothing else: so that they may be removed from the stream without
// looking like a gap. That the filter has nothing up to a message must be seen at two looks, with the message there at the first one.
func (p *pump) idle(st StreamState) error {
	candidate := p.end
	p.end = mark{}
	if p.busy || st.Last <= p.at.Seq {
		return nil
	}
	last, err := p.from.Get(p.work, st.Last)
	if err != nil || last == nil {
		return err
	}
	h, err := outbox.ParseHeader(last.Header.Get(outbox.HeaderName))
	if err != nil {
		return nil // it is foreign, and not ours to judge
	}
	next, err := p.from.Next(p.work, p.at.Seq+1)
	if err != nil {
		return err
	}
	if next == 0 || next > st.Last {
		p.end = markOf(st.Last, &h)
	}
	if candidate.Seq > p.at.Seq && (next == 0 || next > candidate.Seq) {
		p.at, p.head = candidate, nil
	}
	return nil
}

// tell moves the marks of lanes that had nothing since the look before.
func (p *pump) tell() {
	for i, l := range p.lanes {
		if p.seen[i] <= p.told.Seq && p.seen[i] < p.at.Seq {
			l.push(item{to: p.at, again: p.begin.again})
			p.seen[i] = p.at.Seq
		}
	}
	p.told = p.at
}

// forget drops the generations once they say nothing any more.
func (p *pump) forget() error {
	if p.begin.again || len(p.before) == 0 || p.forgotten {
		return nil
	}
	marks := make([]mark, len(p.lanes))
	for i, l := range p.lanes {
		l.mu.Lock()
		marks[i] = l.moved
		l.mu.Unlock()
	}
	for i := range p.before {
		if !p.before[i].passed(marks) {
			return nil
		}
	}
	p.forgotten = true
	return p.store.forget(p.work, p.source)
}

// gap ends the session because messages are gone, or accepts it.
func (p *pump) gap(from, to uint64, removed bool) error {
	if !p.cfg.AcceptGap {
		return gapFault(p.cfg, from, to, removed)
	}
	p.cfg.Log.Warn("messages are missing: going on, as AcceptGap says", "from", from, "to", to)
	p.met.gap(to - from + 1)
	return nil
}

// judge says whether a message may follow the one before it.
func (p *pump) judge(here mark, h *outbox.Header) error {
	if here.Seq <= p.at.Seq {
		return &Fault{Kind: ErrStream, What: fmt.Sprintf("stream %s: sequence %d came after the stream's leader had said that the filter has nothing up to %d",
			p.cfg.Stream, here.Seq, p.at.Seq), Cure: "Set the consumer back to it: outflow consumer rewind"}
	}
	if err := p.begin.judge(p.cfg, here); err != nil {
		return err
	}
	prev := p.head
	if was := p.behind(here); was.known() && !p.begin.again && here.order(was) <= 0 {
		return p.back(was, here)
	}
	if prev == nil {
		return nil
	}
	jumped := here.Seq > p.at.Seq+1
	if jumped && p.cfg.Filter == ">" {
		if err := p.jumped(here); err != nil {
			return err
		}
	}
	if here.order(p.at) <= 0 {
		return p.back(p.at, here)
	}
	if p.cfg.Filter == ">" && !prev.Pos.Repaired() && !h.Pos.Repaired() && missing(prev, h) {
		return p.gap(here.Seq, here.Seq, false)
	}
	return nil
}

// jumped looks why sequences are missing before a message. That they are is all right where the broker lost its end and went on under
// new sequences: then the headers follow each other all the same.
func (p *pump) jumped(here mark) error {
	next, err := p.from.Next(p.work, p.at.Seq+1)
	if err != nil {
		return err
	}
	if next != 0 && next < here.Seq {
		return fmt.Errorf("stream %s: sequence %d was left out before %d", p.cfg.Stream, next, here.Seq)
	}
	st, err := stateOf(p.work, p.from)
	if err != nil {
		return err
	}
	if st.First > p.at.Seq+1 {
		return p.gap(p.at.Seq+1, here.Seq-1, true)
	}
	p.cfg.Log.Warn("the stream has no messages here: the broker lost its end, or they were deleted", "from", p.at.Seq+1, "to", here.Seq-1)
	return nil
}

// behind is the newest message before here that was done or read, as far as it was not read by this session just before: the newest mark
// while the session reads again, or the one to which idle moved on. It may have been lost since it was looked at.
func (p *pump) behind(here mark) mark {
	newest := p.begin.newest
	switch {
	case p.at.Seq >= newest.Seq && p.head == nil:
		return p.at
	case p.at.Seq < newest.Seq && newest.Seq < here.Seq:
		return newest
	}
	return mark{}
}

// back looks why the order of headers goes back. If the message before is gone, the broker has lost its end while this session ran: the
// next session knows what to pass over. If it is there, what follows is from another stretch of WAL: the database was moved.
func (p *pump) back(before, here mark) error {
	m, err := p.from.Get(p.work, before.Seq)
	if err != nil {
		return err
	}
	if m == nil {
		return fmt.Errorf("stream %s: sequence %d is gone, and %d has what came before it: %w", p.cfg.Stream, before.Seq, here.Seq, errHole)
	}
	if here.Pos == before.Pos {
		return &Fault{Kind: ErrRepeat, What: fmt.Sprintf("stream %s: sequences %d and %d are the same event, position %v", p.cfg.Stream, before.Seq, here.Seq, here.Pos),
			Cure: "Something copies messages into this stream: read the stream that outflow publishes to"}
	}
	p.begin.again = false
	p.cfg.Log.Warn("positions went back: the events are from another database cluster, or a repair", "before", before.Pos, "now", here.Pos, "seq", here.Seq)
	return nil
}

// errHole: the broker lost its end and went on.
var errHole = errors.New("the broker lost the end of the stream")

// missing reports whether something is missing between two headers that follow each other: inside a window, at the end of the first
// one's, or at the beginning of the second one's.
func missing(prev, next *outbox.Header) bool {
	if prev.Due == next.Due {
		return next.N != prev.N+1
	}
	return prev.N != prev.Of-1 || next.N != 0
}

func gapFault(cfg *Config, from, to uint64, removed bool) *Fault {
	f := &Fault{Kind: ErrGap}
	f.What = fmt.Sprintf("stream %s, consumer %s: the messages of sequences %d to %d are not in the stream any more, and were not read", cfg.Stream, cfg.Name, from, to)
	f.sign = fmt.Sprintf("gap from %d", from)
	if !removed {
		f.What = fmt.Sprintf("stream %s, consumer %s: the headers at sequence %d show that messages are missing before it", cfg.Stream, cfg.Name, to)
		f.sign = ""
	}
	f.Cure = fmt.Sprintf("Let the events come again from the table (outflow replay --to consumer:%s), or do without them: Config.AcceptGap", cfg.Name)
	return f
}

func otherMessage(cfg *Config, seq uint64, want, got mark) *Fault {
	return &Fault{Kind: ErrStream, What: fmt.Sprintf("stream %s, consumer %s: sequence %d was the event at position %v when it was read, and is %v now", cfg.Stream, cfg.Name, seq, want.Pos, got.Pos),
		Cure: cureStream(cfg)}
}

func cureStream(cfg *Config) string {
	return fmt.Sprintf("The stream was made anew or put back from an older copy. Decide from where the consumer goes on (outflow consumer rewind %s), or build its tables anew under another Name", cfg.Name)
}

// notFound reports whether a stream is not there.
func notFound(err error) bool { return errors.Is(err, jetstream.ErrStreamNotFound) }
