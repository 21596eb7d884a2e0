package model

import (
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// fast is the real buffer.
type fast struct {
	b *reorder.Buffer
}

func buffer(p relay.Checkpoint) orderer {
	return &fast{reorder.New(reorder.Config{Settings: p.Settings, Start: p.Due, PublishedAhead: p.PublishedAhead, MaxPublishedAhead: maxTaken})}
}

func (f *fast) add(in *input) (*window, error) {
	for i := range in.events {
		e := in.events[i]
		e.Pos.LSN = 0
		if err := f.b.Append(&e); err != nil {
			return nil, err
		}
	}
	c := relay.Commit{LSN: in.lsn, Time: in.time, Kind: in.kind, Settings: in.settings, Events: len(in.events)}
	if err := f.b.Commit(c); err != nil {
		return nil, err
	}
	closed, err := f.b.Close()
	if err != nil || closed == nil {
		return nil, err
	}
	out := &window{due: closed.Due, thru: closed.Thru, pull: closed.Pull, sort: closed.Sort, place: closed.Checkpoint}
	out.place.Timeline = timeline
	for {
		var e relay.Event
		ok, err := closed.Next(&e)
		if err != nil {
			return nil, err
		}
		if !ok {
			return out, nil
		}
		out.events = append(out.events, e)
	}
}

func (f *fast) held() bool { n, _ := f.b.Held(); return n > 0 }

func (f *fast) marker(lsn outbox.LSN) relay.Checkpoint {
	p := f.b.Marker(lsn)
	p.Timeline = timeline
	return p
}
