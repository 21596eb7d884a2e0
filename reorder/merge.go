package reorder

import (
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// item is an event on its way through a sorter.
type item struct {
	e     *relay.Event
	place outbox.Position // where it goes, if it is sorted by that
}

// The orders that sorters know. All are total: positions and places are unique.
type order func(a, b item) int

func itemsBySeqKey(a, b item) int {
	if c := strings.Compare(a.e.Doc, b.e.Doc); c != 0 {
		return c
	}
	if c := strings.Compare(a.e.Key, b.e.Key); c != 0 {
		return c
	}
	return a.e.Pos.Compare(b.e.Pos)
}

func itemsBySequence(a, b item) int {
	if c := strings.Compare(a.e.Doc, b.e.Doc); c != 0 {
		return c
	}
	if c := strings.Compare(a.e.Actor, b.e.Actor); c != 0 {
		return c
	}
	if c := strings.Compare(a.e.Key, b.e.Key); c != 0 {
		return c
	}
	return a.e.Pos.Compare(b.e.Pos)
}

func itemsByPosition(a, b item) int { return a.e.Pos.Compare(b.e.Pos) }
func itemsByPlace(a, b item) int    { return a.place.Compare(b.place) }

// source is a sorted list of items, in memory or in a scratch file.
type source struct {
	item   // the present one
	memory []item
	file   *reader // nil: memory
	record []byte  // the present one as it is in the file
	event  relay.Event

	of *spill // the transaction whose events were written before its commit record had been read; nil: none
}

// next goes to the next item; false at the end.
func (s *source) next() (bool, error) {
	for {
		if s.file == nil {
			if len(s.memory) == 0 {
				return false, nil
			}
			s.item, s.memory = s.memory[0], s.memory[1:]
		} else {
			var err error
			if s.record, err = s.file.next(); s.record == nil || err != nil {
				return false, err
			}
			if s.place, err = decodeRecord(s.record, &s.event); err != nil {
				return false, &ioError{"read", err}
			}
			s.e = &s.event
		}
		if s.of == nil {
			return true, nil
		}
		s.e.Pos.LSN, s.e.Time = s.of.lsn, s.of.time
		if _, left := slices.BinarySearch(s.of.gone, s.e.Pos.Index); !left {
			return true, nil
		}
	}
}

// merge makes one sorted list of several.
type merge struct {
	by    order
	heap  []*source // with an item each, least at the top
	stale bool      // the top's item has been handed out
}

func newMerge(by order, sources []*source) (*merge, error) {
	m := &merge{by: by}
	for _, s := range sources {
		ok, err := s.next()
		if err != nil {
			return nil, err
		}
		if ok {
			m.heap = append(m.heap, s)
		}
	}
	for i := len(m.heap)/2 - 1; i >= 0; i-- {
		m.down(i)
	}
	return m, nil
}

// next returns the next event, nil at the end. It is valid until the call after, and may be cleared.
func (m *merge) next() (*relay.Event, error) {
	s, err := m.nextSource()
	if s == nil || err != nil {
		return nil, err
	}
	return s.e, nil
}

// into adds all events to a sorter.
func (m *merge) into(s *sorter) error {
	for {
		e, err := m.next()
		if e == nil || err != nil {
			return err
		}
		if err := s.add(e, outbox.Position{}); err != nil {
			return err
		}
		*e = relay.Event{}
	}
}

func (m *merge) nextSource() (*source, error) {
	if m.stale {
		m.stale = false
		ok, err := m.heap[0].next()
		if err != nil {
			return nil, err
		}
		if !ok {
			last := len(m.heap) - 1
			m.heap[0], m.heap[last] = m.heap[last], nil
			m.heap = m.heap[:last]
		}
		if len(m.heap) > 0 {
			m.down(0)
		}
	}
	if len(m.heap) == 0 {
		return nil, nil
	}
	m.stale = true
	return m.heap[0], nil
}

func (m *merge) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(m.heap) {
			return
		}
		if child+1 < len(m.heap) && m.by(m.heap[child+1].item, m.heap[child].item) < 0 {
			child++
		}
		if m.by(m.heap[i].item, m.heap[child].item) < 0 {
			return
		}
		m.heap[i], m.heap[child] = m.heap[child], m.heap[i]
		i = child
	}
}
