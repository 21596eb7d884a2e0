package checkpoint

import (
	"errors"
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// MaxClaimed is how many ranges a record may list that are published for another home. They go with the
// checkpoints that they are above.
const MaxClaimed = 256

// WithClaimed returns the record of a cluster that has read claims of its own, with what it has read up to
// there. It has to be stored before anything of them is published. What the record has already is passed
// over.
func (r *Record) WithClaimed(all []relay.Claimed, state *relay.ReaderState) (*Record, error) {
	c := *r
	c.Claimed, c.Reader = slices.Clone(r.Claimed), state
	for _, claimed := range all {
		if n := len(c.Claimed); n == 0 || claimed.To > c.Claimed[n-1].To {
			c.Claimed = append(c.Claimed, claimed)
		}
	}
	if n := len(c.Claimed); n > MaxClaimed {
		return nil, fmt.Errorf("the checkpoint record of slot %s would list %d ranges that are published "+
			"for another home, at most %d: they go with its checkpoints", r.Slot, n, MaxClaimed)
	}
	return &c, nil
}

// claimedFrom returns the ranges of which a start from one of the checkpoints makes messages.
func claimedFrom(claimed []relay.Claimed, checkpoints []StoredCheckpoint) []relay.Claimed {
	n := 0
	for len(checkpoints) > 0 && n < len(claimed) && claimed[n].To <= checkpoints[0].Published() {
		n++
	}
	if n == len(claimed) {
		return nil
	}
	return claimed[n:]
}

// validateReader looks at what only the record of a cluster has that publishes for another home.
func (r *Record) validateReader() error {
	s := r.Reader
	switch {
	case s == nil && len(r.Claimed) > 0:
		return errors.New("something is claimed by a cluster that has read nothing")
	case s == nil:
		return nil
	case r.Version < clustersVersion || !r.Mapping.Away() || r.Epoch != 0 || r.Hello != 0:
		return fmt.Errorf("what is read of another home in version %d, with subscription %q, epoch %d and "+
			"hello %d", r.Version, r.Mapping.Subscription, r.Epoch, r.Hello)
	case s.At == 0 || len(s.Echoes) > outbox.MaxCluster:
		return fmt.Errorf("%d echoes were read up to %v", len(s.Echoes), s.At)
	case len(r.Claimed) > MaxClaimed:
		return fmt.Errorf("%d ranges claimed, at most %d", len(r.Claimed), MaxClaimed)
	}
	for i, c := range r.Claimed {
		if c.From >= c.To || i > 0 && c.From < r.Claimed[i-1].To || c.To > s.Settled {
			return fmt.Errorf("what is claimed from %v to %v is out of order", c.From, c.To)
		}
	}
	if slices.ContainsFunc(r.Checkpoints, func(p StoredCheckpoint) bool { return p.Settings.ByGap() }) {
		return errors.New("another home's rows are claimed in gap mode, which remembers its stream")
	}
	return nil
}
