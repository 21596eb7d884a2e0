package pipeline

import (
	"log/slog"
	"slices"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// maxMarks is how many commits with events a tally remembers. What is further back is not known any more.
const maxMarks = 1 << 18

// homeTally counts the events of a home in the order of the WAL: at home from the newest checkpoint on;
// elsewhere as the home's watermarks count them, from the first one on, and compares. Whether a subscription
// has skipped a transaction is written nowhere else.
type homeTally struct {
	cfg  checkpoint.Config
	log  *slog.Logger
	away bool

	marks []mark      // ascending; empty: elsewhere, before the first commit of the home
	known bool        // base is
	base  relay.Tally // what to add to a mark; its Since is that of all
	same  outbox.LSN  // elsewhere: up to there it was compared, or is taken from the home
	asked outbox.LSN  // the due of the newest checkpoint
	said  relay.Said  // the newest watermark; zero: none is known
}

// mark is what the commits up to lsn have, of those that this session counts.
type mark struct {
	lsn         outbox.LSN
	events, sum uint64
}

// newTally goes on from the newest checkpoint of a start: every later one lies beyond it.
func newTally(cfg checkpoint.Config, log *slog.Logger, newest relay.Checkpoint) *homeTally {
	t := &homeTally{
		cfg: cfg, log: log, away: cfg.Mapping.Away(), known: newest.Tally.Since != 0, base: newest.Tally,
		same: newest.Due, asked: newest.Due, said: newest.Said,
	}
	if !t.away || newest.Due > 1 { // else it is where init begins
		t.marks = []mark{{lsn: newest.Due}}
	}
	if !t.known && !t.away {
		t.known, t.base.Since = true, newest.Due
	}
	return t
}

// commit counts a commit.
func (t *homeTally) commit(c *relay.Commit) {
	if len(t.marks) == 0 {
		// Whoever has read one commit of the home reads all that follow; what came before it is not known.
		if c.LSN != 0 {
			t.marks = []mark{{lsn: c.LSN}}
		}
		return
	}
	last := t.marks[len(t.marks)-1]
	if c.Kind != relay.Events || c.LSN <= last.lsn {
		return
	}
	if len(t.marks) == maxMarks {
		t.marks = slices.Delete(t.marks, 0, maxMarks/2)
	}
	t.marks = append(t.marks, mark{c.LSN, last.events + uint64(c.Events), last.sum + relay.CommitSum(c)})
}

// at is the tally up to the due of a new checkpoint; zero if it is not known. Later calls have no lower one.
func (t *homeTally) at(due outbox.LSN) relay.Tally {
	t.asked = due
	now, ok := t.count(due)
	if !t.away {
		t.forget(due)
	}
	if !ok || !t.known {
		return relay.Tally{}
	}
	return now
}

// count is the tally up to lsn, which was read, by the present base.
func (t *homeTally) count(lsn outbox.LSN) (now relay.Tally, ok bool) {
	n := t.index(lsn)
	if n < 0 {
		return now, false
	}
	m := &t.marks[n]
	return relay.Tally{Since: t.base.Since, Events: t.base.Events + m.events, Sum: t.base.Sum + m.sum}, true
}

// index is that of the newest mark at or below lsn, -1 if there is none.
func (t *homeTally) index(lsn outbox.LSN) int {
	n, found := slices.BinarySearchFunc(t.marks, lsn, func(m mark, lsn outbox.LSN) int {
		switch {
		case m.lsn < lsn:
			return -1
		case m.lsn > lsn:
			return 1
		}
		return 0
	})
	if !found {
		n--
	}
	return n
}

func (t *homeTally) forget(lsn outbox.LSN) { t.marks = slices.Delete(t.marks, 0, max(t.index(lsn), 0)) }

// heed takes note of what the home said of itself in a commit of a time. An error says that what came here is
// not what it has.
func (t *homeTally) heed(a *away, w *relay.Watermark, commit int64) error {
	if known := a.home.Timeline; known != 0 && w.Timeline > known {
		t.log.Warn("the home was promoted: its messages name another timeline than those made here",
			"timeline", w.Timeline, "since", w.Began)
	}
	a.heed(w.Confirmed)
	t.said = relay.Said{At: relay.CommitTime(commit), LSN: w.LSN, Events: w.Events}
	return t.compare(w)
}

// compare compares what was read elsewhere with what the home has counted. A home that counts from another
// position on has a new record: from there on it is compared again.
func (t *homeTally) compare(w *relay.Watermark) error {
	have, ok := t.count(w.At)
	if w.Since == 0 || !ok { // the latter: it is of what this session does not know, and the next one of more
		return nil
	}
	if !t.known || t.base.Since != w.Since {
		if t.known {
			t.log.Warn("the home counts its events anew: its checkpoint record was made again. What it "+
				"committed meanwhile is not compared with what came here", "from", t.same, "to", w.At)
		}
		t.known = true
		t.base = relay.Tally{Since: w.Since, Events: t.base.Events + w.Events - have.Events,
			Sum: t.base.Sum + w.Sum - have.Sum}
	} else if have != w.Tally {
		return t.cfg.CountDiffers(t.same, w.At, w.Tally, have)
	}
	t.same = max(t.same, w.At)
	t.forget(min(w.At, t.asked))
	return nil
}
