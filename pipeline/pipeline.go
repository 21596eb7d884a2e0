package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/lazyregexp"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// Config is what a pipeline needs. All fields but Islands, MaximumDelay, Registerer and Logger are required.
type Config struct {
	// Open opens both connections. It is called once a session; ctx limits the opening, not what it returns.
	Open func(ctx context.Context) (*Conns, error)

	Settings   relay.Settings // the configured ordering settings
	Heartbeats bool           // write them (reorder.tick: wal)
	Scratch    reorder.Scratch
	MaxSpill   int64 // bytes of scratch files at a time; 0: no limit
	// InForce is called with the ordering settings that are in force, at the start of a session and soon
	// after a change in the WAL, from the goroutine of Run, which waits for it; nil: it is not called.
	InForce func(relay.Settings)
	// Hold keeps Run at a fault that needs a person, rather than to return it: it tries to start again now
	// and then, and whenever Retry has a value (nil: never before its time).
	Hold  bool
	Retry <-chan struct{}
	// Failed is told of each fault that needs a person, each time that it is found, and when it was first
	// found, from the goroutine of Run, which waits for it and has closed the session's connections; nil: it
	// is not called.
	Failed func(f *outbox.Fault, since time.Time)
	// Islands: other clusters, with which this one shares nothing, publish for it when it is silent; where it
	// reads another home's rows, it does so for that one. nil: nobody does.
	Islands *claim.Config
	// MaximumDelay is how long nothing has to be heard of whoever makes a stream that clusters share, before
	// this one takes it over; 0: it takes nothing over.
	MaximumDelay time.Duration
	// StopTimeout limits how long a clean stop waits for what is in flight.
	StopTimeout time.Duration

	Registerer prometheus.Registerer // nil: metrics go nowhere
	Logger     *slog.Logger          // nil: no logs
}

// The pauses between sessions.
const (
	backoffMin = 50 * time.Millisecond
	backoffMax = 400 * time.Millisecond

	complaintInterval = 30 * time.Second
)

// Pipeline runs sessions until it is told to stop or one ends with a fault that needs a person.
type Pipeline struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	health  health

	text  bool      // a type without a binary reader came: text form from now on
	begun time.Time // of this session: nothing was read for it before then
	stage string    // of this session, for counting failures

	unconfirmed unconfirmed // the loss that the last reading showed
	// the divergence that the last session showed: it comes after readings, which may show a loss each time
	diverged     unconfirmed
	recheckAfter time.Duration // as the last reading has it

	held       *outbox.Fault // Run waits for a person
	unrecorded *outbox.Fault // was seen to happen, and the record does not say so yet

	island *island // nil: there is no Config.Islands
	reader *reader // nil: no session has read another home's rows for it

	settledCut uint64 // the sequence of the newest cut that is known to be in a durable record
	silent     uint64 // the revision of the record that the stream's owner has not renewed in time
	lags       uint64 // the epoch in which it does not come to what was read here
	input      newestInput

	durables []string // the durable consumers that were last named in the log

	notices notices

	complaint  string // what was last logged as a session's end
	complained time.Time

	// Tests set these. What is published ahead decides the order: nothing else may set another limit.
	jitter            func(n time.Duration) time.Duration // random, from 0 to below n
	maxPublishedAhead int                                 // 0: relay.MaxPublishedAhead
}

// New returns a pipeline. It starts nothing.
func New(cfg Config) *Pipeline {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Pipeline{
		cfg: cfg, log: cfg.Logger.With("component", "pipeline"), metrics: newMetrics(cfg.Registerer),
		jitter:       rand.N[time.Duration],
		recheckAfter: new(checkpoint.Readings).RecheckAfter(), island: newIsland(cfg.Islands),
	}
	p.health.init()
	return p
}

// Run runs session after session until ctx is cancelled, which is a clean stop and returns nil, or until a
// fault that is not transient: that is returned, as *outbox.Fault. With Hold it is returned only when ctx is
// cancelled before the fault is gone.
func (p *Pipeline) Run(ctx context.Context) error {
	defer p.health.set(StateStopped, nil)
	for attempt := 0; ; attempt++ {
		verified, err := p.runSession(ctx)
		if ctx.Err() != nil && outbox.ClassOf(err) == outbox.Transient {
			if err != nil && !errors.Is(err, ctx.Err()) {
				p.log.Warn("stopped before everything in flight was acknowledged; it is found again at the "+
					"next start", reason(err)...)
			}
			return p.stopped()
		}
		if verified {
			attempt = 0
		}
		wait, fault := p.after(err, attempt)
		if fault != nil {
			if wait, err = p.failed(fault); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return p.stopped()
		case <-p.cfg.Retry:
		case <-time.After(wait):
		}
	}
}

