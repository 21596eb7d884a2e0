package pipeline

import (
	"sync"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// State is what the pipeline is doing.
type State string

// The states.
const (
	StateConnecting State = "connecting"       // opening connections, finding the checkpoint
	StateStandby    State = "standby"          // another session holds the slot
	StateComparing  State = "comparing"        // making again what is in the stream already
	StateRunning    State = "running"          // proved
	StateAway       State = "waiting for NATS" // it failed; the session is kept
	StateWaiting    State = "waiting"          // between sessions
	StateStopping   State = "stopping"         // draining
	StateStopped    State = "stopped"
)

// stalled is how long the loop may be silent, or an attempt to start may take, before it counts as hanging.
const stalled = 30 * time.Second

// gauges are the loop's figures at a moment.
type gauges struct {
	held, inFlight                 int
	heldBytes                      int64
	inFlightBytes                  int
	oldest                         time.Time // commit time of the oldest event that is not acknowledged
	received, published, confirmed outbox.LSN
	seq                            uint64 // acknowledged
}

// Status is the pipeline's state at a moment, for probes and the status page.
type Status struct {
	State     State      `json:"state"`
	Since     time.Time  `json:"since"`                       // when the state began
	Error     string     `json:"error,omitempty"`             // why the last session ended
	Held      int        `json:"held"`                        // events in the buffer
	InFlight  int        `json:"in_flight"`                   // messages not acknowledged
	Received  outbox.LSN `json:"received"`                    //
	Published outbox.LSN `json:"published"`                   //
	Confirmed outbox.LSN `json:"confirmed"`                   //
	WALEnd    outbox.LSN `json:"wal_end"`                     // the server's, as last read
	Retained  uint64     `json:"slot_retained_bytes"`         //
	Seq       uint64     `json:"sequence"`                    // acknowledged in the stream
	Oldest    time.Time  `json:"oldest_unpublished,omitzero"` // commit time; zero if none
	// when everything that the server had was last published
	CaughtUp time.Time `json:"caught_up,omitzero"`
	Sessions int       `json:"sessions"` //
	// gap mode: sequences or documents that wait for a missing counter, and the oldest of them
	OpenGaps int   `json:"open_gaps,omitempty"`
	Gaps     []Gap `json:"gaps,omitempty"`

	beat time.Time
	// a transaction larger than the buffer is put in order: the loop is in one call for as long as that takes
	sorting bool
}

// Ready reports whether a session holds the slot, also while it makes again what is in the stream, or this is
// a standby that waits for it.
func (s *Status) Ready() bool {
	return s.State == StateRunning || s.State == StateStandby || s.State == StateComparing
}

// Alive reports whether the pipeline moves: the loop goes round, or attempts to start are made.
func (s *Status) Alive(now time.Time) bool {
	switch s.State {
	case StateStopped:
		return false
	case StateRunning, StateComparing, StateAway:
		return s.sorting || now.Sub(s.beat) < stalled
	case StateStandby:
		return true
	}
	return now.Sub(s.Since) < stalled
}

// Age is the age of the oldest event that was read and is not acknowledged, 0 if there is none.
func (s *Status) Age(now time.Time) time.Duration {
	if s.Oldest.IsZero() {
		return 0
	}
	return max(now.Sub(s.Oldest), 0)
}

// Lag is the time since everything that the server had was published.
func (s *Status) Lag(now time.Time) time.Duration {
	if s.CaughtUp.IsZero() {
		return 0
	}
	return max(now.Sub(s.CaughtUp), 0)
}

// health is the pipeline's state, shared between the loop and whoever asks.
type health struct {
	mu   sync.Mutex
	snap Status
}

func (h *health) init() {
	now := time.Now()
	h.snap = Status{State: StateConnecting, Since: now, CaughtUp: now, beat: now}
}

func (h *health) set(s State, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if h.snap.State != s {
		h.snap.State, h.snap.Since = s, now
	}
	h.snap.beat = now
	switch {
	case err != nil:
		h.snap.Error = err.Error()
	case s == StateRunning || s == StateStandby:
		h.snap.Error = ""
	}
	if s == StateConnecting {
		h.snap.Sessions++
	}
}

// turned takes note that the loop has gone round.
func (h *health) turned(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.beat = now
}

func (h *health) sorting(now bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.sorting, h.snap.beat = now, time.Now()
}

// read takes note of what a start has read.
func (h *health) read(r *checkpoint.Readings) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.WALEnd, h.snap.Confirmed = r.Server.WALEnd, r.Slot.Confirmed
	h.snap.Retained = outbox.Distance(r.Slot.Restart, r.Server.WALEnd)
}

// server takes note of what the server said while the session runs.
func (h *health) server(end outbox.LSN, slot relay.SlotState) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.WALEnd = end
	h.snap.Retained = outbox.Distance(slot.Restart, end)
}

func (h *health) setGauges(g *gauges, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.beat = now
	h.snap.Held, h.snap.InFlight, h.snap.Oldest = g.held, g.inFlight, g.oldest
	h.snap.Received, h.snap.Published, h.snap.Confirmed, h.snap.Seq =
		g.received, g.published, g.confirmed, g.seq
	if g.held == 0 && g.inFlight == 0 && g.received >= h.snap.WALEnd {
		h.snap.CaughtUp = now
	}
}

// setGaps takes the list over.
func (h *health) setGaps(open int, oldest []Gap) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.OpenGaps, h.snap.Gaps = open, oldest
}

func (h *health) snapshot() Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.snap
}

// Status returns the state at this moment. Safe for concurrent use.
func (p *Pipeline) Status() Status { return p.health.snapshot() }
