package consumer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// applyOne applies one event, and parks it if all attempts fail. cause is why an attempt has failed already,
// if the next one is to wait for that.
func (w *worker) applyOne(it item, cause error) error {
	f := failing{FailingEvent: w.fails.of(w.partition, it.event)}
	it.event.Attempt = f.Attempt
	defer func() {
		if !f.Since.IsZero() {
			w.met.held(w.track.passed(w.partition))
		}
	}()
	for {
		if cause == nil {
			var err error
			if _, cause, err = w.attempt([]item{it}); err != nil || cause == nil {
				return err
			}
		}
		pause, park := w.failed(it.event, cause, &f)
		if park {
			return w.park(it, cause)
		}
		w.fails.note(f.FailingEvent)
		if err := pauseFor(w.wait, pause); err != nil {
			return w.cause(errStopping)
		}
		cause = nil
	}
}

// failures is what Run knows of events of a stream that fail, from one session to the next: for how long they
// have, and how often, does not begin anew with a session.
type failures struct {
	created time.Time // the stream
	mu      sync.Mutex
	newest  map[int]FailingEvent // by partition
}

// failures are those of a source's stream. In one that was made anew other events have these sequences.
func (r *runner) failures(source string, created time.Time) *failures {
	if f := r.fails[source]; f != nil && f.created.Equal(created) {
		return f
	}
	if r.fails == nil {
		r.fails = map[string]*failures{}
	}
	r.fails[source] = &failures{created: created, newest: map[int]FailingEvent{}}
	return r.fails[source]
}

// of is what is known of an event of a partition.
func (k *failures) of(partition int, e *Event) FailingEvent {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := FailingEvent{Partition: partition, Document: e.Document, Sequence: e.seq, Attempt: e.Attempt}
	if was := k.newest[partition]; was.Sequence == f.Sequence && was.Document == f.Document {
		f.Attempt, f.Since = max(f.Attempt, was.Attempt), was.Since
	}
	return f
}

func (k *failures) note(f FailingEvent) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.newest[f.Partition] = f
}

// passed: a partition has moved on.
func (k *failures) passed(partition int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.newest, partition)
}

// failing is an event that fails, as its worker knows it.
type failing struct {
	FailingEvent
	tries, conflicts int
	told             time.Time // when the log last had that it is held
}

// failed decides what comes after a failed attempt: a pause before the next one, or parking. It says so in
// the log and in the state.
func (w *worker) failed(e *Event, cause error, f *failing) (pause time.Duration, park bool) {
	if f.Since.IsZero() {
		f.Since = time.Now()
	}
	f.tries++
	about := []any{"document", e.Document, "seq", e.seq, "attempt", e.Attempt, "err", cause}
	pause, f.Held = w.cfg.Backoff.pause(f.tries), false
	switch a := adviceOf(cause); {
	case a.how == halt:
		f.Held = true
		w.held(f, "a handler halts its partition: the event is tried again until it succeeds", about)
	case a.how == later:
		if a.after > 0 {
			pause = a.after
		}
		w.cfg.Log.Info("an event is to be tried again later", append(about, "after", pause)...)
	case conflict(cause):
		w.met.conflict()
		if f.conflicts++; f.conflicts >= 8 && f.conflicts&(f.conflicts-1) == 0 {
			w.cfg.Log.Warn("an event conflicts with other transactions again and again",
				append(about, "times", f.conflicts)...)
		}
	case a.how == parked || e.Attempt >= w.cfg.MaxAttempts &&
		(itsOwn(cause) || time.Since(f.Since) >= w.cfg.ParkAfter):
		var dead *DeadLetterError
		if errors.As(cause, &dead) || w.limit.allows(time.Now()) {
			return 0, true
		}
		f.Held, pause = true, w.cfg.Backoff.pause(maxTries)
		w.held(f, "an event failed for good, but too many were parked lately: it is tried again until it "+
			"succeeds, or parking is allowed again (Config.ParkLimit)", about)
		e.Attempt++
	default:
		w.cfg.Log.Warn("an event failed", about...)
		e.Attempt++
	}
	f.Attempt, f.Err = e.Attempt, cause
	w.met.held(w.track.failed(f.FailingEvent))
	return pause, false
}

// held tells that a partition is held, at first and now and then.
func (w *worker) held(f *failing, what string, about []any) {
	if time.Since(f.told) >= remindEvery {
		f.told = time.Now()
		w.cfg.Log.Error(what, append(about, "since", f.Since)...)
	}
}

const maxTries = 64 // from which on Backoff waits longest

// parkLimit bounds how many events are parked for failing: where more fail, it is rather something that all
// of them need.
type parkLimit struct {
	most int // in any parkWindow; below 0: no limit

	mu    sync.Mutex
	times []time.Time // of the newest ones
}

const parkWindow = 10 * time.Minute

