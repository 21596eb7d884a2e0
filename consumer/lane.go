package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// item is what a lane has to do.
type item struct {
	event  *Event
	number uint64 // in the flow
	again  bool   // the event may be one that comes again under a new sequence

	to      mark            // without an event: nothing up to here is the lane's any more
	release *parkedDocument // without an event: release it
}

// lane does what falls to one partition, one thing after the other. The pump pushes; everything else is its own goroutine's.
type lane struct {
	*phase
	partition int
	mark      mark // as the store has it

	mu     sync.Mutex
	queue  []item
	closed bool
	moved  mark // mark, for others
	wake   chan struct{}
}

func newLane(p *phase, partition int, at mark) *lane {
	return &lane{phase: p, partition: partition, mark: at, moved: at, wake: make(chan struct{}, 1)}
}

func (l *lane) push(it item) {
	l.mu.Lock()
	l.queue = append(l.queue, it)
	l.mu.Unlock()
	l.rouse()
}

// set says that the store has moved the mark.
func (l *lane) set(to mark) {
	l.mark = to
	l.mu.Lock()
	l.moved = to
	l.mu.Unlock()
}

// close says that nothing more is pushed.
func (l *lane) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.rouse()
}

func (l *lane) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// errStopping ends a lane that was told to stop in the middle of its work.
var errStopping = errors.New("stopping")

