package checkpoint

import (
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// CodeHome is the code of the fault of a home's rows, read on another server, that are not those which the
// home has counted.
const CodeHome = "cluster_count"

// CountDiffers is the fault of a home that has counted other events than a subscription has brought: want and
// have are the tallies of both up to to, and they were equal up to from. It is seen to happen: what was
// skipped does not come again.
func (c Config) CountDiffers(from, to outbox.LSN, want, have relay.Tally) error {
	what := "as many, and not the same"
	if want.Events != have.Events {
		what = fmt.Sprint(have.Events)
	}
	return &outbox.Fault{
		Class: outbox.Gap, Code: CodeHome, Observed: true, From: min(from, to), To: max(from, to),
		Message: fmt.Sprintf("the home has committed %d events up to %v since it began to count, at %v; "+
			"subscription %s has brought %s. Up to %v they were the same", want.Events, to, want.Since,
			c.Mapping.Subscription, what, from),
		Hint: c.hintOf(CodeHome, ""),
	}
}

// Elsewhere returns the record from which this cluster goes on with a home's own stream, where own is the
// record that it has kept of the home's rows: the home's checkpoints, each of which is read from where the
// newest own one at or below it is. The own slot is not confirmed beyond the last of these that the home has
// confirmed ([Tracker.Limit]), so there is one for each that the home may go back to.
func (own *Record) Elsewhere(home *Record) (*Record, error) {
	fail := func(format string, args ...any) (*Record, error) {
		return nil, fmt.Errorf("go on with stream %s from the record of slot %s: %s", home.Stream, own.Slot,
			fmt.Sprintf(format, args...))
	}
	columns := own.Mapping
	columns.OwnOnly, columns.Subscription = home.Mapping.OwnOnly, ""
	switch {
	case !own.Mapping.Away() || home.Mapping.Away():
		return fail("one is not of a home, or the other is")
	case columns != home.Mapping:
		return fail("it has %s, the home's has %s", mappingText(own.Mapping), mappingText(home.Mapping))
	case home.Hello > 0:
		return fail("others publish for it into streams of their own")
	case own.Stopped != "" || own.Repairing != "" || own.Creating || home.Creating || home.Repairing != "":
		return fail("one of them is not whole")
	}
	r := *own
	r.Version, r.home = recordVersion, home
	r.Stream, r.Created, r.Base = home.Stream, home.Created, home.Base
	r.Stopped, r.Holes, r.Checkpoints = home.Stopped, home.Holes, nil
	for _, p := range home.Checkpoints {
		for _, q := range slices.Backward(own.Checkpoints) {
			if q.Published() <= p.Published() {
				r.Checkpoints = append(r.Checkpoints, p.readFrom(q))
				break
			}
		}
	}
	r.Owner, r.Epoch, r.Cuts = home.Owner, home.Epoch, cutsFrom(home.Cuts, r.Checkpoints)
	r.Confirmed = home.Confirmed
	if len(r.Checkpoints) == 0 {
		return fail("it knows nothing at or below the home's newest checkpoint, at %v",
			home.Checkpoints[len(home.Checkpoints)-1].Published())
	}
	return &r, r.validate()
}

// readFrom is a home's checkpoint as it is read elsewhere. It is as durable as the younger of the two.
func (p StoredCheckpoint) readFrom(q StoredCheckpoint) StoredCheckpoint {
	p.Read, p.Timeline, p.Home = q.Read, q.Timeline, q.Home
	if p.Since.Before(q.Since) {
		p.Since = q.Since
	}
	if !p.Broker.IsZero() && (q.Broker.IsZero() || p.Broker.Before(q.Broker)) {
		p.Broker = q.Broker // not known where either is not
	}
	return p
}
