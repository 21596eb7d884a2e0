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
	StateConnecting State = "connecting"           // opening connections, finding the checkpoint
	StateStandby    State = "standby"              // another session holds the slot, or a cluster the stream
	StateComparing  State = "comparing"            // making again what is in the stream already
	StateRunning    State = "running"              // proved
	StateAway       State = "waiting for NATS"     // it failed; the session is kept
	StateEchoes     State = "waiting for clusters" // others may publish until they have answered
	StateWaiting    State = "waiting"              // between sessions
	StateStopping   State = "stopping"             // draining
	StateFault      State = "fault"                // a person is needed: see Status.Fault
	StateStopped    State = "stopped"
)

// Fault is what publishing has stopped at until a person acts.
type Fault struct {
	Code    string    `json:"code"`
	Message string    `json:"message"` // with the cause and the range of LSNs, without the hint
	Hint    string    `json:"hint"`
	Since   time.Time `json:"since"` // when it was first found; kept while starts find the same
}

// stalled is how long the loop may be silent, or an attempt to start may take, before it counts as hanging.
const stalled = 30 * time.Second

// States lists all of them.
var States = []State{StateConnecting, StateStandby, StateComparing, StateRunning, StateAway, StateEchoes,
	StateWaiting, StateStopping, StateFault, StateStopped}

// gauges are the loop's figures at a moment.
type gauges struct {
	held, inFlight                 int
	heldBytes                      int64
	inFlightBytes                  int
	idle                           bool // all that was read is acknowledged
	limits                         relay.Settings
	oldest                         time.Time // commit time of the oldest event that is not acknowledged
	received, published, confirmed outbox.LSN
	seq                            uint64 // acknowledged
	newlyLate                      uint64 // late events since the last report
	said                           relay.Said
	tally                          relay.Tally
	kept                           checkpoint.Kept
	agreed                         *Agreement
}

// Status is the pipeline's state at a moment, for probes and the status page.
type Status struct {
	State     State      `json:"state"`
	Since     time.Time  `json:"since"`                       // when the state began
	Error     string     `json:"error,omitempty"`             // why the last session ended
	Code      string     `json:"code,omitempty"`              // of Error; "": none, or it does not count yet
	Fault     *Fault     `json:"fault,omitempty"`             // nil: none; read-only
	Held      int        `json:"held"`                        // events in the buffer
	HeldBytes int64      `json:"held_bytes"`                  // of them, as reorder.max_bytes counts
	InFlight  int        `json:"in_flight"`                   // messages not acknowledged
	Late      uint64     `json:"late_events"`                 // since this process started
	Received  outbox.LSN `json:"received"`                    // up to where the WAL was read; 0: nothing was
	Published outbox.LSN `json:"published"`                   // everything up to there is; 0: not known
	Confirmed outbox.LSN `json:"confirmed"`                   //
	WALEnd    outbox.LSN `json:"wal_end"`                     // the server's, as last read
	Seq       uint64     `json:"sequence"`                    // acknowledged in the stream
	Oldest    time.Time  `json:"oldest_unpublished,omitzero"` // commit time; zero if none that was read
	// the last time at which everything that the server had was known to be published; zero: not known
	CaughtUp time.Time `json:"caught_up,omitzero"`
	// when Ready last changed: since when it has been up, or down
	ReadyChanged time.Time `json:"ready_changed"`
	Sessions     int       `json:"sessions"` // that held the slot
	// the limits in force of Held and HeldBytes; 0: there was no session yet
	HeldLimit      int   `json:"held_limit,omitempty"`
	HeldLimitBytes int64 `json:"held_limit_bytes,omitempty"`
	InFlightBytes  int   `json:"in_flight_bytes"`
	// gap mode: sequences or documents that wait for a missing counter, and the oldest of them
	OpenGaps int   `json:"open_gaps,omitempty"`
	Gaps     []Gap `json:"gaps,omitempty"`
	// since when more sequences wait than a checkpoint can list, so that none is recorded; zero: they do not
	Unlisted time.Time `json:"no_checkpoint_since,omitzero"`
	// with a control table: the newest watermark, written here or read here of the home; the home's events up
	// to what is published; and what the slot keeps because the home has not confirmed it
	Said  relay.Said      `json:"watermark,omitzero"`
	Tally relay.Tally     `json:"counted,omitzero"`
	Kept  checkpoint.Kept `json:"kept_for_home,omitzero"`
	// where clusters share the stream: who makes it, and in which epoch, by the record as it was last read
	Owner int    `json:"owner,omitempty"`
	Epoch uint64 `json:"epoch,omitempty"`
	// where clusters share nothing: how this one stands with the others; nil: it has not the mode, or no
	// session holds the slot; read-only
	Agreed *Agreement `json:"agreement,omitempty"`

	beat time.Time
	// something is under way that may take long: a transaction larger than the buffer is put in order, or a
	// start reads what gap mode remembers
	busy bool
}

