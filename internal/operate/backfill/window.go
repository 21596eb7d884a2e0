package backfill

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
	"github.com/outflowhq/outflow/sink"
)

const pollEvery = 50 * time.Millisecond

// Window is the window that rows are published as: one message each, at consecutive sequences and indexes.
type Window struct {
	Conns    *Conns
	Snapshot *tablesnapshot.Snapshot
	Query    tablesnapshot.Query // which rows, in which order; the columns are the window's to set

	Of    int    // how many rows there are
	Index uint32 // of the first event
	// From its Due on the WAL brings what follows; its Seq is the stream's last sequence before the window.
	// What it remembers does not count.
	Checkpoint relay.Checkpoint
	End        uint64 // of the stream, as [Readings.End] says

	Wanted func(*relay.Event) bool // which rows of the query are published; nil: all
	Sent   func()                  // called after each row that was handed to the publisher; may be nil

	memory *memory // nil unless gap mode is in force
	done   uint64
}

// After is the checkpoint behind what was published.
func (w *Window) After() relay.Checkpoint {
	p := w.Checkpoint
	p.Seq += w.done
	p.Remembered = w.memory.count()
	return p
}

// Publish publishes the rows, waits until all of them are acknowledged, and returns how many there were,
// which must be Of. A fault of class Poison names a row that can't be published; all rows before it are
// acknowledged then.
func (w *Window) Publish(ctx context.Context) (uint64, error) {
	l, at := w.Conns, w.Checkpoint
	if at.Settings.ByGap() {
		var err error
		if w.memory, err = l.remember(ctx, at.Seq, at.Settings.Gap.Memory); err != nil {
			return 0, err
		}
	}
	if w.Of == 0 {
		return 0, nil
	}
	if err := l.NATS.Watch(ctx); err != nil {
		return 0, err
	}
	out := &writer{pub: l.NATS.Publisher(at.Seq), lost: l.NATS.Lost()}
	if w.End < at.Seq {
		out.pub.AfterLoss(w.End + 1)
	}
	task := progress.Count(ctx, "publishing", "rows", int64(w.Of))
	defer task.End()
	n := 0
	h := outbox.Header{Of: w.Of, Due: at.Due, Thru: at.Due, Timeline: at.Timeline}
	err := w.events(ctx, w.Query, func(e *relay.Event) error {
		if n == w.Of { // it would be behind the end of the window
			return fmt.Errorf("%d events were missing, and more rows were read of them", w.Of)
		}
		e.Pos = outbox.Position{LSN: at.Due, Index: w.Index + uint32(n)}
		h.Pos, h.N, h.ID, h.Key = e.Pos, n, e.ID, e.Key
		if w.memory != nil {
			h.Counter = w.memory.place(e)
		}
		if err := out.publish(ctx, e, &h); err != nil {
			return err
		}
		if n == 0 { // once this one is acknowledged, nothing published to an older ingress gets in
			if err := out.settle(ctx); err != nil {
				return err
			}
		}
		n++
		task.Set(int64(n))
		if w.Sent != nil {
			w.Sent()
		}
		return nil
	})
	if err == nil {
		err = out.settle(ctx)
	}
	if err == nil && n != w.Of {
		err = fmt.Errorf("%d events were missing, and %d rows were read of them", w.Of, n)
	}
	w.done = uint64(n)
	return w.done, err
}

// ReadBack makes sure that the stream has what was published, and nothing else in between. That each message
// was stored at its expected sequence does not show it: if a suspended outflow wakes up in the middle, its
// message takes a sequence, ours is refused, and our next one finds the last sequence that it expects. gone
// is how many the stream's own limits have replaced or discarded already.
func (w *Window) ReadBack(ctx context.Context) (gone uint64, err error) {
	if w.done == 0 {
		return 0, nil
	}
	limits, err := w.Conns.NATS.Limits(ctx)
	if err != nil {
		return 0, err
	}
	n, wrong := uint64(0), uint64(0)
	err = w.Conns.Messages(ctx, w.Checkpoint.Seq+1, w.Checkpoint.Seq+w.done, func(m Message) error {
		h, err := outbox.ParseHeader(m.Header)
		index := w.Index + uint32(m.Seq-w.Checkpoint.Seq-1)
		if (err != nil || h.Pos != outbox.Position{LSN: w.Checkpoint.Due, Index: index}) && wrong == 0 {
			wrong = m.Seq
		}
		n++
		return nil
	})
	if err == nil && (wrong > 0 || n != w.done && limits.None()) {
		err = fmt.Errorf("the stream has %d of %d messages that were published, message %d is another: "+
			"somebody else publishes", n, w.done, wrong)
	}
	return w.done - n, err
}

