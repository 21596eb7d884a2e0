package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

const (
	dispatchInterval = time.Second // between two calls of maintain
	inspectEvery     = 5           // intervals between two inspections of the stream
)

// dispatcher reads messages, checks their order, and gives each to the worker of its partition. Only the
// goroutine of loop uses it.
type dispatcher struct {
	*run
	reader stream.Reader
	until  uint64 // sequence to stop at; 0: never
	beyond bool   // a message behind that was read
	waits  bool   // a message waits for room

	at       offset         // the newest message read, or a later one up to which the filter has nothing
	header   *outbox.Header // of the newest message read; nil before the first
	notified offset         // value of at when idle workers were last told to advance
	newest   passedCut      // the newest cut that this session has passed over

	intervals int
	busy      bool   // a message was read since the last inspection
	gone      uint64 // up to here inspections have told of what the stream does not have any more
	candidate offset // at the last inspection the filter had nothing between at and this message
}

func newDispatcher(r *run, until uint64, at offset) *dispatcher {
	return &dispatcher{run: r, until: until, at: at, notified: at}
}

// close ends reading. The next session reads the messages that the source still hands out.
func (d *dispatcher) close() {
	if d.reader != nil {
		d.reader.Close()
	}
}

// loop reads until the consumer stops or, if until is set, has been reached.
func (d *dispatcher) loop() (err error) {
	if d.reader, err = d.src.Open(d.work, d.at.Seq); err != nil {
		return err
	}
	if err := d.skipToBarrier(); err != nil {
		return err
	}
	for {
		interval, cancel := context.WithTimeout(d.wait, d.cfg.interval)
		more, err := d.readFor(interval)
		cancel()
		if err != nil || !more {
			return err
		}
		if err := d.maintain(); err != nil {
			return err
		}
	}
}

// readFor reads until interval ends. There is no more to read when the consumer stops or until is reached.
func (d *dispatcher) readFor(interval context.Context) (more bool, err error) {
	for d.until == 0 || d.at.Seq < d.until {
		switch {
		case d.work.Err() != nil:
			return false, context.Cause(d.work)
		case d.stop.Err() != nil:
			return false, nil
		case interval.Err() != nil:
			return true, nil
		}
		m, err := d.reader.Read(interval)
		var gap *stream.Gap
		switch {
		case errors.As(err, &gap):
			if err := d.gap(gap.From, gap.To, true); err != nil {
				return false, err
			}
			d.at.Seq, d.header = gap.To, nil
			continue
		case err != nil && (interval.Err() == nil || !isEnd(err) && d.wait.Err() == nil):
			return false, fmt.Errorf("read stream %s: %w", d.cfg.Stream, err)
		case err != nil:
			continue
		}
		if err := d.take(m); err != nil {
			return false, err
		}
	}
	return false, nil
}