// Ready reports whether a session holds the slot, also while it makes again what is in the stream, or this is
// a standby that waits for it.
func (s *Status) Ready() bool {
	return s.Fault == nil &&
		(s.State == StateRunning || s.State == StateStandby || s.State == StateComparing)
}

// Alive reports whether the pipeline moves: the loop goes round, or attempts to start are made. One that
// waits for a person at a fault is alive: a restart would not help.
func (s *Status) Alive(now time.Time) bool {
	switch s.State {
	case StateStopped:
		return false
	case StateRunning, StateComparing, StateAway, StateEchoes:
		return s.busy || now.Sub(s.beat) < stalled
	case StateStandby, StateFault:
		return true
	}
	return s.busy || now.Sub(s.Since) < stalled
}

// Holds reports whether a session of this process holds the slot.
func (s *Status) Holds() bool {
	switch s.State {
	case StateComparing, StateRunning, StateAway, StateEchoes, StateStopping:
		return true
	}
	return false
}

// Unpublished is how much WAL there is that is not published, as far as that is known: on a standby it is
// not, nor before the first session of a process that can't reach PostgreSQL. Not all of it need be events.
func (s *Status) Unpublished() (bytes uint64, known bool) {
	if s.State == StateStandby || s.Published == 0 || s.WALEnd == 0 {
		return 0, false
	}
	return outbox.Distance(s.Published, s.WALEnd), true
}

// OldestUnpublished is when the oldest event that is not published was committed; zero: there is none. While
// no WAL is read that is not known; then it is the last time at which nothing waited, as far as there is WAL
// that was written since: the event is not older than that.
func (s *Status) OldestUnpublished() time.Time {
	if n, _ := s.Unpublished(); n == 0 || !s.Oldest.IsZero() {
		return s.Oldest
	}
	switch s.State {
	case StateRunning, StateComparing, StateStopping:
		return time.Time{}
	}
	return s.CaughtUp
}

// Age is the age of the oldest event that is not published, or more; 0 if there is none. See
// [Status.OldestUnpublished].
func (s *Status) Age(now time.Time) time.Duration { return age(s.OldestUnpublished(), now) }

// Lag is the time since everything that the server had was published; 0 where that is not known.
func (s *Status) Lag(now time.Time) time.Duration { return age(s.CaughtUp, now) }

func age(t, now time.Time) time.Duration {
	if t.IsZero() {
		return 0
	}
	return max(now.Sub(t), 0)
}

// health is the pipeline's state, shared between the loop and whoever asks.
type health struct {
	mu      sync.Mutex
	snap    Status
	walRead time.Time // when snap.WALEnd was read
	look    look      // the oldest reading that is not known to be published
}

func (h *health) init() {
	now := time.Now()
	h.snap = Status{State: StateConnecting, Since: now, ReadyChanged: now, beat: now}
}

// failed takes note of a fault that needs a person, and returns when it was first found; again: it is the one
// of before.
func (h *health) failed(f *outbox.Fault, again bool) (since time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	message := *f
	message.Hint = ""
	found := &Fault{Code: f.Code, Message: message.Error(), Hint: f.Hint, Since: time.Now()}
	if old := h.snap.Fault; old != nil && again {
		found.Since = old.Since
	}
	h.change(StateFault, found.Since)
	h.snap.Fault, h.snap.Error, h.snap.Code = found, f.Code+": "+f.Error(), f.Code
	return found.Since
}

// recovered takes note that the fault is gone, and returns since when it was there.
func (h *health) recovered() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	now, since := time.Now(), h.snap.Fault.Since
	h.snap.Fault, h.snap.Error, h.snap.Code = nil, "", ""
	h.snap.Since, h.snap.ReadyChanged = now, now
	return since
}

func (h *health) change(s State, since time.Time) {
	was := h.snap.Ready()
	h.snap.State, h.snap.Since = s, since
	if h.snap.Ready() != was {
		h.snap.ReadyChanged = time.Now()
	}
}

func (h *health) set(s State, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if h.snap.State != s {
		h.change(s, now)
	}
	h.snap.beat = now
	switch {
	case h.snap.Fault != nil:
	case err != nil:
		h.snap.Error, h.snap.Code = err.Error(), ""
		if f := outbox.FaultOf(err); f != nil && f.Class == outbox.Transient {
			h.snap.Code = f.Code // a gap has yet to be read again
		}
	case s == StateRunning || s == StateStandby:
		h.snap.Error, h.snap.Code = "", ""
	}
	if s == StateStandby { // somebody else publishes: what was known of that is over
		h.snap.Received, h.snap.Published, h.snap.Confirmed, h.snap.Seq = 0, 0, 0, 0
		h.snap.Oldest, h.snap.CaughtUp = time.Time{}, time.Time{}
		h.snap.Said, h.snap.Tally, h.snap.Kept = relay.Said{}, relay.Tally{}, checkpoint.Kept{}
		h.snap.Agreed = nil
	}
}

// sessionBegan takes note of a session that holds the slot.
func (h *health) sessionBegan() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.Sessions++
}