// run works until the lane is closed and has nothing left, or the consumer stops.
func (l *lane) run() error {
	for {
		items, err := l.next()
		if err == nil && len(items) == 0 {
			return nil
		}
		switch {
		case err != nil:
		case items[0].event != nil:
			err = l.events(items)
		case items[0].release != nil:
			err = l.release(items[0].release)
		default:
			err = l.advance(items[0])
		}
		if errors.Is(err, errStopping) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// next waits for work: events that may share a transaction, or one other thing. There is none when the lane is closed and has done
// everything, or has been stopped.
func (l *lane) next() ([]item, error) {
	for {
		l.mu.Lock()
		stopping := l.stop.Err() != nil
		if stopping && l.closed {
			items := l.lastLocked()
			l.mu.Unlock()
			return items, nil
		}
		if len(l.queue) > 0 && !stopping {
			n := 1
			for n < len(l.queue) && n < l.cfg.Batch && l.queue[0].event != nil && l.queue[n].event != nil {
				n++
			}
			items := l.queue[:n:n]
			l.queue = l.queue[n:]
			l.mu.Unlock()
			return items, nil
		}
		closed := l.closed
		l.mu.Unlock()
		if closed {
			return nil, nil
		}
		var stopped <-chan struct{}
		if !stopping {
			stopped = l.stop.Done()
		}
		select {
		case <-l.wake:
		case <-stopped:
		case <-l.work.Done():
			return nil, context.Cause(l.work)
		}
	}
}

// lastLocked drops what is queued when the consumer stops. If no event is among it the mark may still move.
func (l *lane) lastLocked() []item {
	queue := l.queue
	l.queue = nil
	for _, it := range queue {
		if it.event != nil {
			return nil
		}
	}
	if n := len(queue); n > 0 && queue[n-1].release == nil {
		return queue[n-1:]
	}
	return nil
}

// advance moves the mark of a lane that has nothing to do, so that the next session need not read again what others have done. While
// events come again the mark stays, as long as it knows more of them.
func (l *lane) advance(it item) error {
	if it.to.Seq <= l.mark.Seq || it.again && l.mark.Holed && it.to.order(l.mark) < 0 {
		return nil
	}
	if err := l.store.move(l.work, l.source, l.partition, l.mark, it.to, nothing); err != nil {
		return l.ended(err)
	}
	l.set(it.to)
	return nil
}

// events has the effects of events, in their order, of those that have not had it.
func (l *lane) events(items []item) error {
	todo := items[:0]
	for _, it := range items {
		had, err := l.had(it)
		if err != nil {
			return err
		}
		if had {
			l.met.passed(l.partition)
			l.flow.finish(it.number)
			continue
		}
		todo = append(todo, it)
	}
	return l.do(todo)
}

// had reports whether an event has had its effect.
func (l *lane) had(it item) (bool, error) {
	m := markOf(it.event.seq, &it.event.head)
	if m.Seq == l.mark.Seq && l.mark.known() && m.Pos != l.mark.Pos {
		return false, otherMessage(l.cfg, m.Seq, l.mark, m)
	}
	if l.mark.has(m, it.again) {
		return true, nil
	}
	for i := range l.before {
		if l.before[i].of(it.event.hash).has(m, it.again) {
			return true, nil
		}
	}
	return false, nil
}

// do has the effects of events: all of them in one transaction, and where that fails, so that the one that fails is found.
func (l *lane) do(items []item) error {
	for len(items) > 0 {
		n := len(items)
		if !l.store.exact() {
			n = 1
		}
		if n == 1 {
			if err := l.one(items[0]); err != nil {
				return err
			}
			items = items[1:]
			continue
		}
		at, cause, err := l.attempt(items)
		switch {
		case err != nil:
			return err
		case cause == nil:
			return nil
		case at < 0: // the commit was refused
			for _, it := range items {
				if err := l.one(it); err != nil {
					return err
				}
			}
			return nil
		}
		if err := l.do(items[:at]); err != nil {
			return err
		}
		items[at].event.Attempt++
		if err := l.one(items[at]); err != nil {
			return err
		}
		items = items[at+1:]
	}
	return nil
}

// one has the effect of one event, tries again, and at last parks it.
func (l *lane) one(it item) error {
	e := it.event
	for {
		_, cause, err := l.attempt([]item{it})
		if err != nil || cause == nil {
			return err
		}
		tries := e.Attempt
		if isPoison(cause) || e.Attempt >= l.cfg.MaxAttempts && !conflict(cause) {
			return l.park(it, cause)
		}
		if !conflict(cause) {
			l.cfg.Log.Warn("an event failed", "document", e.Document, "seq", e.seq, "attempt", e.Attempt, "err", cause)
			e.Attempt++
		}
		if err := l.cfg.Backoff.wait(l.wait, tries); err != nil {
			return l.ended(errStopping)
		}
	}
}

// conflict reports whether a transaction failed because of another one: it is no fault of the event.
func conflict(err error) bool {
	code := sqlState(err)
	return code == "40001" || code == "40P01"
}

// attempt has the effects of events in one transaction with the mark. It returns which event failed, or -1 where the commit was refused,
// and of what; err ends the session.
func (l *lane) attempt(items []item) (at int, cause, err error) {
	if l.stop.Err() != nil {
		return 0, nil, errStopping
	}
	last := items[len(items)-1].event
	if err := l.fault(AtBegin, items[0].event); err != nil {
		return 0, nil, err
	}
	var parked map[*Event]bool
	var handled time.Time
	to := markOf(last.seq, &last.head)
	err = l.store.move(l.work, l.source, l.partition, l.mark, to, func(ctx context.Context, tx pgx.Tx) (err error) {
		if parked, err = l.behind(ctx, tx, items); err != nil {
			return err
		}
		for i, it := range items {
			if parked[it.event] {
				continue
			}
			if err := l.handle(ctx, tx, it.event); err != nil {
				at, cause = i, err
				return err
			}
			if err := l.fault(AtHandled, it.event); err != nil {
				return err
			}
		}
		handled = time.Now()
		return nil
	})
	switch {
	case err == nil:
	case l.work.Err() != nil:
		return 0, nil, context.Cause(l.work)
	case errors.Is(cause, errEnded):
		return 0, nil, &Fault{Kind: ErrHandler, What: endedAt(items, at), Err: cause, Cure: cureEnded}
	case cause != nil:
		return at, cause, nil
	case !handled.IsZero() && refused(err), conflict(err):
		return -1, err, nil
	default:
		return 0, nil, l.ended(err)
	}
	if l.fault(AtCommit, last) != nil {
		return 0, nil, errUnknown
	}
	l.committed(items, to, parked, time.Since(handled))
	return 0, nil, l.fault(AtDone, last)
}

// endedAt says what may have happened where a handler ended the transaction: the mark is in it, at the last event of the batch.
func endedAt(items []item, at int) string {
	e := items[at].event
	s := fmt.Sprintf("document %q, sequence %d", e.Document, e.seq)
	if last := len(items) - 1; at < last {
		s += fmt.Sprintf(": if it was committed, %d later events of the partition, of sequences %d to %d, count as done and are not",
			last-at, items[at+1].event.seq, items[last].event.seq)
	}
	return s
}

// behind parks those events whose document is parked.
func (l *lane) behind(ctx context.Context, tx pgx.Tx, items []item) (map[*Event]bool, error) {
	if tx == nil {
		return nil, nil
	}
	var may []*Event
	for _, it := range items {
		if l.parking.may(it.event.Document) {
			may = append(may, it.event)
		}
	}
	return l.parking.behind(ctx, tx, may)
}

func (l *lane) handle(ctx context.Context, tx pgx.Tx, e *Event) error {
	err := effect(ctx, l.cfg, l.handler, tx, e)
	l.met.attempted(l.partition, err)
	return err
}

func (l *lane) committed(items []item, to mark, parked map[*Event]bool, took time.Duration) {
	l.set(to)
	events := make([]*Event, 0, len(items))
	for _, it := range items {
		if parked[it.event] {
			l.met.parked(causeBehind)
		} else {
			events = append(events, it.event)
		}
		l.flow.finish(it.number)
	}
	l.met.transaction(l.partition, events, took)
}

// park takes an event that failed for good out of the way, with all later ones of its document.
func (l *lane) park(it item, cause error) error {
	e := it.event
	to := markOf(e.seq, &e.head)
	if l.store.exact() {
		err := l.store.move(l.work, l.source, l.partition, l.mark, to, func(ctx context.Context, tx pgx.Tx) error { return l.parking.park(ctx, tx, e, cause) })
		if err != nil {
			return l.ended(err)
		}
		l.parking.keep(e.Document)
		l.met.parked(causePoison)
		l.cfg.Log.Error("an event failed for good: its document is parked", "document", e.Document, "seq", e.seq, "position", e.Position,
			"attempts", e.Attempt, "err", cause)
	} else if err := l.give(e, cause); err != nil {
		return err
	} else if err := l.store.move(l.work, l.source, l.partition, l.mark, to, nothing); err != nil {
		return l.ended(err)
	}
	l.set(to)
	l.flow.finish(it.number)
	return nil
}

// give hands an event that failed for good to Config.OnPoison, as there is no table to park it in.
func (l *lane) give(e *Event, cause error) error {
	failed := &Fault{Kind: ErrPoison, What: fmt.Sprintf("document %q, sequence %d, position %v, after %d attempts", e.Document, e.seq, e.Position, e.Attempt), Err: cause,
		Cure: "Mend the handler and start again; or set Config.OnPoison to take such events; with Postgres marks they are parked"}
	if l.cfg.OnPoison == nil {
		return failed
	}
	if err := l.cfg.OnPoison(l.work, e, cause); err != nil {
		failed.What += ": Config.OnPoison: " + err.Error()
		return failed
	}
	return nil
}

// release takes the first parked events of a document up again. The rest of them queues up behind what the lane has to do by now.
func (l *lane) release(d *parkedDocument) error {
	within := func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
		return l.store.move(ctx, l.source, l.partition, l.mark, l.mark, do)
	}
	handle := func(ctx context.Context, tx pgx.Tx, e *Event) error { return l.handle(ctx, tx, e) }
	_, again, err := l.parking.release(l.work, l.stop, d.document, within, handle)
	if err != nil {
		return l.ended(err)
	}
	if again && l.stop.Err() == nil {
		l.push(item{release: d})
	} else {
		l.releasing.Delete(d.document)
	}
	return nil
}

// ended says why a transaction ended the session: where the session was over already, for what reason.
func (l *lane) ended(err error) error {
	if cause := context.Cause(l.work); cause != nil {
		return cause
	}
	return err
}

// fault is where tests crash the consumer.
func (l *lane) fault(at Point, e *Event) error {
	if l.cfg.Faults == nil {
		return nil
	}
	if err := l.cfg.Faults.At(at, e); err != nil {
		return crashError{err}
	}
	return nil
}
