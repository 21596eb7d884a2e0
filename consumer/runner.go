package consumer

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

const (
	pauseFirst = 50 * time.Millisecond // between sessions
	pauseMost  = 5 * time.Second
	confirm    = 5 * time.Second // how much later a second session must see a loss for it to be reported
)

// runner is one call of Run: a loop of sessions. Starting, reconnecting and recovering are the same thing.
type runner struct {
	*Consumer
	calls *calls
	limit *parkLimit
	fails map[string]*failures // by source
	store store

	// sessionBegan is when this session began, before any of its requests. An answer may be delayed, so how
	// long a state has lasted is counted from the answer to one request to the sending of a later one.
	sessionBegan time.Time

	loss      string    // what seems to be missing, by the newest session
	lossSince time.Time // when a session had seen that
	waits     string    // why this instance stands by
	asked     bool      // it has asked for the layout of its configuration
	begun     bool      // nobody has read from where the consumer was to begin, if that is the first message
	fits      bool      // a session had the keying of its configuration
	owned     []int     // partitions of the newest session

	progress bool // the session has moved an offset
	doubtful bool // the newest session has ended with an error: can the stream be reached?

	gapTo uint64 // up to where missing messages that a session found at its start are counted

	shortReplay uint64 // state.Furthest when it was told last that the end of a replay is lost; 0: never
	seenReplay  uint64 // the newest replayed event at which it was looked whether others took its place

	past pasts // of Config.Archive
}

func (r *runner) loop(ctx context.Context) error {
	for failures := 0; ; failures++ {
		r.progress, r.sessionBegan = false, time.Now()
		err := r.session(ctx)
		r.met.session(false)
		var held *heldError
		var loss *possibleLoss
		if !errors.As(err, &loss) {
			r.loss = ""
		}
		if err != nil && !errors.As(err, &held) {
			r.state.set(Retrying, nil, err)
		}
		if r.store != nil && !r.store.transactional() {
			r.calls.awaitHung(ctx) // meanwhile another instance has all partitions
		}
		if ctx.Err() != nil && !isCrash(err) {
			r.leave(ctx)
			return r.calls.leftBehind()
		}
		if err == nil {
			failures = -1 // it has other partitions from now on, or something else to read
			continue
		}
		if held != nil {
			r.standBy(ctx, held)
			failures = -1
			continue
		}
		if err := r.final(err); err != nil {
			if !isCrash(err) {
				r.leave(ctx)
			}
			return err
		}
		if r.progress {
			failures = 0
		}
		r.doubtful = loss == nil
		r.cfg.Log.Warn("the session ended, another one follows", "err", err)
		r.met.dropped(reason(err))
		if sleep(ctx, jitter(min(pauseMost, pauseFirst<<min(failures, 10)))) != nil {
			r.leave(ctx)
			return r.calls.leftBehind()
		}
	}
}

// final returns the error that ends Run, or nil if another session may help.
func (r *runner) final(err error) error {
	if isCrash(err) {
		return err
	}
	var loss *possibleLoss
	if errors.As(err, &loss) {
		if r.loss != loss.what {
			r.loss, r.lossSince = loss.what, time.Now()
		}
		if r.sessionBegan.Sub(r.lossSince) < r.cfg.confirm {
			return nil
		}
		return loss.Fault
	}
	if f := outbox.FaultOf(err); f != nil {
		return f
	}
	switch class := class(err); {
	case class == "42" || class == "28" || class == "3D" || class == "3F":
		return fault(ErrSetup, err, "Look at the rights of the role, and at search_path; consumer.Tables "+
			"has the SQL of the tables", "the database refuses")
	case closedPool(err):
		return fault(ErrSetup, err, "Close it after Run has returned", "the pool is closed")
	case errors.Is(err, nats.ErrConnectionClosed):
		return fault(ErrSetup, err,
			"Connect with nats.MaxReconnects(-1), and close it after Run has returned",
			"the NATS connection is closed for good")
	}
	return nil
}

// leaves reports whether this instance can't go on at once after an error, so that another one should.
func (r *runner) leaves(err error) bool {
	var loss *possibleLoss
	return hanging(err) != nil && !r.store.transactional() ||
		outbox.FaultOf(err) != nil && !errors.As(err, &loss)
}

func isCrash(err error) bool {
	var c crashError
	return errors.As(err, &c)
}

// class is the class of a database error's SQLSTATE.
func class(err error) string {
	if code := sqlState(err); len(code) == 5 {
		return code[:2]
	}
	return ""
}

// reason is why a session ended, for the metric.
func reason(err error) string {
	switch {
	case errors.Is(err, errMoved):
		return "moved"
	case hanging(err) != nil:
		return "handler"
	case errors.Is(err, errUnknown) || class(err) != "" || strings.Contains(err.Error(), "failed to connect"):
		return "database"
	}
	return "source"
}

// standBy waits briefly because there is nothing to do for this instance.
func (r *runner) standBy(ctx context.Context, held *heldError) {
	r.assign(ctx, nil)
	r.state.set(Standby, nil, nil)
	if r.waits != held.why {
		r.waits = held.why
		r.cfg.Log.Info("standing by", "why", held.why)
	}
	_ = sleep(ctx, jitter(min(r.cfg.Lease/4, 250*time.Millisecond)))
}

// leave gives back what this instance has when Run ends.
func (r *runner) leave(ctx context.Context) {
	r.assign(ctx, nil)
	if r.store == nil {
		return
	}
	give, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
	defer cancel()
	if err := r.store.release(give); err != nil {
		r.cfg.Log.Warn("the partitions are left until the lease ends", "err", err)
	}
}

// assign tells the application which partitions this instance has from now on.
func (r *runner) assign(ctx context.Context, partitions []int) {
	without := func(all, some []int) (rest []int) {
		for _, p := range all {
			if !slices.Contains(some, p) {
				rest = append(rest, p)
			}
		}
		return rest
	}
	revoked, assigned := without(r.owned, partitions), without(partitions, r.owned)
	r.owned = partitions
	r.met.owned(len(partitions))
	if len(revoked)+len(assigned) == 0 {
		return
	}
	r.cfg.Log.Info("partitions", "revoked", revoked, "assigned", assigned, "now", len(partitions))
	r.met.rebalanced()
	r.tell(ctx, r.cfg.OnRevoked, revoked)
	r.tell(ctx, r.cfg.OnAssigned, assigned)
}

func (r *runner) tell(ctx context.Context, to func(context.Context, []int), partitions []int) {
	if to == nil || len(partitions) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Timeout)
	defer cancel()
	returned := apart(func() error {
		to(ctx, partitions)
		return nil
	})
	if since, err := awaitReturn(ctx, returned, r.cfg.hang); !since.IsZero() {
		r.cfg.Log.Error("Config.OnAssigned or OnRevoked hangs: the consumer goes on without it", "timeout",
			r.cfg.Timeout, "partitions", partitions)
	} else if err != nil {
		r.cfg.Log.Error("Config.OnAssigned or OnRevoked failed", "err", err)
	}
}

// keeping does what may take longer than the lease at the start of a session, and renews it meanwhile. What
// it does must not use the store, but for load.
func (r *runner) keeping(ctx context.Context, do func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	renew := time.NewTicker(r.store.renewEvery())
	defer renew.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-renew.C:
			// Cancelling it would cost the connection over which the lease is given back.
			if err := r.store.renew(context.WithoutCancel(ctx)); err != nil {
				cancel()
				<-done
				return err
			}
		}
	}
}

func jitter(d time.Duration) time.Duration {
	return d/2 + time.Duration(rand.Int64N(int64(d)))
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err()
}