// sessionEnded takes note that what the session held is forgotten. Its events are in the WAL, so how far it
// came and what is not published stays true.
func (h *health) sessionEnded() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.Held, h.snap.HeldBytes, h.snap.InFlight, h.snap.InFlightBytes = 0, 0, 0, 0
	h.snap.OpenGaps, h.snap.Gaps, h.snap.Unlisted = 0, nil, time.Time{}
}

// listened takes note that the loop of who reads on for cluster rows alone has gone round.
func (h *health) listened(agreed *Agreement, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.beat, h.snap.Agreed = now, agreed
}

// turned takes note that the loop has gone round.
func (h *health) turned(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.beat = now
}

func (h *health) busy(now bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.busy, h.snap.beat = now, time.Now()
}

// read takes note of what a start has read. Before the first session of a process the record says how far
// the last process came, and when.
func (h *health) read(r *checkpoint.Readings, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.Confirmed = r.Slot.Confirmed
	h.owned(r.Record)
	if r.Record != nil && len(r.Record.Checkpoints) > 0 {
		newest := r.Record.Checkpoints[len(r.Record.Checkpoints)-1]
		h.snap.Published = max(h.snap.Published, newest.At())
		if h.snap.CaughtUp.IsZero() {
			h.snap.CaughtUp = newest.Since
		}
	}
	h.setWALEnd(r.Server.WALEnd, now)
}

// heard takes note of who makes the stream, of whoever stands by.
func (h *health) heard(rec *checkpoint.Record) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.owned(rec)
}

// owned takes note of who makes the stream. mu is held.
func (h *health) owned(rec *checkpoint.Record) {
	if rec != nil {
		h.snap.Owner, h.snap.Epoch = rec.Owner, rec.Epoch
	}
}

// watched takes note of what was read of the server.
func (h *health) watched(end outbox.LSN, slot *relay.SlotState, read time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	// What is confirmed was published. While another process holds the slot that is none of this one's.
	if h.snap.Published == 0 && !slot.Active && h.snap.State != StateStandby {
		h.snap.Published = slot.Confirmed
	}
	h.setWALEnd(end, read)
}

// setWALEnd sets where the server's WAL ended when it was read.
func (h *health) setWALEnd(end outbox.LSN, read time.Time) {
	h.snap.WALEnd, h.walRead = end, read
	if h.look.end == 0 || end < h.look.end { // the first one, or another server's
		h.look = look{end, read}
	}
	h.published()
}

// look is where the server's WAL ended at a time.
type look struct {
	end  outbox.LSN
	read time.Time
}

// published takes note of what is published of what the server had when it was read. Under a steady load
// there is no moment at which everything is, and a newer reading may come before an older one is reached: the
// older one is kept until then.
func (h *health) published() {
	newest := look{h.snap.WALEnd, h.walRead}
	for _, l := range []look{h.look, newest} {
		if p := h.snap.Published; p > 0 && p >= l.end {
			if l.read.After(h.snap.CaughtUp) {
				h.snap.CaughtUp = l.read
			}
			h.look = newest
		}
	}
}

// Watched tells the pipeline what was read of the server: it reads that itself only while a session runs.
// Safe for concurrent use.
func (p *Pipeline) Watched(end outbox.LSN, slot relay.SlotState, read time.Time) {
	p.health.watched(end, &slot, read)
}

func (h *health) setGauges(g *gauges, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.beat = now
	h.snap.Held, h.snap.InFlight, h.snap.Oldest = g.held, g.inFlight, g.oldest
	h.snap.HeldBytes, h.snap.InFlightBytes = g.heldBytes, g.inFlightBytes
	h.snap.HeldLimit, h.snap.HeldLimitBytes = g.limits.MaxEvents, g.limits.MaxBytes
	h.snap.Late += g.newlyLate
	h.snap.Received, h.snap.Published, h.snap.Confirmed, h.snap.Seq =
		g.received, g.published, g.confirmed, g.seq
	h.snap.Said, h.snap.Tally, h.snap.Kept, h.snap.Agreed = g.said, g.tally, g.kept, g.agreed
	if g.idle && h.snap.Published < g.received {
		h.snap.Published = g.received
	}
	h.published()
	// An idle loop is up to date, but for what the server has written since its end was read: in silence that
	// may be anything.
	if g.idle && h.snap.Published >= h.snap.WALEnd && now.Sub(h.walRead) < 2*monitorInterval {
		h.snap.CaughtUp = now
	}
}

// setGaps takes the list over.
func (h *health) setGaps(open int, oldest []Gap, unlisted time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snap.OpenGaps, h.snap.Gaps, h.snap.Unlisted = open, oldest, unlisted
}

// snapshot shows a fault for as long as it is held: what attempts to start come to meanwhile is no news.
func (h *health) snapshot() Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.snap
	if s.Fault != nil && s.State != StateStopped {
		s.State, s.Since = StateFault, s.Fault.Since
	}
	return s
}

// Status returns the state at this moment. Safe for concurrent use.
func (p *Pipeline) Status() Status { return p.health.snapshot() }
