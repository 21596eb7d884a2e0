package claim

import (
	"cmp"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Config is what all clusters have in common, and which one this is.
type Config struct {
	Self  int           // cluster.id, from 1 to Count
	Count int           // how many clusters there are, outbox.MaxCluster at most
	Delay time.Duration // a slot of silence; more than four times what a row takes to get anywhere
	Beat  time.Duration // of a home's signs of life, at most a quarter of Delay
	Gone  []int         // clusters that a home waits for no answer of: an operator says that none will come
}

// asked is a row that was asked for. Until it is read in the WAL nobody knows whether it was committed.
type asked struct {
	row relay.ClusterRow // Kind 0: none is open
	at  time.Duration
}

// open reports whether the row may still be committed. Later than a quarter of the delay it is not.
func (a asked) open(now, delay time.Duration) bool { return a.row.Kind != 0 && now-a.at < delay/4 }

// echoes is for each cluster the newest hello of a home of which it has written an echo.
type echoes [outbox.MaxCluster + 1]uint64

// void reports whether a claim counts for nobody: its writer had said before it that it claims no more of
// what was there at a later hello. Who reads the rows of that writer in their order knows it as well as
// anybody.
func (e *echoes) void(claim *relay.ClusterRow) bool { return claim.Hello < e[claim.By] }

// Home decides what a cluster may publish of its own commits, and what it has to say to the others.
type Home struct {
	cfg Config

	hello    uint64 // the newest one
	greeted  bool   // it was read in the own WAL
	nameless bool   // one is to be said, and has no number yet
	waits    bool   // it waits for echoes of it
	echoes   echoes
	claimed  outbox.LSN // up to there everything is published, or claimed by others
	said     outbox.LSN // up to there this home has said that everything is: nobody claims that
	from     outbox.LSN // what it had said before others claimed up to claimed: they claim what is above

	published outbox.LSN // up to there everything is in the stream, or left to others

	end    outbox.LSN    // of the own WAL at the start
	back   bool          // since the start a sign of life was read in the own WAL
	signed time.Duration // when the newest one was committed, by the server's clock
	gap    bool          // two were half a delay apart, and no hello was read since

	away    bool          // its NATS is
	since   time.Duration // since then, or since the yield
	idle    bool          // nothing was stored since NATS was away, but behind a yield: it may refuse all
	refuses bool          // it was away again since, so a yield lasts for two turns of each other cluster
	asks    bool          // this process has seen that it waits, for echoes or for a number
	asking  time.Duration // since then
	yielded bool          // since the newest hello it has asked for a yield
	told    bool          // which was read in the own WAL

	asked asked
	beat  time.Duration // of the newest sign of life
	alive bool          // there was one since the start
}

// NewHome is a home before its first start.
func NewHome(cfg Config) Home { return Home{cfg: cfg, gap: true} }

// HomeFrom is the home of which state was kept.
func HomeFrom(cfg Config, s relay.HomeState) Home {
	h := Home{cfg: cfg, hello: s.Hello, greeted: s.Greeted, nameless: s.Nameless, waits: s.Waits,
		yielded: s.Yielded, told: s.Told, claimed: s.Claimed, said: s.Said, signed: s.Signed, gap: s.Gap,
		from: cmp.Or(s.From, s.Said)} // an earlier build did not keep it
	copy(h.echoes[1:], s.Echoes)
	return h
}

// State is what has to be kept to go on from this point of the WAL; At and Timeline are the caller's to set.
// A process begins there with [Home.Start], and says what is published.
func (h *Home) State() relay.HomeState {
	return relay.HomeState{Hello: h.hello, Greeted: h.greeted, Nameless: h.nameless, Waits: h.waits,
		Yielded: h.yielded, Told: h.told, Echoes: slices.Clone(h.echoes[1 : h.cfg.Count+1]), From: h.from,
		Claimed: h.claimed, Said: h.said, Signed: h.signed, Gap: h.gap}
}

// Start begins a process, at any state that was kept, before anything is read. The own WAL ends at end now.
// It says no hello where the next sign of life is committed within half of the delay of the one before: then
// nobody has claimed meanwhile.
func (h *Home) Start(end outbox.LSN) {
	h.away, h.asks, h.alive, h.back, h.asked = false, false, false, false, asked{}
	h.idle, h.refuses = false, false
	h.end = end
}

// Starting reports whether no sign of life was read since the start.
func (h *Home) Starting() bool { return !h.back }

func (h *Home) greet() {
	h.greeted, h.nameless, h.waits, h.back = false, true, h.cfg.Count > 1, true
	h.asks, h.yielded, h.told, h.asked = false, false, false, asked{}
}

// Nameless reports whether a hello is to be said that has no number yet.
func (h *Home) Nameless() bool { return h.back && h.nameless }

// Number gives it one. One that does not follow what was read meanwhile is not taken: another one is asked
// for. Where a hello of a process before this one was read meanwhile, none is to be said any more.
func (h *Home) Number(n uint64) {
	if h.nameless && n > h.hello {
		h.hello, h.nameless = n, false
	}
}

// Away says that NATS can't be reached, or refuses a message. A home that waits sends none: that nothing was
// stored says nothing then.
func (h *Home) Away(now time.Duration) {
	switch {
	case h.away:
		return
	case !h.idle:
		h.since = now
	case !h.yielded:
		h.refuses = true
	}
	h.away, h.idle = true, !h.waits
}

// Stored says that NATS has stored a message since it was away, or that there was none to be stored.
func (h *Home) Stored() {
	h.idle, h.refuses = false, false
	h.resume()
}

// Back says that NATS can be reached again, and was read.
func (h *Home) Back() {
	h.away, h.idle = false, h.idle && (h.refuses || !h.yielded)
	h.resume()
}

// resume ends a yield when nothing is in the way any more: neither is NATS away, nor has a cluster not
// answered the newest hello. One that is gone would not answer the next hello either. A process that has not
// read yet what was there at its start does so then: a later hello may be there, and claims behind it. A NATS
// that answers, and refused all messages before, may refuse them still: only a message shows that.
func (h *Home) resume() {
	if h.back && h.yielded && !h.away && !h.waits && !h.refuses {
		h.greet()
	}
}

// Row takes a cluster row, of any cluster: where in the own WAL its transaction ends, and when that was
// committed, by the server's clock.
func (h *Home) Row(r *relay.ClusterRow, lsn outbox.LSN, committed time.Duration) {
	switch {
	case r.By == h.cfg.Self && r.Home == 0:
		h.own(r, lsn, committed)
	case r.Home != h.cfg.Self:
	case r.Kind == relay.Echo && r.Hello <= h.hello: // an echo is behind its hello in this WAL
		h.echoes[r.By] = max(h.echoes[r.By], r.Hello)
		if h.waits && h.greeted && h.echoed() {
			h.waits = false
			h.resume()
		}
		h.told = false // a yield is said again: who has answered now may have been made behind it
	case r.Kind == relay.Claim && !h.echoes.void(r) && r.To > h.claimed:
		if h.said > h.claimed { // else it is one more of the same silence
			h.from = h.said
		}
		h.claimed = r.To
	}
}

// own takes a row of this home, of this process or of one before it: that may have been on its way still.
func (h *Home) own(r *relay.ClusterRow, lsn outbox.LSN, committed time.Duration) {
	if r.Kind == h.asked.row.Kind && r.Hello == h.hello {
		h.asked = asked{}
	}
	silent := committed - h.signed
	h.gap = h.gap || silent < 0 || silent >= h.cfg.Delay/2
	h.signed = committed
	stray := false
	switch {
	case r.Kind == relay.Published:
		h.said = max(h.said, r.To)
	case r.Kind == relay.Hello && (r.Hello > h.hello || r.Hello == h.hello && !h.greeted && !h.nameless):
		// Else once more: it may have been read and answered before another one was to be said.
		h.hello, h.greeted, h.waits, h.gap = r.Hello, true, true, false
		h.nameless, h.yielded, h.told = false, false, false
	case r.Kind == relay.Yield && r.Hello == h.hello:
		stray = h.back && !h.yielded // of a process before this one
		h.yielded, h.told = true, true
	}
	if first := !h.back && lsn > h.end; first && (h.gap || h.yielded || !h.greeted) || stray {
		h.greet()
	} else if first {
		h.back = true
	}
	if h.back && h.greeted {
		h.answered()
	}
}

// answered takes the operator's word for the answers of clusters that are gone, once what had come before the
// start is read. Claims of theirs that are still to come count for nothing from then on.
func (h *Home) answered() {
	for _, n := range h.cfg.Gone {
		h.echoes[n] = max(h.echoes[n], h.hello)
	}
	h.waits = h.waits && !h.echoed()
}

func (h *Home) echoed() bool {
	for n := 1; n <= h.cfg.Count; n++ {
		if n != h.cfg.Self && h.echoes[n] != h.hello {
			return false
		}
	}
	return true
}

// Verdict is what becomes of a commit of a home.
type Verdict uint8

// The verdicts.
const (
	Wait    Verdict = iota // ask again when something was read
	Publish                // publish it
	Leave                  // another cluster publishes it
)

// May says what becomes of the oldest commit that is neither published nor left, or of an event of one, where
// a window was closed that takes all commits up to due, and some that end later. What the home had said to be
// published before others claimed it publishes again where its stream has lost it: they claim none of that.
func (h *Home) May(due, lsn outbox.LSN) Verdict {
	switch {
	case h.waits || h.yielded || !h.back:
		return Wait
	case h.Claimed(due, lsn):
		return Leave
	}
	return Publish
}

// Claimed reports whether others have claimed it, and all that comes behind it up to where they have claimed,
// by the rows that were read. In a window that was said to be published they have not claimed all, even where
// they have claimed an event that the window takes from beyond its due. Of several silences it knows the
// newest: what was claimed in an earlier one it takes for published.
func (h *Home) Claimed(due, lsn outbox.LSN) bool { return h.from < due && lsn <= h.claimed }

// Published says that everything up to there is in the stream or left to others.
func (h *Home) Published(lsn outbox.LSN) { h.published = max(h.published, lsn) }

// Next is the row that has to be written now; none if its Kind is 0. Ask whenever no other one is under way.
func (h *Home) Next(now time.Duration) relay.ClusterRow {
	if waits := h.back && h.waits && (h.greeted || h.nameless); waits != h.asks {
		h.asks, h.asking = waits, now
	}
	if h.refuses && h.yielded && now-h.since >= 2*time.Duration(h.cfg.Count-1)*h.cfg.Delay {
		h.refuses = false
		h.resume()
	}
	if h.back && !h.asked.open(now, h.cfg.Delay) {
		row := relay.ClusterRow{By: h.cfg.Self, Hello: h.hello}
		switch {
		case !h.greeted && !h.nameless:
			row.Kind = relay.Hello
		case h.yielded && !h.told:
			row.Kind = relay.Yield // without a number for the next hello it is of the one before
		case !h.yielded && h.hello > 0 && (h.away && !h.waits && now-h.since >= h.cfg.Delay ||
			h.asks && now-h.asking >= h.cfg.Delay):
			if h.yielded, h.since = true, now; !h.away {
				h.idle, h.refuses = false, false
			}
			return h.Sign(now) // before the yield, all that it has published
		}
		if row.Kind != 0 {
			h.asked = asked{row, now}
			return row
		}
	}
	if !h.alive || now-h.beat >= h.cfg.Beat { // also while it waits for echoes
		return h.Sign(now)
	}
	return relay.ClusterRow{}
}

// Sign is a sign of life, which says what is published.
func (h *Home) Sign(now time.Duration) relay.ClusterRow {
	h.alive, h.beat = true, now
	row := relay.ClusterRow{Kind: relay.Published, By: h.cfg.Self, To: h.published}
	if h.back && h.greeted { // it is the newest one, and lies before this row
		row.Hello = h.hello
	}
	return row
}