// isEnd reports whether an error says that a context has ended.
func isEnd(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// take dispatches a message, unless it is beyond the sequence to stop at: then there is nothing more before
// that.
func (d *dispatcher) take(m *stream.Message) error {
	if d.until > 0 && m.Sequence > d.until {
		d.beyond = true
		if err := d.skipToBarrier(); err != nil || d.at.Seq >= d.until {
			return err
		}
		return fmt.Errorf("stream %s: what was left out before sequence %d is there", d.cfg.Stream,
			m.Sequence)
	}
	return d.dispatch(m)
}

// dispatch gives a message to its worker once the flow has room for it.
func (d *dispatcher) dispatch(m *stream.Message) error {
	if err := d.checkAgain(m.Sequence); err != nil {
		return err
	}
	if c := cutOf(m); c != nil {
		return d.passCut(m, c)
	}
	e, err := d.dec.event(m)
	if err != nil {
		return fault(ErrForeign, err, "", "stream %s", d.cfg.Stream)
	}
	here := offsetOf(m.Sequence, &e.head)
	if d.source == live {
		if err := d.check.checkHome(d.cfg, e); err != nil {
			return err
		}
		if err := d.checkOrder(here, &e.head, m); err != nil {
			return err
		}
		d.check.begins = false
		if e.seq <= d.replayedTo {
			e.Replayed = true
		}
	}
	partition := partitionOf(e.hash, d.layout.Partitions)
	w := d.workers[partition]
	if w != nil && d.source == replay && !d.live[partition].covers(offsetOf(e.Sequence, &e.head), true) {
		d.met.passed(partition) // it is still to come as itself
		w = nil
	}
	if w == nil { // or another instance has it
		d.at, d.header, d.busy = here, &e.head, true
		d.met.read(m.Sequence)
		return nil
	}
	number, err := d.awaitRoom(e)
	if err != nil {
		return err
	}
	d.at, d.header, d.busy, w.given = here, &e.head, true, m.Sequence
	d.met.got(partition)
	d.met.read(m.Sequence)
	w.push(item{event: e, number: number, republished: d.check.republishing})
	return nil
}

// checkAgain compares the message at the newest offset when a stream that had gone back is longer than that
// again: this session has not read it, if all offsets are there.
func (d *dispatcher) checkAgain(last uint64) error {
	at := d.check.newest
	if d.source != live || !d.check.shorter || last <= at.Seq {
		return nil
	}
	d.check.shorter = false
	m, err := d.src.Get(d.work, at.Seq)
	if err != nil {
		return fmt.Errorf("stream %s: %w", d.cfg.Stream, err)
	}
	st, err := stateOf(d.work, d.src)
	switch {
	case err != nil:
		return fmt.Errorf("stream %s: %w", d.cfg.Stream, err)
	case m != nil && at.known():
		return checkSame(d.work, d.cfg, d.src, st, m, at)
	case m == nil && at.Seq >= st.Kept && !st.Erased.Has(at.Seq):
		return fmt.Errorf("stream %s: sequence %d did not come again: %w", d.cfg.Stream, at.Seq, errLostEnd)
	}
	return nil
}

// awaitRoom waits until the flow has room for an event. The workers and maintain go on meanwhile.
func (d *dispatcher) awaitRoom(e *Event) (uint64, error) {
	d.waits = true
	defer func() { d.waits = false }()
	for {
		interval, cancel := context.WithTimeout(d.wait, d.cfg.interval)
		number, err := d.flow.add(interval, e.seq, e.size, e.Time)
		cancel()
		if err == nil {
			return number, nil
		}
		if d.work.Err() != nil {
			return 0, context.Cause(d.work)
		}
		if d.stop.Err() != nil {
			return 0, errStopping
		}
		if err := d.maintain(); err != nil {
			return 0, err
		}
	}
}

// maintain updates the metrics and, every few times, inspects the stream.
func (d *dispatcher) maintain() error {
	if err := d.skipToBarrier(); err != nil {
		return err
	}
	f := d.flow.state()
	d.met.inFlight(f.messages, f.bytes)
	d.met.done(f.done)
	if d.intervals++; d.intervals%inspectEvery != 0 {
		return nil
	}
	if err := d.inspect(f); err != nil {
		return err
	}
	d.busy, d.check.begins = false, false
	d.advanceIdle()
	if d.source == live && d.replays != nil {
		if due, err := d.replays(d.work); err != nil || due {
			d.finish()
			return err
		}
	}
	return nil
}

// inspect asks for the stream's state, and checks that everything the source handed out arrived here.
func (d *dispatcher) inspect(f flowState) error {
	st, err := stateOf(d.work, d.src)
	if err != nil && d.stop.Err() != nil && d.work.Err() == nil {
		return errStopping
	}
	if err != nil {
		return fmt.Errorf("stream %s: %w", d.cfg.Stream, err)
	}
	handed, err := d.reader.Check(d.work)
	if err != nil {
		return err
	}
	done := f.done
	if f.messages == 0 {
		done = d.at.Seq
	}
	d.met.behind(st.Last, done, f.oldest)
	if d.source != live {
		return nil
	}
	if !st.Created.Equal(d.check.created) {
		return fmt.Errorf("stream %s was made anew", d.cfg.Stream) // the next session finds out why
	}
	if err := d.checkAgain(st.Last); err != nil || d.cfg.readsAll() {
		return err // each message shows whether any before it are missing
	}
	if known := max(handed, d.at.Seq, d.gone); st.First > known+1 {
		front, err := frontOf(d.work, d.src, st.First)
		if err != nil {
			return fmt.Errorf("stream %s: %w", d.cfg.Stream, err)
		}
		if err := d.removed(st.Erased.Lacking(known+1, front-1)); err != nil {
			return err
		}
		d.gone = st.First - 1
	}
	if d.pending() {
		d.candidate = offset{}
		return nil
	}
	if d.gone > d.at.Seq {
		d.skip(offset{Seq: d.gone, Due: d.at.Due, N: d.at.N, Pos: d.at.Pos}, d.header)
	}
	return d.skipFiltered(st)
}

// skipToBarrier moves to the sequence to stop at, if there is nothing more to read up to it: the filter
// leaves out the rest, or it was erased. What the broker has lost comes again, and is none of that.
func (d *dispatcher) skipToBarrier() error {
	if d.until == 0 || d.at.Seq >= d.until {
		return nil
	}
	if more, err := d.moreToBarrier(); more || err != nil {
		return err
	}
	if d.source != live {
		d.cfg.Log.Warn("the rest of a replay was removed before it was read", "from", d.at.Seq+1, "to",
			d.until)
		d.at, d.header = offset{Seq: d.until}, nil
		return nil
	}
	m, err := d.src.Get(d.work, d.until)
	if err != nil {
		return err
	}
	st, err := stateOf(d.work, d.src)
	front := st.Kept
	if err == nil {
		front, err = frontOf(d.work, d.src, front)
	}
	switch {
	case err != nil:
		return fmt.Errorf("stream %s: %w", d.cfg.Stream, err)
	case m == nil && (st.Last < d.until || front <= d.until && !st.Erased.Has(d.until)):
		return fmt.Errorf("stream %s: sequence %d, behind which another layout begins, is gone: %w",
			d.cfg.Stream, d.until, errLostEnd)
	}
	// It may have been lost before the first question, and have come again before the second one.
	if more, err := d.moreToBarrier(); more || err != nil {
		return err
	}
	if err := d.explainBarrier(st, front); err != nil {
		return err
	}
	at := offset{Seq: d.until}
	if m != nil && cutOf(m) != nil {
		at = d.at.behindCut(d.until)
	} else if m != nil {
		if h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName)); err == nil {
			at = offsetOf(d.until, &h)
		}
	}
	d.at, d.header = at, nil
	return nil
}