// allows reports whether another event may be parked now, and counts it if so.
func (l *parkLimit) allows(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.most < 0 {
		return true
	}
	for len(l.times) > 0 && now.Sub(l.times[0]) > parkWindow {
		l.times = l.times[1:]
	}
	if len(l.times) >= l.most {
		return false
	}
	l.times = append(l.times, now)
	return true
}

// conflict reports whether a transaction failed because of a concurrent one, which is not the event's fault.
func conflict(err error) bool {
	code := sqlState(err)
	return code == "40001" || code == "40P01"
}

// insist makes a transaction again for as long as a concurrent one gets in its way.
func insist(ctx context.Context, do func() error) error {
	err := do()
	for conflict(err) && ctx.Err() == nil {
		err = do()
	}
	return err
}

// itsOwn reports whether the database refuses the event's data or what it breaks: nothing that passes by
// itself.
func itsOwn(err error) bool { return class(err) == "22" || class(err) == "23" }

// park parks an event that failed for good. All later events of its document will follow it.
func (w *worker) park(it item, cause error) error {
	e := it.event
	to := offsetOf(e.seq, &e.head)
	if w.store.transactional() {
		err := insist(w.work, func() error {
			return w.store.move(w.work, w.source, w.partition, w.offset, to,
				func(ctx context.Context, tx pgx.Tx) error { return w.parking.park(ctx, tx, e, cause) })
		})
		if err != nil {
			return w.cause(err)
		}
		w.parking.add(e.Document)
		w.met.parked(causePoison)
		w.cfg.Log.Error("an event failed for good: its document is parked", "document", e.Document, "seq",
			e.seq, "position", e.Position, "attempts", e.Attempt, "err", cause)
		if err := w.onParked(e, cause); err != nil {
			return err
		}
	} else if err := w.onPoison(e, cause); err != nil {
		return err
	} else if err := w.store.move(w.work, w.source, w.partition, w.offset, to, nothing); err != nil {
		return w.cause(err)
	}
	w.offset = to
	w.fails.passed(w.partition)
	w.flow.finish(it.number)
	return nil
}

// onParked tells Config.OnParked. It only fails if that hangs.
func (w *worker) onParked(e *Event, cause error) error {
	if w.cfg.OnParked == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(w.work, w.cfg.Timeout)
	defer cancel()
	err := w.calls.call(ctx, e, func(e *Event) error {
		_ = w.cfg.Schema.upcast(e) // that may be why it failed
		w.cfg.OnParked(ctx, e, cause)
		return nil
	})
	if err != nil && hanging(err) == nil {
		w.cfg.Log.Error("Config.OnParked failed", "document", e.Document, "seq", e.seq, "err", err)
		return nil
	}
	return err
}

// onPoison passes an event that failed for good to Config.OnPoison.
func (w *worker) onPoison(e *Event, cause error) error {
	failed := fault(ErrPoison, cause, "Mend the handler and start again; or set Config.OnPoison to take "+
		"such events; with Postgres marks "+
		"they are parked", "document %q, sequence %d, position %v, after %d attempts", e.Document, e.seq,
		e.Position, e.Attempt)
	if w.cfg.OnPoison == nil {
		return failed
	}
	err := w.calls.call(w.work, e, func(e *Event) error {
		_ = w.cfg.Schema.upcast(e) // that may be why it failed
		return w.cfg.OnPoison(w.work, e, cause)
	})
	if hanging(err) != nil {
		return err
	}
	if err != nil {
		failed.Message += ": Config.OnPoison: " + err.Error()
		return failed
	}
	return nil
}

// release releases the first parked events of a document. The rest are queued behind the work that has come
// in meanwhile.
func (w *worker) release(d *parkedDocument) error {
	within := func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
		return w.store.move(ctx, w.source, w.partition, w.offset, w.offset,
			func(ctx context.Context, tx pgx.Tx) error {
				w.used = time.Now()
				return do(ctx, tx)
			})
	}
	var since time.Time // an event fails
	handle := func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if err := w.keepOpen(ctx, tx); err != nil {
			return err
		}
		if err := w.handle(ctx, tx, e); err != nil {
			if since.IsZero() {
				since = time.Now()
			}
			advised, next := adviceOf(err), e.Attempt
			if !conflict(err) && !advised.waits() {
				next++
			}
			w.met.held(w.track.failed(FailingEvent{Partition: w.partition, Document: e.Document,
				Sequence: e.seq, Attempt: next, Since: since, Held: advised.how == halt, Err: err}))
			return err
		}
		return w.keepOpen(ctx, tx) // an event whose call takes too long has failed
	}
	defer func() {
		if !since.IsZero() {
			w.met.held(w.track.passed(w.partition))
		}
	}()
	_, again, err := w.parking.release(w.work, w.stop, d.document, within, handle)
	if err != nil {
		return w.cause(err)
	}
	if again && w.stop.Err() == nil {
		w.push(item{release: d})
	} else {
		w.released(d.document)
	}
	return nil
}

// cause is why the session ended, if it has; otherwise the transaction's error.
func (w *worker) cause(err error) error {
	if cause := context.Cause(w.work); cause != nil {
		return cause
	}
	return err
}
