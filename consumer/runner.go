package consumer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
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
	store store

	// sessionBegan is when this session began, before any of its requests. An answer may be delayed, so how
	// long a state has lasted is counted from the answer to one request to the sending of a later one.
	sessionBegan time.Time

	loss        string    // what seems to be missing from the stream
	lossSince   time.Time // when a session had seen that
	holder      string    // the active instance, if this one stands by
	holderSince time.Time

	progress bool // the session has moved an offset

	gapTo uint64 // up to where missing messages that a session found at its start are counted
}

func (r *runner) loop(ctx context.Context) error {
	for failures := 0; ; failures++ {
		r.progress, r.sessionBegan = false, time.Now()
		err := r.session(ctx)
		r.met.session(false)
		var held *heldError
		if err != nil && !errors.As(err, &held) {
			r.state.set(Retrying, nil, err)
		}
		if err := r.calls.awaitHung(ctx); err != nil {
			return err
		}
		if ctx.Err() != nil && !isCrash(err) {
			return nil
		}
		if err == nil {
			failures = -1 // a replay has ended
			continue
		}
		if held != nil {
			if err := r.standBy(ctx, held); err != nil {
				return err
			}
			failures = -1
			continue
		}
		if err := r.final(err); err != nil {
			return err
		}
		if r.progress {
			failures = 0
		}
		r.cfg.Log.Warn("the session ended, another one follows", "err", err)
		r.met.dropped(reason(err))
		if sleep(ctx, jitter(min(pauseMost, pauseFirst<<min(failures, 10)))) != nil {
			return nil
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
	r.loss = ""
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
func leaves(err error) bool {
	var loss *possibleLoss
	return hanging(err) != nil || outbox.FaultOf(err) != nil && !errors.As(err, &loss)
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
	case errors.Is(err, errUnknown) || class(err) != "" || strings.Contains(err.Error(), "failed to connect"):
		return "database"
	}
	return "source"
}

// standBy waits briefly because another instance is active.
func (r *runner) standBy(ctx context.Context, held *heldError) error {
	r.state.set(Standby, nil, nil)
	if r.holder != held.owner {
		r.holder, r.holderSince = held.owner, time.Now()
		r.cfg.Log.Info("standing by", "active", held.owner)
	}
	// An instance that was killed looks active until its lease ends.
	if held.partitions != 0 && held.partitions != r.cfg.Partitions &&
		r.sessionBegan.Sub(r.holderSince) > r.cfg.Lease {
		return fault(ErrPartitions, nil, "Give all instances the same Partitions. To change them, stop all "+
			"instances first: the marks are "+
			"taken over", "consumer %s: instance %s is active with %d partitions, this one has %d",
			r.cfg.Name, held.owner, held.partitions, r.cfg.Partitions)
	}
	_ = sleep(ctx, jitter(min(r.cfg.Lease/4, 500*time.Millisecond)))
	return nil
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

// session takes the lease, reads any replay for this consumer, and then the stream.
func (r *runner) session(ctx context.Context) (err error) {
	if r.store == nil {
		if r.store, err = r.offsets.open(ctx, r.js, &r.cfg); err != nil {
			r.store = nil
			return err
		}
	}
	st, err := r.store.acquire(ctx)
	if err != nil {
		return err
	}
	r.holder = ""
	r.met.session(true)
	all := make([]int, r.cfg.Partitions)
	for i := range all {
		all[i] = i
	}
	r.state.set(Active, all, nil)
	defer func() {
		// After most errors another session of this instance follows at once, which keeps its lease.
		if err != nil && ctx.Err() == nil && !leaves(err) || isCrash(err) {
			r.store.abandon()
			return
		}
		give, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
		defer cancel()
		if lost := r.store.release(give); lost != nil {
			r.cfg.Log.Warn("the lease is left to end by itself", "err", lost)
		}
	}()
	parking := newParking(&r.cfg, r.dec, r.met)
	load := func(ctx context.Context, tx pgx.Tx) error {
		if tx == nil {
			return nil
		}
		return parking.load(ctx, tx)
	}
	if err := r.store.read(ctx, load); err != nil {
		return err
	}
	if err := r.readReplays(ctx, st, parking); err != nil {
		return err
	}
	return r.readLive(ctx, st, parking)
}

// readLive reads the live stream.
func (r *runner) readLive(ctx context.Context, st *state, parking *parking) error {
	src := r.cfg.hooks.Source
	if src == nil {
		src = r.liveSource()
	}
	check, err := r.prepareLive(ctx, st, src)
	if err != nil {
		return err
	}
	reading := r.newRun(st, live, src, parking)
	reading.check = check
	err = reading.read(ctx, 0, st.Offsets[live])
	r.progress = reading.flow.state().done > oldest(st.Offsets[live]).Seq
	return err
}

// prepareLive compares the offsets with the stream and stores what has changed; a new consumer gets offsets.
func (r *runner) prepareLive(ctx context.Context, st *state, src stream.Source) (streamCheck, error) {
	now, err := stateOf(ctx, src)
	if err != nil {
		return streamCheck{}, r.missing(err)
	}
	fresh := st.Offsets[live] == nil
	check := streamCheck{created: now.Created, last: now.Last}
	if fresh {
		at := offset{Seq: now.First - 1}
		if r.cfg.Start == FromNow {
			at.Seq = now.Last
		}
		st.Offsets[live] = []offset{at}
		st.Filters = r.cfg.Filters
	} else if check, err = checkStream(ctx, &r.cfg, src, st); err != nil {
		return check, r.missing(err)
	}
	refiltered := !slices.Equal(st.Filters, r.cfg.Filters)
	if refiltered && !r.cfg.AcceptFilter {
		return check, fault(ErrFilter, nil,
			"Give it another Name, or set AcceptFilter to go on from the marks: earlier events on other "+
				"subjects are never read then", "consumer %s: its marks were made with the filters %q, not "+
				"%q", r.cfg.Name, st.Filters, r.cfg.Filters)
	}
	r.loss = ""
	if from := max(check.gapFrom, r.gapTo+1); from <= check.gapTo { // a session that fails finds it again
		r.met.gap(check.gapTo - from + 1)
		r.gapTo = check.gapTo
	}
	changed := fresh || check.changed || refiltered || !check.created.Equal(st.Created[live])
	st.Filters, st.Created[live] = r.cfg.Filters, check.created
	return check, r.settle(ctx, st, live, changed)
}

// missing turns an error that the stream does not exist into a fault.
func (r *runner) missing(err error) error {
	if !notFound(err) {
		return err
	}
	return &possibleLoss{fault(ErrSetup, err, "Make it with `outflow init`, or look at Stream and at the "+
		"account of the NATS connection", "there is no stream %s", r.cfg.Stream), "no stream"}
}

// settle converts the state to the configured number of partitions, drops obsolete old layouts, and stores
// the state if it has changed.
func (r *runner) settle(ctx context.Context, st *state, source string, changed bool) error {
	for s, offsets := range st.Offsets {
		if len(offsets) == r.cfg.Partitions {
			continue
		}
		fresh, before := repartition(s, offsets, r.cfg.Partitions)
		if len(offsets) > 1 {
			st.OldLayouts = append(st.OldLayouts, before)
			r.cfg.Log.Info("another number of partitions", "source", s, "before", len(offsets), "now",
				len(fresh))
		}
		st.Offsets[s], changed = fresh, true
	}
	layouts := slices.DeleteFunc(slices.Clone(st.OldLayouts), func(g oldLayout) bool {
		return g.Source == source && g.obsolete(st.Offsets[source])
	})
	if len(layouts) == len(st.OldLayouts) && !changed && st.Partitions == r.cfg.Partitions {
		return nil
	}
	st.OldLayouts, st.Partitions = layouts, r.cfg.Partitions
	return r.store.save(ctx, st)
}

func (r *runner) newRun(st *state, source string, src stream.Source, parking *parking) *run {
	p := &run{
		cfg:        &r.cfg,
		dec:        r.dec,
		met:        r.met,
		calls:      r.calls,
		limit:      r.limit,
		track:      r.state,
		store:      r.store,
		parking:    parking,
		source:     source,
		src:        src,
		replayedTo: st.ReplayedTo,
	}
	for _, g := range st.OldLayouts {
		if g.Source == source {
			p.oldLayouts = append(p.oldLayouts, g)
		}
	}
	return p
}

func (r *runner) liveSource() *streamSource {
	return &streamSource{js: r.js, stream: r.cfg.Stream, filters: r.cfg.Filters, durable: r.cfg.Name,
		window: aheadOf * r.cfg.MaxInFlight, metadata: r.metadata()}
}

// metadata tells the `outflow consumer` commands where the offsets are.
func (r *runner) metadata() map[string]string {
	offsets := "jetstream"
	if r.store.transactional() {
		offsets = "postgres"
	}
	return map[string]string{"outflow.marks": offsets, "outflow.partitions": fmt.Sprint(r.cfg.Partitions),
		"outflow.filter": strings.Join(r.cfg.Filters, " ")}
}

// readReplays reads the events that were replayed to this consumer, until there are no more.
func (r *runner) readReplays(ctx context.Context, st *state, parking *parking) error {
	if r.js == nil || r.cfg.hooks.Source != nil {
		return nil
	}
	src := &streamSource{
		js: r.js, stream: replayStream(r.cfg.Stream),
		filters: []string{replayPrefix(r.cfg.Stream, r.cfg.Name) + ">"},
		durable: r.cfg.Name + "-replay",
		window:  aheadOf * r.cfg.MaxInFlight, metadata: r.metadata(), replay: true,
	}
	for {
		now, err := stateOf(ctx, src)
		if notFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		last, err := src.last(ctx)
		if err != nil || last == 0 {
			return err
		}
		changed := false
		if st.Offsets[replay] == nil || !st.Created[replay].Equal(now.Created) {
			st.Offsets[replay], st.Created[replay], changed = make([]offset,
				max(1, st.Partitions)), now.Created, true
			st.OldLayouts = withoutSource(st.OldLayouts, replay)
		}
		if oldest(st.Offsets[replay]).Seq >= last {
			return nil
		}
		if err := r.settle(ctx, st, replay, changed); err != nil {
			return err
		}
		r.cfg.Log.Info("reading a replay", "stream", src.stream, "to", last)
		p := r.newRun(st, replay, src, parking)
		if err := p.read(ctx, last, st.Offsets[replay]); err != nil || ctx.Err() != nil {
			return err
		}
		for i, l := range p.workers {
			st.Offsets[replay][i] = l.offset
		}
	}
}

func withoutSource(all []oldLayout, source string) []oldLayout {
	return slices.DeleteFunc(slices.Clone(all), func(g oldLayout) bool { return g.Source == source })
}
