package checkpoint

import (
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// maxStoredAhead is how many events published ahead and holds all checkpoints of a record may list together.
// It keeps the record, which is one message, well below 1 MiB.
const maxStoredAhead = 8192

// maxLimited is how many checkpoints a record has at most where a home limits what is confirmed. Without
// that, durable_after does.
const maxLimited = 256

// Tracker knows the checkpoints of a session: which windows are acknowledged, which checkpoints are worth
// storing, and which LSN may be confirmed. It is a pure state machine: every now is what time.Now() returned
// (intervals are taken by its monotonic reading, the record's times by its wall clock). Not safe for
// concurrent use.
type Tracker struct {
	durable time.Duration
	last    uint64 // the stream's last sequence at the start
	there   uint64 // so many messages to be made were in the stream already
	made    uint64 // messages made since the start
	acked   uint64 // the stream is known to hold all up to here

	holes       []Range
	checkpoints []trackedCheckpoint // ascending; the stored ones first
	// checkpoints of windows that wait for their last message's acknowledgement, ascending
	pending   []relay.Checkpoint
	confirmed outbox.LSN // all that was handed to Confirmed
	limit     outbox.LSN // nothing above is confirmed; 0: there is none

	shared        bool       // the record says what is confirmed, to clusters that share the stream
	firm          outbox.LSN // what is published at the newest checkpoint that was found durable
	telling, told outbox.LSN // the same in the update that is being stored, and in the record

	asked, broker time.Time // when the broker's clock was asked, by ours, and what it said; see brokerTime

	rewrite bool      // what the start found must be stored before anything is sent
	saving  bool      // between BeginSave and Saved or Unsaved
	savedAt time.Time // when the last save began, in this session or before
}

type trackedCheckpoint struct {
	relay.Checkpoint
	state     state
	keepalive bool      // a keepalive's, not a window's
	since     time.Time // unless fresh: when it was first stored, for the record
	broker    time.Time // the same by the broker's clock, zero if that is not known
	storedAt  time.Time // if stored: the same by this process's clock
	durable   bool      // Confirmable has found it so; unlike its age, that is never taken back
}

// state says how far a checkpoint is on its way into the record.
type state uint8

const (
	fresh   state = iota // in no update yet
	sent                 // in the update that is being stored
	inStore              // in the record
)

// Update is what is to be stored: the record's checkpoints and holes, and what it says to be confirmed. The
// caller adds Heard, where others publish for a home that is silent, or Reader, where it does so for one.
type Update struct {
	Checkpoints []StoredCheckpoint
	Holes       []Range
	Confirmed   outbox.LSN // of a stream that clusters share; see [Record.Confirmed]
	Heard       *relay.HomeState
	Reader      *relay.ReaderState
}

// NewTracker returns the tracker of a session from start.
func NewTracker(cfg Config, start Start, now time.Time) *Tracker {
	t := &Tracker{
		durable: cfg.DurableAfter, last: start.LastSeq, there: start.AlreadyStored, acked: start.LastSeq,
		holes: start.Holes, confirmed: start.Confirmed, rewrite: start.Rewrite, asked: start.Asked,
		broker: start.Broker, shared: start.Shared, told: start.Told,
	}
	for _, p := range start.Checkpoints {
		age := t.age(p, now)
		t.checkpoints = append(t.checkpoints, trackedCheckpoint{
			Checkpoint: p.Checkpoint, state: inStore, since: p.Since, broker: p.Broker,
			storedAt: now.Add(-age),
		})
		// The interval holds across sessions: sessions that follow each other fast must not use up the
		// bucket's history.
		t.savedAt = now.Add(-age)
	}
	return t
}

// age is how long a checkpoint that was read at the start has been in the record: by this machine's clock or
// by the broker's, whichever says less. So a clock that was set forward in between, or a machine whose clock
// is ahead, does not make a checkpoint look durable. A time in the future is another clock's: the checkpoint
// counts as stored now.
func (t *Tracker) age(p StoredCheckpoint, now time.Time) time.Duration {
	age := now.Round(0).Sub(p.Since)
	if !p.Broker.IsZero() && !t.broker.IsZero() {
		age = min(age, t.broker.Sub(p.Broker))
	}
	return max(0, age)
}

// brokerTime is what the broker's clock says at now, or somewhat later: it was asked after t.asked. Zero: it
// is not known.
func (t *Tracker) brokerTime(now time.Time) time.Time {
	if t.broker.IsZero() {
		return time.Time{}
	}
	return t.broker.Add(now.Sub(t.asked)).UTC()
}

// Made counts n further messages that the rules made, also those that are in the stream already and not sent.
func (t *Tracker) Made(n int) { t.made += uint64(n) }

// at is the sequence that the newest message made has or gets.
func (t *Tracker) at() uint64 { return t.last + t.made - t.there }

// verified: all that was in the stream at the start has been made.
func (t *Tracker) verified() bool { return t.made >= t.there }

// Window notes that a window with events ended at cp, after all its messages were counted with Made. The
// checkpoint counts once the last of them is acknowledged; its Seq is set here, its Timeline by the caller.
// Checkpoints that the record goes beyond already are passed over. Where a window ends without a checkpoint,
// Made is enough.
func (t *Tracker) Window(cp relay.Checkpoint) {
	if !t.verified() || cp.Due <= t.newest().Due {
		return
	}
	cp.Seq = t.at()
	t.pending = append(t.pending, cp)
	t.advance()
}

// Acked notes that the stream holds everything up to sequence seq.
func (t *Tracker) Acked(seq uint64) {
	t.acked = max(t.acked, seq)
	t.advance()
}

func (t *Tracker) advance() {
	n := 0
	for n < len(t.pending) && t.pending[n].Seq <= t.acked {
		t.append(trackedCheckpoint{Checkpoint: t.pending[n]})
		n++
	}
	t.pending = slices.Delete(t.pending, 0, n)
}

// Keepalive notes the LSN of a keepalive. In horizon mode the buffer must hold no event then; in gap mode cp
// has the holds. Its Seq is set here, its Timeline by the caller. It counts only where no message is
// unacknowledged, and reports whether it did.
func (t *Tracker) Keepalive(cp relay.Checkpoint) bool {
	top := t.newest()
	// Where a home is silent, the WAL that its rows are read from goes on.
	further := cp.Due > top.Due || cp.Due == top.Due && cp.Start() > top.Start()
	if !t.verified() || t.Unacknowledged() || !further {
		return false
	}
	cp.Seq = t.at()
	if top.keepalive && top.state == fresh && top.Seq == cp.Seq {
		top.Checkpoint = cp
		return true
	}
	t.append(trackedCheckpoint{Checkpoint: cp, keepalive: true})
	return true
}

func (t *Tracker) newest() *trackedCheckpoint { return &t.checkpoints[len(t.checkpoints)-1] }

// append adds the newest checkpoint, and drops of those that are in no update yet all but the two newest and
// the newest one of a smaller seq: they are all that is stored of them.
func (t *Tracker) append(p trackedCheckpoint) {
	t.checkpoints = append(t.checkpoints, p)
	smaller := t.smaller()
	for i := len(t.checkpoints) - 3; i >= 0 && t.checkpoints[i].state == fresh; i-- {
		if i != smaller {
			t.checkpoints = slices.Delete(t.checkpoints, i, i+1)
		}
	}
}

// smaller is the index of the newest checkpoint with a smaller seq than the newest one, -1 if there is none.
func (t *Tracker) smaller() int {
	i := len(t.checkpoints) - 1
	for i >= 0 && t.checkpoints[i].Seq == t.newest().Seq {
		i--
	}
	return i
}

// Newest returns the newest checkpoint.
func (t *Tracker) Newest() relay.Checkpoint { return t.newest().Checkpoint }

// Recorded returns the newest checkpoint that is in the record.
func (t *Tracker) Recorded() relay.Checkpoint {
	for i := len(t.checkpoints) - 1; i > 0; i-- {
		if t.checkpoints[i].state == inStore {
			return t.checkpoints[i].Checkpoint
		}
	}
	return t.checkpoints[0].Checkpoint
}

// Unacknowledged reports whether the stream is not known to hold all messages made.
func (t *Tracker) Unacknowledged() bool { return t.acked < t.at() }

// MustSave reports whether the record must be written before anything is sent.
func (t *Tracker) MustSave() bool { return t.rewrite }

// Pending reports whether there is something new to store. Nothing is while an update is being stored, or
// before all that is in the stream was made. That a checkpoint has become durable is new to other clusters:
// while the home is idle, nothing else would tell them.
func (t *Tracker) Pending() bool {
	news := t.rewrite || t.newest().state == fresh || t.shared && t.firm > t.told
	return t.verified() && !t.saving && news
}

// SaveInterval is the least time between two saves of a session, also across sessions: the revisions that the
// bucket keeps then reach back further than the durable_after that a lost tail may take.
func (t *Tracker) SaveInterval() time.Duration { return saveInterval(t.durable) }

// SaveInterval is that of the sessions of this configuration.
func (c Config) SaveInterval() time.Duration { return saveInterval(c.DurableAfter) }

func saveInterval(durable time.Duration) time.Duration { return max(time.Second, durable/32) }

// SaveIn says in how long the next save is due, 0: now. ok is false while there is nothing to store. At a
// clean stop a save may begin at any time.
func (t *Tracker) SaveIn(now time.Time) (in time.Duration, ok bool) {
	if !t.Pending() {
		return 0, false
	}
	if t.rewrite {
		return 0, true
	}
	return max(0, t.SaveInterval()-now.Sub(t.savedAt)), true
}

// BeginSave returns what to store now: the checkpoints from the durable one to the newest, and the newest
// one of a smaller seq than that. Saved, Unsaved or the session's end follows before the next one.
func (t *Tracker) BeginSave(now time.Time) Update {
	t.saving, t.savedAt = true, now
	t.prune()
	t.dropSome()
	s := Update{Checkpoints: make([]StoredCheckpoint, len(t.checkpoints)),
		Holes: needed(t.holes, t.checkpoints[0].Checkpoint), Confirmed: t.firm}
	t.telling = t.firm
	for i := range t.checkpoints {
		p := &t.checkpoints[i]
		if p.state == fresh {
			p.state, p.since, p.broker = sent, now.Round(0).UTC(), t.brokerTime(now)
		}
		s.Checkpoints[i] = StoredCheckpoint{Checkpoint: p.Checkpoint, Since: p.since, Broker: p.broker}
	}
	return s
}

// prune drops the checkpoints before the durable one, all but the one that is needed for comparison. (Where
// the outbox is silent, that one stays for as long as keepalives go on.)
func (t *Tracker) prune() {
	durable, from := t.durableIndex(), 0
	if smaller := t.smaller(); smaller >= 0 && smaller < durable {
		t.checkpoints[0], from = t.checkpoints[smaller], 1
	}
	t.checkpoints = slices.Delete(t.checkpoints, from, durable)
}

// durableIndex is the index of the newest checkpoint that is durable and was confirmed: whatever else the
// broker loses, a start can go on from there. Of those that start at the confirmed LSN the oldest is one:
// some session has found it, or a newer one that starts there too, to be durable. The newer ones may still be
// lost.
func (t *Tracker) durableIndex() int {
	durable := 0
	for i := range t.checkpoints {
		p := &t.checkpoints[i]
		if p.Start() <= t.confirmed && (p.durable || i == 0 || t.checkpoints[i-1].Start() < p.Start()) {
			durable = i
		}
	}
	return durable
}

// dropSome drops intermediate checkpoints, those that were stored shortly before the next one first, until
// they, and the events published ahead and the holds, are few enough for one message. Confirming gets coarser
// then.
func (t *Tracker) dropSome() {
	listed := 0
	for _, p := range t.checkpoints {
		listed += len(p.PublishedAhead) + len(p.Holds)
	}
	for listed > maxStoredAhead || t.limit != 0 && len(t.checkpoints) > maxLimited {
		drop, smaller, durable := -1, t.smaller(), t.durableIndex()
		var closest time.Duration
		for i := 1; i < len(t.checkpoints)-2; i++ {
			p := &t.checkpoints[i]
			lists := len(p.PublishedAhead)+len(p.Holds) > 0
			if i == smaller || i == durable || !lists && listed > maxStoredAhead {
				continue
			}
			if gap := p.storedAt.Sub(t.checkpoints[i-1].storedAt); drop < 0 || gap < closest {
				drop, closest = i, gap
			}
		}
		if drop < 0 {
			return
		}
		p := &t.checkpoints[drop]
		listed -= len(p.PublishedAhead) + len(p.Holds)
		t.checkpoints = slices.Delete(t.checkpoints, drop, drop+1)
	}
}

// Saved notes that the store acknowledged the last update.
func (t *Tracker) Saved(now time.Time) {
	t.saving, t.rewrite, t.told = false, false, t.telling
	for i := range t.checkpoints {
		if p := &t.checkpoints[i]; p.state == sent {
			// From here on its age counts, also for later revisions: it was on its way until now.
			p.state, p.storedAt, p.since, p.broker = inStore, now, now.Round(0).UTC(), t.brokerTime(now)
		}
	}
}

// Confirmable returns the LSN that may be confirmed: the start of the newest checkpoint that has been in the
// record for durable_after. It never goes back.
//
// The broker was known to be alive at heard, so it has had durable_after to sync what was stored that long
// before. Later times do not count: a broker that died in silence syncs nothing any more.
func (t *Tracker) Confirmable(heard time.Time) outbox.LSN {
	if !t.verified() || t.rewrite {
		return t.confirmed
	}
	for i := len(t.checkpoints) - 1; i >= 0; i-- {
		if p := &t.checkpoints[i]; p.state == inStore && (t.limit == 0 || p.Published() <= t.limit) &&
			(t.durable == 0 || heard.Sub(p.storedAt) >= t.durable) {
			p.durable, t.firm = true, max(t.firm, p.Published())
			return max(t.confirmed, p.Start())
		}
	}
	return t.confirmed
}

// Limit says up to where a home, whose rows are read on another server, has confirmed its own WAL; 0: it has
// said nothing. A checkpoint at or below stays in the record then, and nothing behind it is confirmed: so
// there is one from which the home's own checkpoints can be gone on from, see [Record.Elsewhere].
func (t *Tracker) Limit(home outbox.LSN) { t.limit = max(t.limit, home) }

// Confirmed notes that lsn, from Confirmable, was handed to the server. Older checkpoints are then left out
// of the next update.
func (t *Tracker) Confirmed(lsn outbox.LSN) { t.confirmed = max(t.confirmed, lsn) }