// explainBarrier is gap for what was removed up to the sequence to stop at: nobody reads it behind that. With
// a filter only the stream's front tells.
func (d *dispatcher) explainBarrier(st stream.State, front uint64) error {
	if d.cfg.readsAll() {
		_, err := d.explainJump(&stream.Message{Sequence: d.until + 1})
		return err
	}
	handed, err := d.reader.Check(d.work)
	if err != nil {
		return err
	}
	return d.removed(st.Erased.Lacking(max(handed, d.at.Seq)+1, min(front-1, d.until)))
}

// moreToBarrier reports whether there is something to read up to the sequence to stop at: in the stream, or
// handed out before it was removed from there.
func (d *dispatcher) moreToBarrier() (bool, error) {
	next, err := d.src.Next(d.work, d.at.Seq+1)
	if more := next != 0 && next <= d.until; more || err != nil || d.beyond {
		return more, err
	}
	if !d.pending() {
		_, err = d.reader.Check(d.work)
	}
	return d.pending(), err
}

// pending reports whether messages have come that are not dispatched. They may have been removed since, so
// what the stream has does not tell whether there is something before it to do.
func (d *dispatcher) pending() bool { return d.waits || d.reader.Buffered() > 0 }

// skipFiltered skips messages that the filter leaves out while there is nothing else to read. Otherwise their
// removal from the stream would look like a gap. It takes two inspections: both must find nothing for the
// filter up to a message that was there at the first.
func (d *dispatcher) skipFiltered(st stream.State) error {
	candidate := d.candidate
	d.candidate = offset{}
	if d.busy || st.Last <= d.at.Seq {
		return nil
	}
	last, err := d.src.Get(d.work, st.Last)
	if err != nil || last == nil {
		return err
	}
	here := d.at.behindCut(st.Last)
	if cutOf(last) == nil {
		h, err := outbox.ParseHeader(last.Header.Get(outbox.HeaderName))
		if err != nil {
			return nil // a foreign message that the filter leaves out
		}
		here = offsetOf(st.Last, &h)
	}
	next, err := d.src.Next(d.work, d.at.Seq+1)
	if err != nil {
		return err
	}
	if next == 0 || next > st.Last {
		d.candidate = here
	}
	if candidate.Seq > d.at.Seq && (next == 0 || next > candidate.Seq) {
		d.skip(candidate, nil)
	}
	return nil
}

