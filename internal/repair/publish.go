package repair

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
)

const (
	progressEvery = 5 * time.Second
	pollEvery     = 50 * time.Millisecond
)

// publish publishes the missing rows as one window, and returns how many there were.
func (r *repair) publish(ctx context.Context, l *links, history outbox.History, s *survey) (uint64, error) {
	of := s.counts[missing]
	if of == 0 {
		return 0, nil
	}
	columns := s.snap.InWAL(l.layout.Columns())
	read, err := newRows(r.cfg, l.layout, columns)
	if err != nil {
		return 0, err
	}
	names := make([]string, len(columns))
	for i, c := range columns {
		names[i] = c.Name
	}
	r.say("publishing %d events", of)
	w := &writer{pub: l.conn.Publisher(s.anchor.Seq), lost: l.conn.Lost()}
	due, index, n := s.anchor.Due, s.next(), 0
	h := outbox.Header{Of: of, Due: due, Thru: due, Timeline: history.At(due)}
	said := time.Now()
	err = s.snap.Rows(ctx, replication.RowQuery{
		Mapping: l.layout.Mapping, ID: l.layout.ID, Columns: names, Where: r.o.Where, Only: s.listed, Sorted: true,
	}, func(values [][]byte) error {
		e, err := read.event(values)
		if err != nil {
			return err
		}
		if f, ok := s.fates[idOf(string(outbox.AppendHeaderValue(nil, e.ID)))]; !ok || f != missing {
			return nil
		}
		e.Pos = outbox.Position{LSN: due, Index: index + uint32(n)}
		h.Pos, h.N, h.ID, h.Key = e.Pos, n, e.ID, e.Key
		if err := w.publish(ctx, e, &h); err != nil {
			return err
		}
		if n == 0 { // once it is acknowledged nothing more comes in by the old ingress
			if err := w.settle(ctx); err != nil {
				return err
			}
		}
		if n++; time.Since(said) > progressEvery {
			said = time.Now()
			r.say("%d of %d published", n, of)
		}
		return nil
	})
	if err == nil {
		err = w.settle(ctx)
	}
	if err == nil && n != of {
		err = fmt.Errorf("%d events were missing, and %d rows were read of them", of, n)
	}
	return uint64(n), err
}

// readBack makes sure that the stream has what was published, and nothing in between. The expected sequences do not show that by themselves:
// where a sleeping outflow wakes up in the middle, its message takes a sequence, ours is refused, and our next one finds the last sequence
// that it expects.
func (s *survey) readBack(ctx context.Context, published uint64) error {
	if published == 0 {
		return nil
	}
	n, first, wrong := uint64(0), s.next(), uint64(0)
	err := s.l.messages(ctx, s.r.cfg.Stream, s.anchor.Seq+1, s.anchor.Seq+published, func(m message) error {
		h, err := outbox.ParseHeader(m.header)
		if (err != nil || h.Pos != outbox.Position{LSN: s.anchor.Due, Index: first + uint32(n)}) && wrong == 0 {
			wrong = m.seq
		}
		n++
		return nil
	})
	if err == nil && (wrong > 0 || n != published) {
		err = fmt.Errorf("the stream has %d of %d messages that were published, message %d is another: somebody else publishes", n, published, wrong)
	}
	return err
}

// writer publishes with back-pressure.
type writer struct {
	pub     *sink.Publisher
	lost    <-chan struct{}
	flushed time.Time
}

func (w *writer) publish(ctx context.Context, e *outbox.Event, h *outbox.Header) error {
	for w.pub.Full() {
		if err := w.wait(ctx); err != nil {
			return err
		}
	}
	if err := w.pub.Publish(e, h); err != nil {
		if outbox.ClassOf(err) == outbox.Poison {
			err = w.before(ctx, err)
		}
		return err
	}
	if now := time.Now(); now.Sub(w.flushed) > 5*time.Millisecond {
		w.flushed = now
		w.pub.Flush(now)
	}
	return nil
}

// before lets what comes before a row that can't be published be acknowledged.
func (w *writer) before(ctx context.Context, poison error) error {
	if err := w.settle(ctx); err != nil && ctx.Err() == nil {
		return err
	}
	return poison
}

// settle waits until all is acknowledged.
func (w *writer) settle(ctx context.Context) error {
	for w.pub.Acked() != w.pub.Sent() {
		if err := w.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// wait writes what is ready and waits for an acknowledgement.
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
