package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer/internal/stream"
)

// item is a piece of work for a worker: an event, a release or, with neither, an offset to advance to.
type item struct {
	event       *Event
	number      uint64 // in the flow
	republished bool   // the event may have been published before, under another sequence

	to      offset // nothing up to here is left for the worker
	release *parkedDocument
}

// worker applies the events of one partition, one after the other. Other goroutines only push to its queue;
// everything not under mu belongs to the goroutine of loop.
type worker struct {
	*run
	partition int
	offset    offset // as it is stored
	given     uint64 // the dispatcher's: the newest message that it gave, or told to advance to
	batch     batchSize
	used      time.Time // when the open transaction was last used for certain

	mu        sync.Mutex
	queue     []item
	releasing map[string]bool // documents whose release it has been given
	closed    bool
	wake      chan struct{}
}

func newWorker(r *run, partition int, at offset) *worker {
	return &worker{run: r, partition: partition, offset: at, wake: make(chan struct{}, 1),
		releasing: map[string]bool{},
		batch:     batchSize{now: r.cfg.Batch, most: r.cfg.Batch, calm: calmFirst}}
}

func (w *worker) push(it item) {
	w.mu.Lock()
	w.queue = append(w.queue, it)
	w.mu.Unlock()
	w.signal()
}

// pushRelease pushes the release of a document, unless that is being done.
func (w *worker) pushRelease(d *parkedDocument) {
	w.mu.Lock()
	is := w.releasing[d.document]
	w.releasing[d.document] = true
	w.mu.Unlock()
	if !is {
		w.push(item{release: d})
	}
}

// released: the release of a document is over, for now.
func (w *worker) released(document string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.releasing, document)
}

// releases returns how many documents are being released.
func (w *worker) releases() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.releasing)
}

// close is called after the last push.
func (w *worker) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.signal()
}

func (w *worker) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// errStopping ends a worker that is stopped while it works.
var errStopping = errors.New("stopping")

