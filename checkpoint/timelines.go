package checkpoint

import (
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// timelines gives each checkpoint the LSN that it counts as: one beyond the point where the present timeline
// left the checkpoint's counts as that point. Several at one point are one checkpoint, in the record since
// the oldest of them was. What lies beyond the point and is in the stream all the same is in the stream only.
func (v *resolver) timelines() error {
	v.moved = -1
	for _, p := range v.Record.Checkpoints {
		end, left, known := v.Server.History.Left(p.Timeline)
		if !known {
			return v.unknownTimeline(p.Timeline, "the checkpoint at "+p.Due.String())
		}
		if !left || p.At() <= end {
			v.checkpoints = append(v.checkpoints, p)
			continue
		}
		if v.cfg.Mapping.Away() {
			return v.branchLost(end, p.At(), "the home's rows were read on timeline %d beyond it", p.Timeline)
		}
		if len(p.PublishedAhead) > 0 {
			return v.branchLost(end, p.Due, "the checkpoint record knows events on timeline %d beyond it",
				p.Timeline)
		}
		old := p.Due
		p.Due = end
		if len(p.Holds) > 0 { // it counts some of those that go now
			p.Tally = relay.Tally{}
		}
		// Of the events that it held, those beyond the point are on the branch that is gone.
		p.Holds = slices.DeleteFunc(slices.Clone(p.Holds), func(h relay.Hold) bool {
			return h.Oldest.LSN > end
		})
		if len(p.Holds) == 0 {
			p.Holds, p.From = nil, 0
		}
		n := len(v.checkpoints)
		if n == 0 || v.checkpoints[n-1].Due < end {
			v.checkpoints, v.moved = append(v.checkpoints, p), n
			continue
		}
		if q := v.checkpoints[n-1]; q.Seq != p.Seq || len(q.PublishedAhead) > 0 {
			return v.branchLost(end, old, "messages up to sequence %d were made from timeline %d beyond it",
				p.Seq, p.Timeline)
		}
	}
	return nil
}

func (v *resolver) unknownTimeline(timeline uint32, what string) error {
	if v.Server.InRecovery {
		return fmt.Errorf("%s lies on timeline %d: %w", what, timeline, ErrStandby)
	}
	return v.gap("timeline_unknown", v.left(), v.Server.WALEnd, v.cfg.hintBehind(),
		"%s lies on timeline %d, which the server's timeline %d does not descend from", what, timeline,
		v.Server.History.Timeline)
}

// branchLost has the range that the old timeline has beyond the point where it was left; a slot that begins
// later than that, on the new one, lacks what was committed up to it.
func (v *resolver) branchLost(end, to outbox.LSN, why string, args ...any) error {
	return v.gap("timeline_lost", end, max(to, v.Slot.Confirmed), v.cfg.hintBehind(),
		"the server that is now primary left the old timeline at %v, and %s",
		end, fmt.Sprintf(why, args...))
}

// behind refuses a server whose WAL ends before what was read from it.
func (v *resolver) behind() error {
	var top outbox.LSN
	for _, p := range v.checkpoints {
		top = max(top, p.At())
	}
	if n := v.headed(); n != nil && !v.cfg.Mapping.Away() { // else it speaks of the home's WAL
		// A thru on a branch that was left says nothing about the present WAL: newest looks at it.
		if end, left, _ := v.Server.History.Left(n.Timeline); !left || n.Thru <= end {
			top = max(top, n.Thru)
		}
	}
	what := fmt.Sprintf("events up to %v were read from it: it was", top)
	// A cut is carried out when the WAL was read up to it. One beyond its end would be waited for.
	if c := v.Stream.Cut; c != nil && v.Record.Epoch > 0 && v.Stream.NewestSeq > v.Record.Base &&
		!v.cfg.Mapping.Away() && c.LSN > top {
		top, what = c.LSN, fmt.Sprintf("sequence %d of stream %s is a cut at %v, which cluster %d has "+
			"written: that is no cut of its own, or it was", v.Stream.NewestSeq, v.cfg.Stream, c.LSN, c.Owner)
	}
	if v.Server.WALEnd >= top {
		return nil
	}
	if v.Server.InRecovery {
		return fmt.Errorf("the WAL ends at %v, before %v: %w", v.Server.WALEnd, top, ErrStandby)
	}
	return v.gap("server_behind", v.Server.WALEnd, top, v.cfg.hintBehind(),
		"the server's WAL ends at %v, but %s restored from an older copy", v.Server.WALEnd, what)
}

// newest refuses a stream whose newest message was made from a branch of the WAL that was left before it.
//
// The header names the timeline of the event, not that of the input that closed its window, so a thru beyond
// the switch point may be on the present timeline as well: the event was read after the promotion. Where a
// checkpoint shows which one it was, that counts; otherwise the message is made again and compared, and only
// where there is nothing to compare it is refused.
func (v *resolver) newest() error {
	n := v.headed()
	if n == nil || v.cfg.Mapping.Away() { // the latter: it speaks of the home's WAL
		return nil
	}
	end, left, known := v.Server.History.Left(n.Timeline)
	if !known {
		return v.unknownTimeline(n.Timeline, fmt.Sprintf("the newest message of stream %s, at %v,",
			v.cfg.Stream, n.Pos))
	}
	if !left || n.Thru <= end {
		return nil
	}
	compared := v.start.AlreadyStored > 0 && v.start.Newest != nil
	lost := n.Pos.LSN > end || !compared
	for _, p := range v.Record.Checkpoints {
		if p.Seq >= v.Stream.NewestSeq && p.Seq <= v.start.End && p.Due > end {
			lost = n.Pos.LSN > end || p.Timeline == n.Timeline
			break
		}
	}
	if lost {
		return v.branchLost(end, n.Thru, "the newest message of stream %s was made from timeline %d up to %v",
			v.cfg.Stream, n.Timeline, n.Thru)
	}
	if v.Server.WALEnd < n.Thru {
		return v.gap("server_behind", v.Server.WALEnd, n.Thru, v.cfg.hintBehind(),
			"the server's WAL ends at %v, but stream %s was made from it up to %v", v.Server.WALEnd,
			v.cfg.Stream, n.Thru)
	}
	return nil
}