// skip moves beyond what need not be read.
func (d *dispatcher) skip(to offset, h *outbox.Header) {
	d.at, d.header = to, h
	if j, ok := d.src.(*joined); ok {
		j.skip(to.Seq)
	}
}

// advanceIdle moves the offsets of workers that have had nothing to do since the last inspection.
func (d *dispatcher) advanceIdle() {
	for _, w := range d.workers {
		if w.given <= d.notified.Seq && w.given < d.at.Seq {
			w.push(item{to: d.at, republished: d.check.republishing})
			w.given = d.at.Seq
		}
	}
	d.notified = d.at
}

// gap returns an error because messages are missing or, with AcceptGap, logs that.
func (d *dispatcher) gap(from, to uint64, removed bool) error {
	if !d.cfg.AcceptGap {
		return gapFault(d.cfg, from, to, removed)
	}
	d.cfg.Log.Warn("messages are missing: going on, as AcceptGap says", "from", from, "to", to)
	d.met.gap(to - from + 1)
	return nil
}

// removed is gap for sequences that were removed, if there are any.
func (d *dispatcher) removed(all outbox.Sequences) error {
	if len(all) == 0 {
		return nil
	}
	from, to := all[0].From, all[len(all)-1].To
	if d.check.begins {
		d.cfg.Log.Info("the stream's first messages went before they were read: the consumer, which is "+
			"new, begins behind them", "from", from, "to", to)
		return nil
	}
	return d.gap(from, to, true)
}

// checkOrder returns an error if a message must not follow the one before it.
func (d *dispatcher) checkOrder(here offset, h *outbox.Header, m *stream.Message) error {
	if here.Seq <= d.at.Seq {
		return d.cameLate(here.Seq)
	}
	if err := d.check.checkOffset(d.cfg, here); err != nil {
		return err
	}
	erased, err := d.explainJump(m)
	if err != nil {
		return err
	}
	prev := d.header
	if was := d.lastKnown(here); was.known() && !d.check.republishing && here.order(was) <= 0 {
		return d.explainOrder(was, here)
	}
	if prev == nil {
		return nil
	}
	if here.order(d.at) <= 0 {
		return d.explainOrder(d.at, here)
	}
	if d.cfg.readsAll() && !erased && !prev.Pos.Repaired() && !h.Pos.Repaired() && missing(prev, h) {
		return d.gap(here.Seq, here.Seq, false)
	}
	return nil
}

// cameLate is the error of a message that is not behind what was read.
func (d *dispatcher) cameLate(seq uint64) error {
	return fault(ErrStream, nil, "Set the consumer back to it: `outflow consumer rewind`",
		"stream %s: sequence %d came after the stream's leader had said that the filter has nothing up to %d",
		d.cfg.Stream, seq, d.at.Seq)
}

// explainJump finds out why sequences are missing before a message, if they are. That is fine where Outflow
// says in the message that the broker lost them at the stream's end: they come again from here on; and where
// the stream's metadata say that they were erased, which is noted there before it is done: nobody is to read
// them any more. All else was removed before it was read. erased: some of them were, so the headers around
// them do not follow one another.
func (d *dispatcher) explainJump(m *stream.Message) (erased bool, err error) {
	from, to := max(d.at.Seq, d.check.gapTo)+1, m.Sequence-1
	if from > to || !d.cfg.readsAll() {
		return false, nil
	}
	if j, ok := d.src.(*joined); ok && j.told >= from {
		d.cfg.Log.Warn("the archive has no message here: it was erased, or deleted before it was archived",
			"from", from, "to", min(j.told, to))
		d.header = nil
		if from = j.told + 1; from > to {
			return false, nil
		}
	}
	next, err := d.src.Next(d.work, from)
	if err != nil {
		return false, err
	}
	if next != 0 && next <= to {
		return false, fmt.Errorf("stream %s: sequence %d was left out before %d", d.cfg.Stream, next,
			m.Sequence)
	}
	lost := lostBefore(m, m.Sequence)
	if lost <= to {
		d.cfg.Log.Warn("the broker lost the end of its stream: the events come again", "from", lost, "to", to)
	}
	st, err := stateOf(d.work, d.src)
	if err != nil {
		return false, fmt.Errorf("stream %s: %w", d.cfg.Stream, err)
	}
	if was := st.Erased.Within(from, to); len(was) > 0 {
		erased = true
		d.cfg.Log.Info("messages were erased before they were read: going on", "from", was[0].From, "to",
			was[len(was)-1].To)
	}
	if lost > from {
		err = d.removed(st.Erased.Lacking(from, min(lost-1, to)))
	}
	return erased, err
}

