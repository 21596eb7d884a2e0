package claim

import (
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

	hello   uint64 // the newest one
	greeted bool   // it was read in the own WAL
	waits   bool   // it waits for echoes of it
	echoes  echoes
	claimed outbox.LSN // up to there everything is published, or claimed by others

	published outbox.LSN // up to there everything is in the stream, or left to others

	away    bool          // its NATS is
	since   time.Duration // since then
	yielded bool          // since the newest hello it has asked for a yield
	told    bool          // which was read in the own WAL

	asked asked
	beat  time.Duration // of the newest sign of life
	alive bool          // there was one since the start
}

// NewHome is a home before its first start.
func NewHome(cfg Config) Home { return Home{cfg: cfg} }

// Start begins a process, at any state that was kept, before anything is read. number is that of its hello.
func (h *Home) Start(number uint64) {
	h.away, h.alive = false, false
	h.greet(number)
}

func (h *Home) greet(number uint64) {
	h.hello, h.greeted, h.waits = max(number, h.hello+1), false, h.cfg.Count > 1
	h.yielded, h.told, h.asked = false, false, asked{}
}

// Away says that NATS can't be reached.
func (h *Home) Away(now time.Duration) {
	if !h.away {
		h.away, h.since = true, now
	}
}

// Back says that NATS can be reached again. number is that of a hello, if it takes one.
func (h *Home) Back(number uint64) {
	h.away = false
	if h.yielded {
		h.greet(number)
	}
}

// Row takes a cluster row, of any cluster.
func (h *Home) Row(r *relay.ClusterRow) {
	switch {
	case r.By == h.cfg.Self && r.Kind == h.asked.row.Kind && r.Hello == h.hello:
		h.greeted = h.greeted || r.Kind == relay.Hello
		h.told = h.told || r.Kind == relay.Yield
		h.asked = asked{}
	case r.Home != h.cfg.Self:
	case r.Kind == relay.Echo:
		h.echoes[r.By] = max(h.echoes[r.By], r.Hello)
		h.waits = h.waits && !h.echoed()
	case r.Kind == relay.Claim && !h.echoes.void(r):
		h.claimed = max(h.claimed, r.To)
	}
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

// May says what becomes of the oldest commit that is neither published nor left.
func (h *Home) May(lsn outbox.LSN) Verdict {
	switch {
	case h.waits || h.yielded:
		return Wait
	case lsn <= h.claimed:
		return Leave
	}
	return Publish
}

// Published says that everything up to there is in the stream or left to others.
func (h *Home) Published(lsn outbox.LSN) { h.published = max(h.published, lsn) }

// Next is the row that has to be written now; none if its Kind is 0. Ask whenever no other one is under way.
func (h *Home) Next(now time.Duration) relay.ClusterRow {
	if !h.asked.open(now, h.cfg.Delay) {
		row := relay.ClusterRow{By: h.cfg.Self, Hello: h.hello}
		switch {
		case !h.greeted:
			row.Kind = relay.Hello
		case h.yielded && !h.told:
			row.Kind = relay.Yield
		case h.away && !h.yielded && !h.waits && now-h.since >= h.cfg.Delay:
			h.yielded = true
			return h.sign(now) // before the yield, all that it has published
		}
		if row.Kind != 0 {
			h.asked = asked{row, now}
			return row
		}
	}
	if !h.alive || now-h.beat >= h.cfg.Beat { // also while it waits for echoes
		return h.sign(now)
	}
	return relay.ClusterRow{}
}

func (h *Home) sign(now time.Duration) relay.ClusterRow {
	h.alive, h.beat = true, now
	return relay.ClusterRow{Kind: relay.Published, By: h.cfg.Self, To: h.published}
}
