package checkpoint

import (
	"errors"
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// maxLeft is how many entries a record may list of what a home has left to others. They go with the
// checkpoints that they are above.
const maxLeft = 256

// NextHello returns the record in which a home has taken the number of its next hello, and what it has read
// of the others by then: a number that follows each one taken and each one read. Whoever has taken the same
// one finds out when it saves the record.
func (r *Record) NextHello(read *relay.HomeState) (*Record, error) {
	c := *r
	if c.Heard = read; read != nil {
		c.Hello = max(c.Hello, read.Hello)
	}
	if c.Hello >= relay.MaxHello {
		return nil, &outbox.Fault{Class: outbox.Fatal, Code: "cluster_row",
			Message: fmt.Sprintf("the newest hello of the home of slot %s has number %d, and none can "+
				"follow it: a home comes nowhere near, so somebody else wrote it into control table %s",
				c.Slot, c.Hello, c.Mapping.Control),
			Hint: "Find out who may write there. The other clusters take no smaller number of this home: " +
				"it can only go on as one that shares nothing with them"}
	}
	c.Hello++
	return &c, nil
}

// WithLeft returns the record of a home that leaves more to others, and has read a hello of its own by then.
// It has to be stored before anything is left out: a start from an older one would publish it.
func (r *Record) WithLeft(l relay.Left, hello uint64) (*Record, error) {
	c := *r
	c.Hello = max(c.Hello, hello)
	c.Left = slices.Clone(r.Left)
	n := len(c.Left)
	switch {
	case n > 0 && (l.Before(c.Left[n-1]) || l.To < c.Left[n-1].To):
		return nil, fmt.Errorf("what is left up to %v behind %v goes back behind what the record of slot "+
			"%s has, up to %v behind %v", l.To, l.Due, r.Slot, c.Left[n-1].To, c.Left[n-1].Due)
	case n > 0 && l.To == c.Left[n-1].To: // it is there
	case n > 0 && !c.Left[n-1].Before(l):
		c.Left[n-1].To = l.To
	case n == maxLeft:
		return nil, fmt.Errorf("the checkpoint record of slot %s lists %d ranges that others publish, the "+
			"most that it may have: they go with its checkpoints", r.Slot, n)
	default:
		c.Left = append(c.Left, l)
	}
	return &c, nil
}

// leftFrom returns what a start from one of the checkpoints may have to leave out.
func leftFrom(left []relay.Left, checkpoints []StoredCheckpoint) []relay.Left {
	if len(checkpoints) == 0 {
		return left
	}
	from := checkpoints[0].Published()
	n := 0
	for n < len(left) && left[n].To <= from {
		n++
	}
	if n == len(left) {
		return nil
	}
	return left[n:]
}

// validateLeft looks at what only the record of a home has for which others publish.
func (r *Record) validateLeft() error {
	switch {
	case r.Hello == 0 && (len(r.Left) > 0 || r.Heard != nil):
		return errors.New("something is left to others, or known of them, without a hello")
	case r.Hello == 0:
		return nil
	case r.Version < clustersVersion || r.Mapping.Control == "" || r.Mapping.Away() || r.Epoch != 0:
		return fmt.Errorf("hello %d in version %d, with control table %q, subscription %q and epoch %d",
			r.Hello, r.Version, r.Mapping.Control, r.Mapping.Subscription, r.Epoch)
	case r.Hello > relay.MaxHello:
		return fmt.Errorf("hello %d, at most %d", r.Hello, uint64(relay.MaxHello))
	case len(r.Left) > maxLeft:
		return fmt.Errorf("%d ranges left to others, at most %d", len(r.Left), maxLeft)
	}
	if h := r.Heard; h != nil && (h.At == 0 || len(h.Echoes) > outbox.MaxCluster ||
		h.Hello > relay.MaxHello) {
		return fmt.Errorf("hello %d and %d echoes were read up to %v", h.Hello, len(h.Echoes), h.At)
	}
	for i, l := range r.Left {
		if l.N < 0 || l.To == 0 || i > 0 && (!r.Left[i-1].Before(l) || l.To <= r.Left[i-1].To) {
			return fmt.Errorf("what is left to others up to %v is out of order", l.To)
		}
	}
	if len(r.Left) > 0 && slices.ContainsFunc(r.Checkpoints, func(p StoredCheckpoint) bool {
		return p.Settings.ByGap()
	}) {
		return errors.New("something is left to others in gap mode, which remembers what is in the stream")
	}
	return nil
}
