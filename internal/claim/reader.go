package claim

import (
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Range is of a home's commits: those that end above From and up to To. It is empty where they are the same.
type Range struct{ From, To outbox.LSN }

// Reader decides what a cluster publishes of the commits of a home, and what it has to say to the others.
type Reader struct {
	cfg  Config
	home int

	first   outbox.LSN // its first commit that was read: what ends before it may not be here
	newest  outbox.LSN // the home's newest commit
	settled outbox.LSN // up to there its commits are published by it, or claimed
	hello   uint64     // its newest one; 0: it has said none, and nothing may be claimed
	echoes  echoes

	yielded bool          // it does not publish until it says hello
	since   time.Duration // its silence began, or, if it has yielded, the turn of the first cluster behind it
	late    bool          // others may have read that yield long ago, and have claimed since
	off     bool          // its turns are at other times than those of the others
	came    time.Duration // the oldest commit that is not settled was read then, or before

	started  time.Duration // this process
	answered uint64        // the newest hello of which it has read an own echo behind the end of its WAL

	ended time.Duration // when the own WAL was last known to be read to its end
	end   bool          // it was, since the start

	asked asked
}

// NewReader is the reader of the rows of cluster home before anything was read.
func NewReader(cfg Config, home int) Reader { return Reader{cfg: cfg, home: home} }

// Start begins a process, at any state that was kept, before anything is read: silence is counted anew.
func (r *Reader) Start(now time.Duration) {
	r.end, r.asked, r.started, r.answered, r.late = false, asked{}, now, 0, r.yielded
	r.came = now
	r.heard(now)
}

// circle is the time of a slot of each other cluster.
func (r *Reader) circle() time.Duration { return time.Duration(r.cfg.Count-1) * r.cfg.Delay }

// End says that the own WAL is read to its end, which was asked for at now or later. Call it as often as that
// can be known, and before Next: only at such a moment there may be a claim. Where it was not known for half
// of the delay, the database may have been away, and what came for it meanwhile may come later still: silence
// is counted anew, as at a start.
func (r *Reader) End(now time.Duration) {
	if r.end && now-r.ended >= r.cfg.Delay/2 {
		since, came := r.since, r.came // of rows that were read since the end was asked for
		r.Start(now)
		r.since, r.came = max(r.since, since), max(r.came, came)
	}
	r.ended, r.end = now, true
}

// heard begins the silence again. Who reads a backlog does not know when the row came, and has its turns at
// other times than the rest, until it reads one in time: it waits for a whole circle more, and claims only
// what came before the last circle. In a circle whoever else can claim does.
func (r *Reader) heard(now time.Duration) {
	r.since = now
	if r.off = r.late || !r.end || now-r.ended > r.cfg.Delay/8; r.off {
		r.since += r.circle()
	}
}

// settle takes a word of up to where commits are published or claimed.
func (r *Reader) settle(now time.Duration, to outbox.LSN) {
	if to > r.settled {
		r.settled, r.came = to, now
	}
}

// First takes where the home's first commit ends that is read here, of events or cluster rows. Nothing is
// claimed until the home has said to have published up to there, or another cluster has claimed it: what was
// replicated before the slot was made would be in the claim, and in no stream. A later call changes nothing.
func (r *Reader) First(lsn outbox.LSN) {
	if r.first == 0 {
		r.first = lsn
	}
}

// Commit takes a commit of the home that has events.
func (r *Reader) Commit(now time.Duration, lsn outbox.LSN) {
	if r.newest <= r.settled {
		r.came = now
	}
	r.newest = max(r.newest, lsn)
}

// Row takes a cluster row, of any cluster. What it returns is to be published.
func (r *Reader) Row(now time.Duration, row *relay.ClusterRow) (publish Range) {
	if row.By == r.home {
		r.of(now, row)
		return publish
	}
	if row.Home != r.home {
		return publish
	}
	if row.By == r.cfg.Self && row.Kind == r.asked.row.Kind {
		r.asked = asked{}
	}
	switch {
	case row.Kind == relay.Echo && (row.By != r.cfg.Self || row.Hello <= r.hello):
		// An own one is behind its hello in this WAL. Another cluster may have read a hello first.
		r.echoes[row.By] = max(r.echoes[row.By], row.Hello)
		if row.By == r.cfg.Self && r.end {
			r.answered = row.Hello
		}
	case row.Kind == relay.Claim && (r.echoes.void(row) || r.echoes[row.By] == 0 && row.Hello < r.hello):
		// Of an echo that came before this reader was made it does not know: the claim may be void.
	case row.Kind == relay.Claim:
		// It acts here, where it is read, whenever it was decided: what was settled before is not in it.
		if from, to := max(row.From, r.settled), min(row.To, r.newest); row.By == r.cfg.Self && from < to {
			publish = Range{from, to}
		}
		r.settle(now, row.To)
		r.heard(now)
	}
	return publish
}

// of takes a row of the home. What it says of its own commits is a sign of life of the process that publishes
// them. Its events are none, nor what another process of it says of another home.
func (r *Reader) of(now time.Duration, row *relay.ClusterRow) {
	switch row.Kind {
	case relay.Published:
		r.settle(now, row.To)
		r.hello = max(r.hello, row.Hello) // a reader that was made behind it
	case relay.Hello:
		if row.Hello > r.hello {
			r.hello, r.yielded, r.late = row.Hello, false, false
		}
	case relay.Yield:
		if row.Hello >= r.hello { // else it was written before a hello that came first
			// The home may have yielded because this cluster was gone: then the yield came with its return. A
			// yield comes a slot after the hello, mostly; who was there then is older.
			age := now - r.started
			r.late = r.late || r.echoes[r.cfg.Self] < row.Hello || age < r.cfg.Delay*3/4 ||
				r.answered < row.Hello && age < r.circle()
			if !r.yielded { // else once more: the turns go on
				r.yielded = true
				r.heard(now)
			}
		}
	}
	if !r.yielded && row.Home == 0 {
		r.heard(now)
	}
}

// Next is the row that has to be written now; none if its Kind is 0. Ask whenever no other one is under way.
func (r *Reader) Next(now time.Duration) relay.ClusterRow {
	open := r.asked.open(now, r.cfg.Delay)
	row := relay.ClusterRow{By: r.cfg.Self, Home: r.home, Hello: r.hello}
	switch {
	case r.echoes[r.cfg.Self] < r.hello && !(open && r.asked.row == echo(row)):
		row = echo(row) // whatever claim is open: behind the echo it is void
	case r.hello > 0 && !open && r.end && r.ended == now && r.settled >= r.first &&
		r.newest > r.settled && r.turn(now):
		row.Kind, row.From, row.To = relay.Claim, r.settled, r.newest
	default:
		return relay.ClusterRow{}
	}
	r.asked = asked{row, now}
	return row
}

func echo(row relay.ClusterRow) relay.ClusterRow { row.Kind = relay.Echo; return row }

// turn reports whether this cluster may claim: silence has slots, of which the first is the home's own, and
// each later one that of the next cluster behind it, in a circle. Only in its first quarter it claims, so
// that the claim is committed in the first half, and gets everywhere in the second. A yield is a slot of
// silence.
func (r *Reader) turn(now time.Duration) bool {
	silent := now - r.since
	if r.yielded {
		silent += r.cfg.Delay
	}
	if silent < r.cfg.Delay || r.off && now-r.came < r.circle() {
		return false
	}
	slot, into := int64(silent/r.cfg.Delay), silent%r.cfg.Delay
	behind := int64((r.cfg.Self-r.home+r.cfg.Count)%r.cfg.Count) - 1
	return (slot-1)%int64(r.cfg.Count-1) == behind && into < r.cfg.Delay/4
}
