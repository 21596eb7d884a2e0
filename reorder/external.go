package reorder

import (
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// orderSpilled returns everything held in the window's order: what is in memory, by position in b.order, and
// the spilled transaction, all of whose positions lie beyond.
func (b *Buffer) orderSpilled() (*merge, error) {
	s := b.spill
	held := make([]item, len(b.order))
	for i, e := range b.order {
		held[i].e = &e.Event
	}
	clear(b.order)
	b.order = b.order[:0]
	memory := sorter{by: s.by, items: held, serial: s.serial, tune: s.tune}
	sources, err := memory.sources()
	if err != nil {
		return nil, err
	}
	keyed := s.keyed
	for i := 0; i < len(held) && !keyed; i++ {
		keyed = held[i].e.Key != ""
	}
	if s.serial && keyed {
		if err := s.flush(); err != nil { // room for the sorters
			return nil, err
		}
	}
	spilled, err := s.sources()
	if err != nil {
		return nil, err
	}
	for _, src := range spilled {
		src.of = s
	}
	all, err := newMerge(s.by, append(sources, spilled...))
	if err != nil || !s.serial || !keyed {
		return all, err
	}
	return b.fillPlaces(all)
}

// fillPlaces is sort commit for more events than fit in memory. events come by position. Sorted by (sequence,
// key, position) they are in the order in which each sequence's events go out; sorted by (sequence, position)
// they show the places that each sequence occupies, in order. Both lists have the same sequences with the
// same numbers of events, so the n-th event of the one goes to the n-th place of the other.
func (b *Buffer) fillPlaces(events *merge) (*merge, error) {
	room := b.allowance() / 4
	bySequence := b.sorter(itemsBySequence, room)
	places := b.sorter(itemsBySequence, room) // of events without keys
	byPlace := b.sorter(itemsByPlace, room)

	var name relay.Event
	for {
		e, err := events.next()
		if err != nil {
			return nil, err
		}
		if e == nil {
			break
		}
		// a name of its own: it must not keep the event's block
		if e.Doc != name.Doc || e.Actor != name.Actor {
			name.Doc, name.Actor = strings.Clone(e.Doc), strings.Clone(e.Actor)
		}
		name.Pos = e.Pos
		if err := places.add(&name, outbox.Position{}); err != nil {
			return nil, err
		}
		if err := bySequence.add(e, outbox.Position{}); err != nil {
			return nil, err
		}
		*e = relay.Event{}
	}
	b.spill.drop()

	out, err := bySequence.merge()
	if err != nil {
		return nil, err
	}
	at, err := places.merge()
	if err != nil {
		return nil, err
	}
	for {
		event, err := out.next()
		if err != nil {
			return nil, err
		}
		place, err := at.next()
		if err != nil {
			return nil, err
		}
		if event == nil || place == nil {
			break
		}
		if err := byPlace.add(event, place.Pos); err != nil {
			return nil, err
		}
	}
	bySequence.drop()
	places.drop()
	return byPlace.merge()
}

// merge returns what has been added, in order.
func (s *sorter) merge() (*merge, error) {
	sources, err := s.sources()
	if err != nil {
		return nil, err
	}
	return newMerge(s.by, sources)
}