// events calls f with the events of its rows.
func (w *Window) events(ctx context.Context, q tablesnapshot.Query, f func(*relay.Event) error) error {
	columns := w.Snapshot.StreamedColumns(w.Conns.Layout.Columns())
	read, err := NewRows(w.Conns.cfg, w.Conns.Layout, columns)
	if err != nil {
		return err
	}
	q.Columns = make([]string, len(columns))
	for i, c := range columns {
		q.Columns[i] = c.Name
	}
	return w.Snapshot.Rows(ctx, q, func(values [][]byte) error {
		e, err := read.Event(values)
		if err != nil || w.Wanted != nil && !w.Wanted(e) {
			return err
		}
		return f(e)
	})
}

// CheckFits refuses more rows than the stream keeps messages: it would discard the first of them, and all
// that it has, before anybody has read it. Those that replace one another need no room.
func (w *Window) CheckFits(ctx context.Context) error {
	l := w.Conns
	limits, err := l.NATS.Limits(ctx)
	if err != nil {
		return err
	}
	what, room := "", int64(w.Of)
	if n := limits.Messages; n > 0 && n < room {
		what, room = fmt.Sprintf("max_msgs %d", n), n
	}
	if limits.Bytes > 0 && limits.Average > 0 && limits.Bytes/limits.Average < room {
		room = limits.Bytes / limits.Average
		what = fmt.Sprintf("max_bytes %d, room for about %d messages", limits.Bytes, room)
	}
	if fits, err := w.replaced(ctx, limits.PerSubject, room); what == "" || fits || err != nil {
		return err
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "stream_limits",
		Message: fmt.Sprintf("%s would be published at once, and stream %s has %s: it would discard "+
			"the first of them, and all that it has", units.Of(w.Of, "row"), l.cfg.Stream, what),
		Hint: "Nothing was published. Raise the limit with `nats stream edit`, until consumers have read " +
			"what is published. A repair can leave out the oldest rows with --where",
	}
}

// replaced reports whether the stream keeps no more of the rows than it has room for, because it replaces the
// others: it keeps so many of each subject, 0: all.
func (w *Window) replaced(ctx context.Context, perSubject, room int64) (bool, error) {
	if perSubject == 0 || int64(w.Of) <= room {
		return false, nil
	}
	settings, err := wiring.Sink(w.Conns.cfg, w.Conns.Layout, w.Conns.log)
	if err != nil {
		return false, err
	}
	enc, err := sink.NewEncoder(settings)
	if err != nil {
		return false, err
	}
	defer progress.Wait(ctx, "looking for the subjects of the rows")()
	q, kept, of := w.Query, int64(0), map[string]int64{}
	q.Sorted = false
	err = w.events(ctx, q, func(e *relay.Event) error {
		if kept > room {
			return nil
		}
		subject, _ := enc.Subject(e, &outbox.Header{ID: e.ID, Key: e.Key})
		if of[subject]++; of[subject] <= perSubject {
			kept++
		}
		return nil
	})
	return kept <= room, err
}

// Landed counts those of its messages that have come into the stream, by the newest of them that is there,
// over other connections than those that it was published by and that may have lost its acknowledgements.
func (w *Window) Landed(ctx context.Context, l *Conns, newest uint64) (n uint64, err error) {
	err = l.Messages(ctx, w.Checkpoint.Seq+1, newest, func(m Message) error {
		h, err := outbox.ParseHeader(m.Header)
		if err == nil && h.Pos.LSN == w.Checkpoint.Due && h.Pos.Index-w.Index < uint32(w.Of) {
			n = uint64(h.Pos.Index-w.Index) + 1
		}
		return nil
	})
	return n, err
}

// writer publishes, and waits while too much is in flight.
type writer struct {
	pub     *sink.Publisher
	lost    <-chan struct{}
	flushed time.Time
}

func (w *writer) publish(ctx context.Context, e *relay.Event, h *outbox.Header) error {
	for w.pub.Full() {
		if err := w.wait(ctx); err != nil {
			return err
		}
	}
	if err := w.pub.Publish(e, h); err != nil {
		if outbox.ClassOf(err) == outbox.Poison {
			err = w.settleBefore(ctx, err)
		}
		return err
	}
	if now := time.Now(); now.Sub(w.flushed) > 5*time.Millisecond {
		w.flushed = now
		w.pub.Flush(now)
	}
	return nil
}

// settleBefore waits until everything before a row that can't be published is acknowledged, and returns that
// row's error.
func (w *writer) settleBefore(ctx context.Context, poison error) error {
	if err := w.settle(ctx); err != nil && ctx.Err() == nil {
		return err
	}
	return poison
}

// settle waits until everything is acknowledged.
func (w *writer) settle(ctx context.Context) error {
	for w.pub.Acked() != w.pub.Sent() {
		if err := w.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// wait flushes and waits for an acknowledgement.
func (w *writer) wait(ctx context.Context) error {
	pause := w.pub.Flush(time.Now())
	if pause <= 0 {
		pause = pollEvery
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-w.lost:
	case <-w.pub.Notify():
	case <-time.After(pause):
	}
	return w.pub.Check(time.Now())
}
