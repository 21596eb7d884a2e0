package pipeline

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
)

type revision struct {
	number uint64
	doc    []byte
	rec    *checkpoint.Record // what doc says
	at     time.Time
}

// record is what the revision says. It is nobody's own.
func (r *revision) record() (*checkpoint.Record, error) {
	if r.rec == nil {
		rec, err := checkpoint.Decode(r.doc)
		if err != nil {
			return nil, err
		}
		r.rec = rec
	}
	return r.rec, nil
}

// saving is what happens to a write of the record.
type saving uint8

const (
	saveWell    saving = iota
	saveUnheard        // it is stored, the answer is lost
	saveLate           // it is stored seconds later, if at all
	saveNever
)

// history is how many revisions the record's bucket keeps.
const history = 64

// Load reads the newest revision through the leader.
func (l *brokerConn) Load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	return l.load(ctx, &l.js.revisions)
}

func (l *brokerConn) load(ctx context.Context, from *[]revision) (*checkpoint.Record, uint64, error) {
	if err := l.ask(ctx); err != nil {
		return nil, 0, err
	}
	l.lock()
	defer l.unlock()
	if len(*from) == 0 {
		return nil, 0, nil
	}
	r := &(*from)[len(*from)-1]
	decoded, err := r.record()
	if err != nil {
		return nil, 0, err
	}
	rec := *decoded
	rec.Checkpoints = slices.Clone(rec.Checkpoints)
	rec.StoredAt(r.at)
	for i := range rec.Checkpoints { // this process's clock is the bubble's: the record's times are off
		rec.Checkpoints[i].Since = rec.Checkpoints[i].Since.Add(-l.skew())
	}
	return &rec, r.number, nil
}

// SaveGaps fails while nothing is answered.
func (l *brokerConn) SaveGaps(ctx context.Context, doc []byte) error {
	if err := l.ask(ctx); err != nil {
		return err
	}
	l.lock()
	defer l.unlock()
	l.js.gaps = string(doc)
	return nil
}

// Save compares and sets. The outcome may stay unknown, whether it was stored or not.
func (l *brokerConn) Save(ctx context.Context, rec *checkpoint.Record, last uint64) (uint64, error) {
	return l.save(ctx, &l.js.revisions, rec, last)
}

func (l *brokerConn) save(ctx context.Context, to *[]revision, rec *checkpoint.Record,
	last uint64) (uint64, error) {
	c := *rec
	c.Checkpoints = slices.Clone(rec.Checkpoints)
	l.lock()
	for i := range c.Checkpoints {
		c.Checkpoints[i].Since = c.Checkpoints[i].Since.Add(l.skew())
	}
	l.unlock()
	doc, err := c.Encode()
	if err != nil {
		return 0, err
	}
	type outcome struct {
		revision uint64
		err      error
	}
	done := make(chan outcome, 1)
	l.lock()
	how, epoch := l.js.saves, l.js.w.epoch
	l.js.saves = saveWell
	d := l.noise.about(max(l.js.latency, time.Until(l.js.paused), time.Until(l.frozen)))
	l.js.w.step("record sent", last)
	if how == saveLate {
		d += time.Duration(l.js.rnd.IntN(8000)) * time.Millisecond
	}
	if !l.dead && how != saveNever {
		time.AfterFunc(d, func() {
			l.lock()
			defer l.unlock()
			if epoch != l.js.w.epoch {
				return
			}
			var o outcome
			o.revision, o.err = l.js.landIn(to, doc, &c, last)
			if how == saveWell && !l.dead {
				done <- o
			}
		})
	}
	l.unlock()
	select {
	case o := <-done:
		return o.revision, o.err
	case <-ctx.Done():
	case <-l.gone:
	}
	return 0, errors.Join(checkpoint.ErrUnknown, ctx.Err())
}

// land lets a record reach the broker, which compares and sets. rec is what doc says; nil: that is read from
// it.
func (js *jetstream) land(doc []byte, rec *checkpoint.Record, last uint64) (uint64, error) {
	return js.landIn(&js.revisions, doc, rec, last)
}

func (js *jetstream) landIn(to *[]revision, doc []byte, rec *checkpoint.Record, last uint64) (uint64, error) {
	all, now := *to, uint64(0)
	if n := len(all); n > 0 {
		now = all[n-1].number
	}
	if now != last {
		return 0, checkpoint.ErrConflict
	}
	js.last++
	if js.shared && to == &js.revisions && now < js.lossAt && js.unchanged(rec) {
		// what was lost is still to be recorded
		js.lossAt = js.last + 1
	}
	all = append(all, revision{number: js.last, doc: doc, rec: rec, at: time.Now()})
	if n := len(all) - history; n > 0 {
		all = all[n:]
	}
	*to = all
	js.w.step("record stored", js.last)
	return js.last, nil
}

// unchanged reports whether a record has the checkpoints and holes of the one before it.
func (js *jetstream) unchanged(rec *checkpoint.Record) bool {
	was, err := js.revisions[len(js.revisions)-1].record()
	return err == nil && rec != nil && slices.Equal(was.Holes, rec.Holes) &&
		slices.EqualFunc(was.Checkpoints, rec.Checkpoints, func(a, b checkpoint.StoredCheckpoint) bool {
			return a.Same(b.Checkpoint)
		})
}