// lastKnown is the newest message before here that was done or read, unless this session has just read it
// itself: the newest offset, while the session reads what comes after older ones, or the message that
// skipFiltered moved to. The broker may have lost it since.
func (d *dispatcher) lastKnown(here offset) offset {
	newest := d.check.newest
	switch {
	case d.at.Seq >= newest.Seq && d.header == nil:
		return d.at
	case d.at.Seq < newest.Seq && newest.Seq < here.Seq:
		return newest
	}
	return offset{}
}

// explainOrder finds out why positions went back. If the previous message is gone, the broker has lost the
// end of its stream during this session, and the next session finds out which events to skip. If it is still
// there, what follows comes from a different WAL: the database was moved to another cluster.
func (d *dispatcher) explainOrder(before, here offset) error {
	m, err := d.src.Get(d.work, before.Seq)
	if err != nil {
		return err
	}
	st, err := stateOf(d.work, d.src)
	if err != nil {
		return fmt.Errorf("stream %s: %w", d.cfg.Stream, err)
	}
	gone := m == nil && !st.Erased.Has(before.Seq)
	if m != nil { // lost twice, it may have another one there
		gone = checkSame(d.work, d.cfg, d.src, st, m, before) != nil
	}
	if gone {
		return fmt.Errorf("stream %s: sequence %d is gone, and %d has what came before it: %w", d.cfg.Stream,
			before.Seq, here.Seq, errLostEnd)
	}
	if here.Pos == before.Pos {
		return fault(ErrRepeat, nil,
			"Something copies messages into this stream: read the stream that outflow publishes to",
			"stream %s: sequences %d and %d are the same event, position %v", d.cfg.Stream, before.Seq,
			here.Seq, here.Pos)
	}
	d.check.republishing = false
	d.cfg.Log.Warn("positions went back: the events are from another database cluster, or a repair", "before",
		before.Pos, "now", here.Pos, "seq", here.Seq)
	return nil
}

// errLostEnd ends a session during which the broker lost the end of the stream.
var errLostEnd = errors.New("the broker lost the end of the stream")

// missing reports whether a message is missing between two consecutive headers: inside a window, at the end
// of the first one's window, or at the start of the second one's.
func missing(prev, next *outbox.Header) bool {
	if prev.Due == next.Due {
		return next.N != prev.N+1
	}
	return prev.N != prev.Of-1 || next.N != 0
}

// gapFault says that messages are missing: removed from the stream before they were read or, by the headers,
// never in it.
func gapFault(cfg *Config, from, to uint64, removed bool) error {
	hint := fmt.Sprintf("Let the events come again from the table (`outflow replay --from table --to "+
		"consumer:%s`), or do without them: Config.AcceptGap", cfg.Name)
	has := "not in the stream any more"
	if cfg.Archive != nil {
		has = "neither in the stream nor in its archive"
	} else {
		hint = "If `outflow archive` has them, set Config.Archive. " + hint
	}
	if !removed {
		return fault(ErrGap, nil, hint,
			"stream %s, consumer %s: the headers at sequence %d show that messages are missing before it",
			cfg.Stream, cfg.Name, to)
	}
	f := fault(ErrGap, nil, hint, "stream %s, consumer %s: the messages of sequences %d to %d are %s, "+
		"and were not read", cfg.Stream, cfg.Name, from, to, has)
	return &possibleLoss{f, fmt.Sprintf("gap from %d", from)}
}

func otherMessage(cfg *Config, seq uint64, want, got offset) error {
	return fault(ErrStream, nil, hintStream(cfg),
		"stream %s, consumer %s: sequence %d was the event at position %v when it was read, "+
			"and is %v now", cfg.Stream, cfg.Name, seq, want.Pos, got.Pos)
}

func hintStream(cfg *Config) string {
	return fmt.Sprintf("The stream was made anew or put back from an older copy. Decide from where the "+
		"consumer goes on "+
		"(`outflow consumer rewind %s`), or build its tables anew under another Name", cfg.Name)
}

// notFound reports whether the stream does not exist.
func notFound(err error) bool { return errors.Is(err, jetstream.ErrStreamNotFound) }
