package pipeline

import (
	"context"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
)

// scribe writes ticks and changes of settings into the WAL, in a goroutine of its own. They have an effect when they are read.
type scribe struct {
	writer Writer // nil: nothing is written
	want   relay.Settings
	said   *rarely // that a change was written

	requests chan message
	done     chan written
	cancel   context.CancelFunc
	stopped  chan struct{}

	busy        bool      // a message is being written
	outstanding bool      // a change was written and not read yet
	changeAt    time.Time // before then no other change is written
	lastTick    time.Time // when the last tick was asked for
	notBefore   time.Time // after a failure: when to try again
}

// message is what to write: a tick, or a change of settings.
type message struct {
	change   bool
	settings relay.Settings
}

type written struct {
	message
	err error
}

// scribePause is how long the scribe waits after a failure, and between two changes: whoever changes the settings all the time must not
// make this session write as much.
const scribePause = time.Second

func newScribe(w Writer, want relay.Settings, said *rarely) *scribe {
	ctx, cancel := context.WithCancel(context.Background())
	s := &scribe{
		writer: w, want: want, said: said, cancel: cancel,
		requests: make(chan message, 1), done: make(chan written, 1), stopped: make(chan struct{}),
	}
	go s.run(ctx)
	return s
}

func (s *scribe) run(ctx context.Context) {
	defer close(s.stopped)
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-s.requests:
			s.done <- written{m, s.write(ctx, m)}
		}
	}
}

func (s *scribe) write(ctx context.Context, m message) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if m.change {
		return s.writer.Change(ctx, m.settings)
	}
	return s.writer.Heartbeat(ctx)
}

func (s *scribe) close() {
	s.cancel()
	<-s.stopped
}

func (s *scribe) free(now time.Time) bool {
	return s.writer != nil && !s.busy && !now.Before(s.notBefore)
}

func (s *scribe) offer(m message) {
	s.busy = true
	s.requests <- m
}

// offerChange writes a change if the settings in force are not the wanted ones and no change is outstanding.
func (s *scribe) offerChange(now time.Time, inForce relay.Settings) {
	if inForce != s.want && !s.outstanding && !now.Before(s.changeAt) && s.free(now) {
		s.outstanding, s.changeAt = true, now.Add(scribePause)
		s.offer(message{change: true, settings: s.want})
	}
}

// read takes note of a change that came through the WAL. Somebody else's may have been there before the one that is outstanding.
func (s *scribe) read(c relay.Settings) {
	if c == s.want {
		s.outstanding = false
	}
}

// finished takes the goroutine's answer. A failure is no reason to drop the session: what is held stays held until something else
// closes it. Whether the message was written all the same is unknown; a second one does no harm.
func (s *scribe) finished(w written, now time.Time, log *slog.Logger, m *metrics) {
	s.busy = false
	switch {
	case w.err != nil:
		s.notBefore = now.Add(scribePause)
		s.outstanding = false
		m.tickErrors.Inc()
		log.Warn("writing into the WAL failed; trying again", "change", w.change, "in", scribePause, "err", w.err)
	case w.change:
		s.said.say(log, slog.LevelInfo, "wrote a change of ordering settings into the WAL", "settings", w.settings)
	default:
		m.ticks.Inc()
	}
}

// tickAt returns when a tick is due: one horizon after the oldest held event came in, half a horizon after the last part of an input (what
// is none closes no window, however much of it comes), one horizon after the last tick.
func (s *session) tickAt() (time.Time, bool) {
	horizon := s.buffer.Settings().Horizon
	if !s.p.cfg.Heartbeats || horizon == 0 || s.scribe.writer == nil || !s.proof.Verified() {
		return time.Time{}, false
	}
	oldest, held := s.buffer.OldestLSN()
	if !held {
		return time.Time{}, false
	}
	came, ok := s.held.of(oldest)
	if !ok {
		return time.Time{}, false
	}
	at := came.Add(horizon + grain)
	for _, t := range []time.Time{s.lastInput.Add(horizon / 2), s.scribe.lastTick.Add(horizon), s.scribe.notBefore} {
		if t.After(at) {
			at = t
		}
	}
	return at, true
}

// offerTick writes a tick when one is due. The caller has made sure that publishing is not blocked and nothing is ready to be read.
func (s *session) offerTick(now time.Time, held int) {
	if held == 0 {
		return
	}
	if at, ok := s.tickAt(); ok && !now.Before(at) && s.scribe.free(now) {
		s.scribe.lastTick = now
		s.scribe.offer(message{})
	}
}
