package pipeline

import (
	"context"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// HoldPause is the least pause between attempts to start while a fault is held, and how long another outflow
// must have the slot before this one counts as its standby again: it may only be making such an attempt
// itself.
const HoldPause = 30 * time.Second

// HeldHomePause is that pause at a home for which other clusters publish, if an attempt gives signs of life:
// between two of them each of the others has two turns.
func HeldHomePause(clusters int, delay time.Duration) time.Duration {
	return max(HoldPause, 2*time.Duration(clusters)*delay)
}

// failed takes note of a fault that needs a person. While it is held (Config.Hold), nothing is open but the
// next attempt, which is an ordinary start: it publishes nothing that a restart of the process would not.
// nil: Run goes on after wait.
func (p *Pipeline) failed(f *outbox.Fault) (wait time.Duration, err error) {
	// Another row, say, with the code of the one before it is another fault. The range grows with the WAL.
	again := p.held != nil && p.held.Code == f.Code && p.held.Message == f.Message
	p.held = f
	spoke := p.island != nil && p.island.speaks
	if spoke {
		p.island.speaks = false // it can't publish: others may
	}
	since := p.health.failed(f, again)
	if p.cfg.Failed != nil {
		p.cfg.Failed(f, since)
	}
	if !p.cfg.Hold {
		return 0, f
	}
	wait = HoldPause
	if spoke {
		wait = HeldHomePause(p.island.cfg.Count, p.island.cfg.Delay)
	}
	level := slog.LevelError
	if again {
		level = slog.LevelDebug
	}
	p.log.Log(context.Background(), level, "publishing has stopped until the fault is repaired", "code",
		f.Code, "class", f.Class.String(), "err", f, "again", wait)
	return wait, nil
}

// recovered takes note that the fault that was held is gone.
func (p *Pipeline) recovered() {
	if p.held != nil {
		since := p.health.recovered()
		p.log.Info("the fault is gone", "code", p.held.Code, "after",
			time.Since(since).Round(time.Millisecond))
		p.held = nil
	}
}

// stopped is what Run returns at a clean stop: the fault that it held, if there is one.
func (p *Pipeline) stopped() error {
	if p.held != nil {
		return p.held
	}
	return nil
}

// stateLevel is the level of changes of state: those of attempts while a fault is held are repeats.
func (p *Pipeline) stateLevel() slog.Level {
	if p.held != nil {
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

// reason is an error as the attributes of a log line: with its code, if it has one.
func reason(err error) []any {
	if f := outbox.FaultOf(err); f != nil && f.Code != "" {
		return []any{"code", f.Code, "err", err}
	}
	return []any{"err", err}
}
