package oracle

import (
	"cmp"
	"slices"
	"time"
)

// place is what a message says of its place, and when its row was committed.
type place struct {
	key       string
	lsn       LSN
	due, thru LSN
	committed time.Time
}

// lateness tells which messages had to come after a higher one of their sequence: those whose commit the WAL
// has behind the input that closed the higher one's window. Two commit timestamps do not tell that. A server
// stamps a commit and then writes it: one that is held up in between comes late with an early time.
type lateness struct {
	sequences map[[2]string][]place // in stream order
	behind    map[[2]string][]int   // in sequences: those out of order
	commits   map[LSN]time.Time     // of all messages
}

func newLateness() lateness {
	return lateness{map[[2]string][]place{}, map[[2]string][]int{}, map[LSN]time.Time{}}
}

// add takes the next message.
func (l *lateness) add(sequence [2]string, m *Message, committed time.Time, behind bool) {
	h := &m.Outflow
	if behind {
		l.behind[sequence] = append(l.behind[sequence], len(l.sequences[sequence]))
	}
	l.sequences[sequence] = append(l.sequences[sequence], place{h.Key, h.Pos.LSN, h.Due, h.Thru, committed})
	l.commits[h.Pos.LSN] = committed
}

// count counts the messages out of order that are late.
func (l *lateness) count(horizon time.Duration) (n int) {
	if len(l.behind) == 0 {
		return 0
	}
	lsns := make([]LSN, 0, len(l.commits))
	for lsn := range l.commits {
		lsns = append(lsns, lsn)
	}
	slices.Sort(lsns)
	for sequence, behind := range l.behind {
		all := l.sequences[sequence]
		for _, i := range behind {
			late := func(higher place) bool {
				return higher.key > all[i].key && all[i].lsn > higher.thru && l.closed(higher, lsns, horizon)
			}
			if slices.ContainsFunc(all[:i], late) {
				n++
			}
		}
	}
	return n
}

// closed tells whether a message's window had to be closed where it says: the closing commit is a horizon or
// more later than the message's, or than one that the WAL has between the two, which takes with it what lies
// before it.
func (l *lateness) closed(p place, lsns []LSN, horizon time.Duration) bool {
	closing, known := l.commits[p.thru]
	if _, ours := l.commits[p.due]; !known || !ours {
		return true // a tick, or a change of settings
	}
	from, _ := slices.BinarySearchFunc(lsns, p.lsn, cmp.Compare)
	for _, lsn := range lsns[from:] {
		if lsn > p.thru {
			break
		}
		if closing.Sub(l.commits[lsn]) >= horizon {
			return true
		}
	}
	return false
}
