package reorder

import (
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// spill is a transaction that is too large for memory: the one that is being read, or the newest that is
// held. Where it is to be sorted by seq_key its runs are sorted so; else they are one run in commit order.
type spill struct {
	sorter
	lsn   outbox.LSN // 0 while it is being read
	time  int64      // of its commit
	read  uint64     // events
	gone  []uint32   // indexes of those that have left, ascending
	keyed bool       // some event has a key
}

// allowance is what the transaction that is being read may weigh before it spills: what the held events leave
// of the limit, but always a fourth of it, so that runs do not become small where the buffer is full.
func (b *Buffer) allowance() int64 {
	limit := b.limit()
	held := b.resident() + b.index.weight()
	if b.gap != nil {
		held += b.gap.weight()
	}
	return max(limit-held, limit/4, b.tune.least)
}

func (b *Buffer) limit() int64 {
	if b.tune.memory > 0 {
		return b.tune.memory
	}
	return b.set.MaxBytes
}

// overflow moves the transaction that is being read from the fifo to a spill.
func (b *Buffer) overflow() error {
	s := &spill{sorter: b.sorter(itemsBySeqKey, b.allowance())}
	switch b.inForce().Sort {
	case outbox.ByCommit:
		s.by, s.serial = itemsByPosition, true
	case outbox.ByGap:
		s.by = itemsByCounter
	}
	b.spill = s
	for n := b.start; n < b.fifo.tail; n++ { // written from where they are
		e := &b.fifo.at(n).Event
		s.items = append(s.items, item{e: e})
		s.keyed = s.keyed || e.Key != ""
	}
	s.read = uint64(len(s.items))
	if err := s.flush(); err != nil {
		return err
	}
	b.fifo.truncate(b.start)
	return nil
}

func (b *Buffer) sorter(by order, limit int64) sorter {
	return sorter{disk: &b.disk, tune: &b.tune, by: by, limit: limit, total: &b.sorting}
}

func (s *spill) add(e *relay.Event) error {
	s.read++
	s.keyed = s.keyed || e.Key != ""
	return s.sorter.add(e, outbox.Position{})
}

// commit says what the transaction's LSN and time are and which of its events have left already; those are
// taken from t.
func (s *spill) commit(lsn outbox.LSN, time int64, left []outbox.Position, t *tally) error {
	s.stamp(lsn, time)
	if len(left) == 0 {
		return nil
	}
	var gone []uint32
	for _, p := range left {
		gone = append(gone, p.Index)
	}
	err := s.each(func(e *relay.Event) bool {
		if _, found := slices.BinarySearch(gone, e.Pos.Index); found {
			t.sub(tallyOf(e))
		}
		return true
	})
	s.gone = gone
	return err
}

func (s *spill) stamp(lsn outbox.LSN, time int64) {
	s.lsn, s.time = lsn, time
	for i := range s.items {
		s.items[i].e.Pos.LSN, s.items[i].e.Time = lsn, time
	}
}

// take says that the events among pulled that are the transaction's leave.
func (s *spill) take(pulled []*slot) {
	for _, p := range pulled {
		if p.Pos.LSN == s.lsn {
			s.gone = append(s.gone, p.Pos.Index)
		}
	}
	slices.Sort(s.gone)
}

// each calls f for each event that has not left, in no particular order, until it returns false. Only f may
// use the event.
func (s *spill) each(f func(*relay.Event) bool) error {
	list := make([]*source, 0, len(s.runs)+1)
	for _, r := range s.runs {
		list = append(list, s.source(r))
	}
	list = append(list, &source{memory: s.items})
	for _, src := range list {
		src.of = s
		for {
			ok, err := src.next()
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			if !f(src.e) {
				return nil
			}
		}
	}
	return nil
}

// pullSpilled returns what a window pulls from the spilled transaction, by position: a few copies, or more
// than limit.
func (b *Buffer) pullSpilled(limit int) ([]*slot, error) {
	var pulled []*slot
	err := b.spill.each(func(e *relay.Event) bool {
		if q := b.index.find(e.Doc, e.Actor); q != nil && q.top != nil && e.Key < q.top.Key {
			pulled = append(pulled, &slot{Event: clone(e)})
		}
		return len(pulled) <= limit
	})
	slices.SortFunc(pulled, byPosition)
	return pulled, err
}

// clone copies an event with its bytes, so that it does not keep a whole block in memory.
func clone(e *relay.Event) relay.Event {
	c := *e
	c.Doc, c.Actor, c.Key = strings.Clone(e.Doc), strings.Clone(e.Actor), strings.Clone(e.Key)
	c.ID, c.Bad = strings.Clone(e.ID), strings.Clone(e.Bad)
	c.Payload = slices.Clone(e.Payload)
	c.Extra = slices.Clone(e.Extra)
	for i, x := range c.Extra {
		c.Extra[i] = strings.Clone(x)
	}
	return c
}

// restore brings the spilled transaction, which stays held, into the fifo: the limits saw to it that it is no
// larger than what may be held. Its events come in any order; each has its slot.
func (b *Buffer) restore() error {
	s := b.spill
	b.spill = nil
	defer s.drop()
	if b.commits.len() == 0 || b.commits.back().lsn != s.lsn {
		return nil // all its events were pulled
	}
	first := b.fifo.grow(s.read)
	err := s.each(func(e *relay.Event) bool {
		b.fifo.at(first + uint64(e.Pos.Index)).Event = *e
		return true
	})
	b.start = b.fifo.tail
	b.commits.back().end = b.fifo.tail
	return err
}

// resident is the weight of the held events that are in memory.
func (b *Buffer) resident() int64 {
	if b.spill != nil && b.spill.lsn != 0 && b.commits.len() > 0 && b.commits.back().lsn == b.spill.lsn {
		return b.held.weight - b.commits.back().weight
	}
	return b.held.weight
}
