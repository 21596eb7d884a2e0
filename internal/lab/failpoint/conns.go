package failpoint

import (
	"context"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

// Decorate puts the points around what a pipeline is connected to.
func (s *Set) Decorate(c *pipeline.Config) {
	if s == nil {
		return
	}
	open := c.Open
	c.Open = func(ctx context.Context) (*pipeline.Conns, error) {
		l, err := open(ctx)
		if err != nil {
			return nil, err
		}
		l.Source = &source{Source: l.Source, set: s}
		l.JetStream = &jetStream{l.JetStream, s}
		l.Store = s.store(l.Store)
		if reopen := l.Reopen; reopen != nil {
			l.Reopen = func(ctx context.Context) (pipeline.JetStream, pipeline.Store, error) {
				b, st, err := reopen(ctx)
				if err != nil {
					return nil, nil, err
				}
				return &jetStream{b, s}, s.store(st), nil
			}
		}
		if l.Writer != nil {
			l.Writer = &writer{l.Writer, s}
		}
		return l, nil
	}
	c.Scratch = &disk{c.Scratch, s}
}

type source struct {
	pipeline.Source
	set       *Set
	confirmed outbox.LSN
}

func (u *source) Start(ctx context.Context, from outbox.LSN, binary bool) error {
	return u.set.around("start", func() error { return u.Source.Start(ctx, from, binary) })
}

func (u *source) Confirm(lsn outbox.LSN) {
	if lsn <= u.confirmed {
		u.Source.Confirm(lsn)
		return
	}
	u.confirmed = lsn
	_ = u.set.around("confirm", func() error { u.Source.Confirm(lsn); return nil })
}

type jetStream struct {
	pipeline.JetStream
	set *Set
}

// Recent is read at each start in gap mode.
func (b *jetStream) Recent(ctx context.Context, above, upTo uint64, n int) (all []outbox.Counter, err error) {
	err = b.set.around("memory", func() error {
		all, err = b.JetStream.Recent(ctx, above, upTo, n)
		return err
	})
	return all, err
}

func (b *jetStream) Publisher(lastSeq, lostFrom, fence uint64) (p pipeline.Publisher) {
	_ = b.set.around("publisher", func() error {
		p = &publisher{Publisher: b.JetStream.Publisher(lastSeq, lostFrom, fence), set: b.set, acked: lastSeq,
			flushed: lastSeq}
		return nil
	})
	return p
}

func (b *jetStream) Resume(lastSeq uint64) (pipeline.Publisher, error) {
	p, err := b.JetStream.Resume(lastSeq)
	if err != nil {
		return nil, err
	}
	return &publisher{Publisher: p, set: b.set, acked: lastSeq, flushed: lastSeq}, nil
}

type publisher struct {
	pipeline.Publisher
	set     *Set
	acked   uint64 // as last told to the pipeline
	flushed uint64 // sent by a Flush
}

func (p *publisher) Publish(e *relay.Event, h *outbox.Header) error {
	return p.set.around("publish", func() error { return p.Publisher.Publish(e, h) })
}

// Flush counts where there is something to send, and after where nothing of it waits for company.
func (p *publisher) Flush(now time.Time) time.Duration {
	sent := p.Sent()
	if sent == p.flushed {
		return p.Publisher.Flush(now)
	}
	p.set.hit("flush.before")
	wait := p.Publisher.Flush(now)
	if wait == 0 {
		p.flushed = sent
		p.set.hit("flush.after")
	}
	return wait
}

func (p *publisher) Acked() uint64 {
	acked := p.Publisher.Acked()
	if acked > p.acked {
		p.acked = acked
		p.set.hit("ack")
	}
	return acked
}

// store puts the points around both records of a cluster that another one's stream is shared with: whoever
// stands by takes them apart.
func (s *Set) store(st pipeline.Store) pipeline.Store {
	if e, ok := st.(*pipeline.Elsewhere); ok {
		return &pipeline.Elsewhere{Home: &store{e.Home, s}, Own: &store{e.Own, s}}
	}
	return &store{st, s}
}

type store struct {
	pipeline.Store
	set *Set
}

// Load turns the record's times back by as much as this clock is said to be ahead: all that is done with them
// is to compare them with this clock.
func (s *store) Load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	r, revision, err := s.Store.Load(ctx)
	return shifted(r, -s.set.clock), revision, err
}

func (s *store) Save(ctx context.Context, r *checkpoint.Record, revision uint64) (saved uint64, err error) {
	err = s.set.around("record", func() error {
		saved, err = s.Store.Save(ctx, shifted(r, s.set.clock), revision)
		return err
	})
	return saved, err
}

func shifted(r *checkpoint.Record, by time.Duration) *checkpoint.Record {
	if r == nil || by == 0 {
		return r
	}
	c := *r
	c.Checkpoints = slices.Clone(r.Checkpoints)
	for i := range c.Checkpoints {
		c.Checkpoints[i].Since = c.Checkpoints[i].Since.Add(by)
	}
	return &c
}

type writer struct {
	pipeline.Writer
	set *Set
}

func (w *writer) Heartbeat(ctx context.Context) error {
	return w.set.around("tick", func() error { return w.Writer.Heartbeat(ctx) })
}

func (w *writer) Change(ctx context.Context, settings relay.Settings) error {
	return w.set.around("change", func() error { return w.Writer.Change(ctx, settings) })
}