// after says how long to wait before the next session, or returns the fault that needs a person.
func (p *Pipeline) after(err error, attempt int) (time.Duration, *outbox.Fault) {
	var again *errUnconfirmed
	fault := outbox.FaultOf(err)
	handover := errors.Is(err, errAnew) || fault != nil && fault.Code == relay.CodeSlotInUse
	if err != nil && !handover {
		p.metrics.failed(p.stage, err)
		p.input = newestInput{}
	}
	switch {
	case errors.As(err, &again):
	case err == nil, fault == nil, fault.Class == outbox.Transient:
		wait := backoff(attempt, p.jitter)
		p.health.set(StateWaiting, err)
		if handover {
			wait = 0
		} else {
			p.complain(wait, err)
		}
		return wait, nil
	case fault.Class == outbox.Gap:
		if fault.Observed || p.unconfirmedOf(fault.Code).confirmedBy(fault.Code, p.begun) {
			return 0, fault // by itself: what it was wrapped in is of no use to the operator
		}
		again = &errUnconfirmed{unconfirmed{loss: fault.Code, at: time.Now(), after: p.recheckAfter}}
		err = fault
	default:
		return 0, fault
	}
	p.health.set(StateWaiting, err)
	u := p.unconfirmedOf(again.loss)
	if u.loss != again.loss {
		*u = again.unconfirmed
	}
	p.log.Warn("a loss was read; reading again before it counts",
		append(reason(err), "loss", again.loss, "in", u.after)...)
	return time.Until(u.at.Add(u.after)), nil
}

// complain logs why a session ended: the same reason once in complaintInterval, whatever the number of
// attempts.
func (p *Pipeline) complain(wait time.Duration, err error) {
	level := slog.LevelWarn
	if !p.fresh(err) {
		level = slog.LevelDebug
	}
	p.log.Log(context.Background(), level, "session ended; starting again",
		append(reason(err), "in", wait.Round(time.Millisecond))...)
}

// localPort is the local port in an error of package net, such as "read tcp 10.0.0.1:40001->10.0.0.2:4222".
var localPort = lazyregexp.New(`:\d+->`)

// fresh reports whether a reason was not given within complaintInterval. Each attempt has another local port:
// that makes no other reason of it.
func (p *Pipeline) fresh(err error) bool {
	text, now := localPort().ReplaceAllString(fmt.Sprint(err), "->"), time.Now()
	if text == p.complaint && now.Sub(p.complained) < complaintInterval {
		return false
	}
	p.complaint, p.complained = text, now
	return true
}

// unconfirmedOf is where a loss waits for its recheck: one that the ordinary readings do not show must
// outlast readings that show none.
func (p *Pipeline) unconfirmedOf(loss string) *unconfirmed {
	switch loss {
	case codeDivergence, codeMemoryLost, checkpoint.CodeCutHome, checkpoint.CodeCutOrder,
		checkpoint.CodeCutAhead:
		return &p.diverged
	}
	return &p.unconfirmed
}

// backoff grows from backoffMin to backoffMax, with jitter so that two outflows do not run in step.
func backoff(attempt int, jitter func(time.Duration) time.Duration) time.Duration {
	d := min(2*backoffMin<<min(attempt, 8), backoffMax)
	return d/2 + jitter(d/2+1)
}

// limited gives a question its own time limit; the limit's end is reported with what was read.
func limited[T any](what string, ask func(context.Context) (T, error)) func(context.Context) (T, error) {
	return within(readTimeout, what, ask)
}

func within[T any](
	limit time.Duration, what string, ask func(context.Context) (T, error),
) func(context.Context) (T, error) {
	return func(ctx context.Context) (T, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		v, err := ask(ctx)
		if err != nil {
			return v, fmt.Errorf("read %s: %w", what, err)
		}
		return v, nil
	}
}