// loop works until the worker is closed and its queue is empty, or the consumer stops.
func (w *worker) loop() error {
	for {
		items, err := w.next()
		if err == nil && len(items) == 0 {
			return nil
		}
		if err == nil {
			err = w.perform(items)
		}
		if errors.Is(err, errStopping) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// perform does the work that next has returned.
func (w *worker) perform(items []item) error {
	switch first := items[0]; {
	case first.event != nil:
		return w.applyNew(items)
	case first.release != nil:
		return w.release(first.release)
	default:
		return w.advance(first)
	}
}

// next waits for work: events that may share a transaction, or one item of another kind. It returns nothing
// when the worker is closed and its queue is empty, or when the consumer stops.
func (w *worker) next() ([]item, error) {
	for {
		w.mu.Lock()
		stopping := w.stop.Err() != nil
		if stopping && w.closed {
			items := w.drainLocked()
			w.mu.Unlock()
			return items, nil
		}
		if len(w.queue) > 0 && !stopping {
			n := 1
			for n < len(w.queue) && n < w.batch.now && w.queue[0].event != nil && w.queue[n].event != nil {
				n++
			}
			items := w.queue[:n:n]
			w.queue = w.queue[n:]
			w.mu.Unlock()
			return items, nil
		}
		closed := w.closed
		w.mu.Unlock()
		if closed {
			return nil, nil
		}
		var stopped <-chan struct{}
		if !stopping {
			stopped = w.stop.Done()
		}
		select {
		case <-w.wake:
		case <-stopped:
		case <-w.work.Done():
			return nil, context.Cause(w.work)
		}
	}
}

// drainLocked empties the queue when the consumer stops. If it holds no event, the offset may still advance.
func (w *worker) drainLocked() []item {
	queue := w.queue
	w.queue = nil
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

// advance moves the offset of an idle worker, so that the next session need not read again what other workers
// have done. A lost offset stays while the events up to it are published again: it says that they were
// applied.
func (w *worker) advance(it item) error {
	if it.to.Seq <= w.offset.Seq || it.republished && w.offset.Lost && it.to.order(w.offset) < 0 {
		return nil
	}
	if err := insist(w.work, func() error {
		return w.store.move(w.work, w.source, w.partition, w.offset, it.to, nothing)
	}); err != nil {
		return w.cause(err)
	}
	w.offset = it.to
	return nil
}

// applyNew applies the events that were not applied before.
func (w *worker) applyNew(items []item) error {
	todo := items[:0]
	for _, it := range items {
		applied, err := w.applied(it)
		if err != nil {
			return err
		}
		if applied {
			w.met.passed(w.partition)
			w.flow.finish(it.number)
			continue
		}
		todo = append(todo, it)
	}
	return w.apply(todo)
}

// applied reports whether an event was applied before.
func (w *worker) applied(it item) (bool, error) {
	m := offsetOf(it.event.seq, &it.event.head)
	if m.Seq == w.offset.Seq && w.offset.known() && m.Pos != w.offset.Pos {
		return false, otherMessage(w.cfg, m.Seq, w.offset, m)
	}
	return w.offset.covers(m, it.republished), nil
}

// apply applies events in few transactions. If one fails, it uses smaller ones to find the event that fails.
func (w *worker) apply(items []item) error {
	for len(items) > 0 {
		n := min(len(items), w.batch.now)
		if !w.store.transactional() {
			n = 1
		}
		if n == 1 {
			if err := w.applyOne(items[0], nil); err != nil {
				return err
			}
			items = items[1:]
			w.batch.committed()
			continue
		}
		at, cause, err := w.attempt(items[:n])
		switch {
		case err != nil:
			return err
		case cause == nil:
			items = items[n:]
			w.batch.committed()
			continue
		case conflict(cause):
			w.met.conflict()
			w.batch.conflicted(n)
			continue
		case errors.Is(cause, errShort):
			w.cfg.Log.Warn("the next transactions have fewer events", "had", n, "err", cause)
			w.batch.conflicted(n)
			continue
		case at < 0: // the commit was refused
			for _, it := range items[:n] {
				if err := w.applyOne(it, nil); err != nil {
					return err
				}
			}
			items = items[n:]
			continue
		}
		if err := w.apply(items[:at]); err != nil {
			return err
		}
		if adviceOf(cause).waits() {
			err = w.applyOne(items[at], cause)
		} else {
			items[at].event.Attempt++
			err = w.applyOne(items[at], nil)
		}
		if err != nil {
			return err
		}
		items = items[at+1:]
	}
	return nil
}

// batchSize is how many events may share a transaction. The more rows a transaction locks, the more likely is
// a conflict with another partition's: each one halves the size, and makes the time until it grows again
// longer.
type batchSize struct {
	now, most int
	count     int // transactions committed since it changed
	calm      int // so many are needed before it grows
}

const calmFirst, calmMost = 64, 1 << 20

func (b *batchSize) conflicted(n int) {
	b.now, b.count, b.calm = max(1, n/2), 0, min(2*b.calm, calmMost)
}

func (b *batchSize) committed() {
	if b.now == b.most {
		return
	}
	if b.count++; b.count >= b.calm {
		b.now, b.count = min(2*b.now, b.most), 0
	}
}

// attempt applies events and moves the offset in one transaction. It returns the index of the event that
// failed and why; -1 if the commit was refused. err ends the session.
func (w *worker) attempt(items []item) (at int, cause, err error) {
	if w.stop.Err() != nil {
		return 0, nil, errStopping
	}
	last, all := items[len(items)-1].event, len(items)
	if err := w.crash(stream.AtBegin, items[0].event); err != nil {
		return 0, nil, err
	}
	var parked map[*Event]bool
	var handled time.Time
	var ended error // the server has ended the transaction, and nothing of it is committed
	rest := 1       // from where on a stop may leave the items to the next session
	to := offsetOf(last.seq, &last.head)
	err = w.store.move(w.work, w.source, w.partition, w.offset, to,
		func(ctx context.Context, tx pgx.Tx) (err error) {
			began := time.Now()
			w.used = began
			if parked, err = w.parkBehind(ctx, tx, items); err != nil {
				return err
			}
			for i, it := range items {
				if parked[it.event] { // it is in the table: the offset must move past it
					rest = i + 1
				}
			}
			for i, it := range items {
				if i >= rest && w.stop.Err() != nil { // commit what is done
					last = items[i-1].event
					items = items[:i]
					planned := to
					to = offsetOf(last.seq, &last.head)
					if err := w.store.shorten(ctx, tx, w.source, w.partition, planned, to); err != nil {
						return err
					}
					break
				}
				if parked[it.event] {
					continue
				}
				if ended = w.keepOpen(ctx, tx); ended != nil {
					return ended
				}
				if err := w.handle(ctx, tx, it.event); err != nil {
					at, cause = i, err
					return err
				}
				if err := w.crash(stream.AtHandled, it.event); err != nil {
					return err
				}
			}
			handled = time.Now()
			w.used = began // what has taken long in all may have ended: from the commit on nobody could tell
			ended = w.keepOpen(ctx, tx)
			return ended
		})
	switch {
	case err == nil:
	case hanging(cause) != nil:
		return 0, nil, cause
	case w.work.Err() != nil:
		return 0, nil, context.Cause(w.work)
	case cause != nil && errors.Is(err, errEnded):
		return 0, nil, fault(ErrHandler, err, hintEnded, "%s", endedAt(items, at))
	case cause != nil:
		return at, cause, nil
	case ended != nil:
		return -1, fmt.Errorf("%w: %w", errShort, ended), nil
	case !handled.IsZero() && refused(err), conflict(err):
		return -1, err, nil
	default:
		return 0, nil, w.cause(err)
	}
	if w.crash(stream.AtCommit, last) != nil {
		return 0, nil, errUnknown
	}
	w.committed(items, to, parked, time.Since(handled))
	if len(items) < all {
		return 0, nil, errStopping
	}
	return 0, nil, w.crash(stream.AtDone, last)
}

// endedAt says what may have happened if a handler ended the transaction itself: that has moved the offset to
// the last event of the batch.
func endedAt(items []item, at int) string {
	e := items[at].event
	s := fmt.Sprintf("document %q, sequence %d", e.Document, e.seq)
	if last := len(items) - 1; at < last {
		s += fmt.Sprintf(": if it was committed, %d later events of the partition, of sequences %d to %d, "+
			"count as done and are not", last-at, items[at+1].event.seq, items[last].event.seq)
	}
	return s
}

// parkBehind parks the events whose document is parked already. See [parking.parkBehind].
func (w *worker) parkBehind(ctx context.Context, tx pgx.Tx, items []item) (map[*Event]bool, error) {
	if tx == nil {
		return nil, nil
	}
	var may []*Event
	for _, it := range items {
		if w.parking.may(it.event.Document) {
			may = append(may, it.event)
		}
	}
	return w.parking.parkBehind(ctx, tx, may)
}

// errShort: a transaction may have taken longer than the server allows.
var errShort = errors.New("the transaction ended while it waited for the handler")

// keepEvery is how long a transaction may go unused without a question to the server. It is to be shorter
// than any limit that the server has for transactions.
const keepEvery = 100 * time.Millisecond

// keepOpen is called before each call of the handler, and before the commit. The server ends a transaction
// that is idle for longer than one call may take, and none of many calls need use it.
func (w *worker) keepOpen(ctx context.Context, tx pgx.Tx) error {
	if tx == nil || time.Since(w.used) < keepEvery {
		return nil
	}
	w.used = time.Now()
	_, err := tx.Exec(ctx, "SELECT 1")
	return err
}

func (w *worker) handle(ctx context.Context, tx pgx.Tx, e *Event) error {
	err := w.calls.invoke(ctx, tx, e)
	w.met.attempted(w.partition, err)
	return err
}

func (w *worker) committed(items []item, to offset, parked map[*Event]bool, took time.Duration) {
	w.offset = to
	w.fails.passed(w.partition)
	events := make([]*Event, 0, len(items))
	for _, it := range items {
		if parked[it.event] {
			if !it.event.parkedBefore {
				w.met.parked(causeBehind)
			}
		} else {
			events = append(events, it.event)
		}
		w.flow.finish(it.number)
	}
	w.met.transaction(w.partition, events, took)
}

// crash lets tests crash the consumer.
func (w *worker) crash(at stream.Point, e *Event) error {
	if w.cfg.hooks.Crash == nil {
		return nil
	}
	if err := w.cfg.hooks.Crash(at, e.seq); err != nil {
		return crashError{err}
	}
	return nil
}
