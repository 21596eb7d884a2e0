package pipeline

import (
	"cmp"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// maxPlaces is how many places an away keeps. Beyond that it keeps every second one: a place that is not
// there is answered with one before it, so a start reads more than it would have to.
const maxPlaces = 1 << 16

// away knows where a home's inputs lie in the WAL of the server on which they are read. Inputs come there in
// the order that they have at home.
type away struct {
	places []place    // ascending in both, never empty
	read   outbox.LSN // up to where that WAL was read, between transactions
	// what the home has said to be confirmed; zero: nothing yet, and a home of an older version never does
	home relay.Confirmed
}

// place says that inputs of the home up to lsn are read when that WAL was read up to at, and no others.
type place struct{ lsn, at outbox.LSN }

func newAway(cp relay.Checkpoint) *away {
	return &away{places: []place{{cp.Published(), cp.Start()}}, read: cp.Start(), home: cp.Home}
}

// commit takes note of a transaction that was read.
func (a *away) commit(c *relay.Commit) {
	if c.Kind != relay.NoInput && c.LSN > a.places[len(a.places)-1].lsn {
		if len(a.places) == maxPlaces {
			n := 1
			for i := 2; i < len(a.places); i += 2 {
				a.places[n] = a.places[i]
				n++
			}
			a.places = a.places[:n]
		}
		a.places = append(a.places, place{c.LSN, c.Read})
	}
	a.passed(c.Read)
}

// passed takes note that that WAL was read up to at, and that no input came that was not taken note of.
func (a *away) passed(at outbox.LSN) {
	a.read = max(a.read, at)
	last := &a.places[len(a.places)-1]
	last.at = max(last.at, at)
}

// heed takes note of what the home has said to be confirmed. It may be less than what it said before: a
// server that crashed has forgotten what it was told last.
func (a *away) heed(c relay.Confirmed) {
	a.home.LSN = max(a.home.LSN, c.LSN)
	a.home.Timeline = max(a.home.Timeline, c.Timeline)
}

// start returns where replication has to start to bring all inputs above lsn, and forgets what is before it:
// later calls have no lower lsn.
func (a *away) start(lsn outbox.LSN) outbox.LSN {
	n, found := slices.BinarySearchFunc(a.places, lsn, func(p place, lsn outbox.LSN) int {
		return cmp.Compare(p.lsn, lsn)
	})
	if !found {
		n--
	}
	a.places = slices.Delete(a.places, 0, max(n, 0))
	return a.places[0].at
}
