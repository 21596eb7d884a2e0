package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// session claims partitions, reads any replay for this consumer, and then the stream.
func (r *runner) session(ctx context.Context) (err error) {
	before := r.lastError()
	defer func() { err = r.forbidden(err, before) }()
	if r.store == nil {
		if r.store, err = r.offsets.open(ctx, r.js, &r.cfg); err != nil {
			r.store = nil
			return err
		}
	}
	if err := r.checkReach(ctx); err != nil {
		return err
	}
	st, err := r.store.acquire(ctx, r.calls.avoids)
	if err != nil {
		return err
	}
	defer func() {
		err = r.forbidden(err, before)
		// After most errors another session of this instance follows at once, which keeps its partitions.
		keeps := !r.leaves(err)
		if isCrash(err) || keeps && r.store.transactional() {
			r.store.abandon()
			return
		}
		give, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
		defer cancel()
		if keeps { // that one begins with what is written
			if lost := r.store.renew(give); lost != nil {
				r.cfg.Log.Warn("what was done last may come again", "err", lost)
			}
			return
		}
		if lost := r.store.release(give); lost != nil {
			r.cfg.Log.Warn("the partitions are left until the lease ends", "err", lost)
		}
	}()
	if st.Layout.Partitions == 0 {
		return r.begin(ctx)
	}
	r.begun = r.begun && st.Anew
	if err := r.checkLayout(ctx, st); err != nil {
		return err
	}
	r.waits = ""
	own := st.Offsets[live].partitions()
	r.met.grow(st.Layout.Partitions)
	r.met.session(true)
	r.state.set(Active, own, nil)
	if err := r.keeping(ctx, func(ctx context.Context) error { r.assign(ctx, own); return nil }); err != nil {
		return err
	}
	parking := newParking(&r.cfg, r.dec, r.met)
	load := func(ctx context.Context, tx pgx.Tx) error {
		if tx == nil {
			return nil
		}
		return parking.load(ctx, tx, st.Layout.Partitions, own)
	}
	// Many documents may be parked.
	if err := r.keeping(ctx, func(ctx context.Context) error { return r.store.load(ctx, load) }); err != nil {
		return err
	}
	if err := r.readReplays(ctx, st, parking); err != nil {
		if errors.Is(err, errAnew) {
			return nil
		}
		return err
	}
	return r.readLive(ctx, st, parking)
}

// lastError is what NATS has said last about the connection.
func (r *runner) lastError() error {
	if r.js == nil {
		return nil
	}
	return r.js.Conn().LastError()
}

// forbidden turns a time-out into a fault if NATS has said since that a subject is forbidden which is needed
// to read: the server answers such a request in no other way, and no other session would fare better.
func (r *runner) forbidden(err, before error) error {
	last := r.lastError()
	silent := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout) ||
		errors.Is(err, jetstream.ErrNoHeartbeat)
	if !silent || last == nil || last == before || !errors.Is(last, nats.ErrPermissionViolation) {
		return err
	}
	inbox := cmp.Or(r.js.Conn().Opts.InboxPrefix, strings.TrimSuffix(nats.InboxPrefix, "."))
	for _, subject := range []string{apiPrefix(r.js), "$KV.", inbox} {
		if strings.Contains(last.Error(), `"`+subject) { // else it may be about something else of the program
			return fault(
				ErrSetup,
				last,
				"Let the NATS user do that: docs/nats.md has all that a consumer needs",
				"NATS refuses it",
			)
		}
	}
	return err
}

// checkReach gives the partitions back if the stream can't be reached after a session has failed: other
// instances may reach it.
func (r *runner) checkReach(ctx context.Context) error {
	if !r.doubtful {
		return nil
	}
	_, err := stateOf(ctx, r.live())
	if err == nil || notFound(err) || ctx.Err() != nil {
		r.doubtful = false
		return nil
	}
	give, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
	defer cancel()
	if lost := r.store.release(give); lost != nil {
		r.cfg.Log.Warn("the partitions are left until the lease ends", "err", lost)
	}
	r.assign(ctx, nil)
	return err
}

// live is the live stream as this consumer sees it.
func (r *runner) live() stream.Source {
	if r.cfg.hooks.Source != nil {
		return r.cfg.hooks.Source
	}
	return &streamSource{js: r.js, stream: r.cfg.Stream, filters: r.cfg.Filters, name: r.cfg.Name,
		metadata: r.metadata()}
}

// source is the live stream with the archive before it, if there is one, for what lies behind a sequence.
func (r *runner) source(after uint64) stream.Source {
	if r.cfg.Archive == nil {
		return r.live()
	}
	return &joined{Source: r.live(), cfg: &r.cfg, pasts: &r.past, floor: after}
}

// begin makes the offsets of a new consumer. With an archive the first event is that of sequence 1: if nobody
// has it any more, that is a gap.
func (r *runner) begin(ctx context.Context) error {
	src := r.live()
	now, err := stateOf(ctx, src)
	if err != nil {
		return r.missing(err)
	}
	at := offset{Seq: now.First - 1}
	switch {
	case r.cfg.Start == FromNow:
		at.Seq = now.Last
	case r.cfg.Archive != nil:
		at.Seq = 0
	case !r.cfg.readsAll(): // what the filter leaves out may go before anybody has moved on over it
		next, err := src.Next(ctx, now.First)
		if err != nil {
			return fmt.Errorf("stream %s: %w", r.cfg.Stream, err)
		}
		if at.Seq = now.Last; next > 0 { // what has come since may be of a filter that was asked about before
			at.Seq = min(at.Seq, next-1)
		}
	}
	return r.store.begin(ctx, r.cfg.layout(), r.cfg.Filters, at, now.Created)
}

// checkLayout compares the layout with the configuration's. Another number of partitions is asked for once,
// so that the instance that was started last decides; all others follow.
func (r *runner) checkLayout(ctx context.Context, st *state) error {
	mine, next := r.cfg.layout(), st.Layout
	if st.Wanted != nil {
		next = *st.Wanted
	}
	if !r.cfg.partitionsSet {
		mine.Partitions = next.Partitions
	}
	if !r.asked && mine != next && (mine.Keying == next.Keying || r.cfg.AcceptKeying) {
		now, err := stateOf(ctx, r.live())
		if err != nil {
			return r.missing(err)
		}
		r.asked = true
		r.cfg.Log.Info("another layout is asked for", "partitions", mine.Partitions, "before",
			st.Layout.Partitions, "keying", mine.Keying)
		if err := r.store.want(ctx, mine, max(now.Last, newest(st.Offsets[live].list()).Seq)); err != nil {
			return err
		}
		return &heldError{why: "another layout begins"}
	}
	r.asked = true
	if len(st.Offsets[live]) > 0 {
		r.fits = true
		return nil
	}
	if r.fits || st.Wanted != nil && st.Wanted.Keying == mine.Keying {
		return &heldError{why: fmt.Sprintf("the marks are those of the keying %q", st.Layout.Keying)}
	}
	return fault(ErrKeying, nil, "Put Subject, Document and Keying back. If they are to change, set "+
		"AcceptKeying: then all that is in the stream is done with the marks as they are, and after that "+
		"they are made anew", "consumer %s: its marks were made with the keying %q, not %q", r.cfg.Name,
		st.Layout.Keying, mine.Keying)
}

// readLive reads the live stream.
func (r *runner) readLive(ctx context.Context, st *state, parking *parking) error {
	src := r.source(oldest(st.Offsets[live].list()).Seq)
	check, err := r.prepareLive(ctx, st, src)
	if err != nil {
		return err
	}
	reading := r.newRun(st, live, src, parking)
	reading.check = check
	if r.js != nil && r.cfg.hooks.Source == nil {
		reading.replays = func(ctx context.Context) (bool, error) {
			_, _, due, err := r.replayed(ctx, st)
			return due, err
		}
	}
	err = reading.read(ctx, st.Barrier, st.Offsets[live])
	if err == nil && reading.reached {
		err = errBarrier // what the broker lost may have to come again
	}
	r.begun = r.begun && reading.check.begins
	r.progress = reading.flow.state().done > oldest(st.Offsets[live].list()).Seq
	return err
}

// checkBarrier returns a *heldError if this instance is at the barrier. While the broker has lost a message
// that an offset names, or that of the barrier, the barrier moves with the end of the stream: up to there all
// that was lost comes again.
func (r *runner) checkBarrier(ctx context.Context, st *state, src stream.Source, last uint64) error {
	if st.Wanted == nil {
		return nil
	}
	own := st.Offsets[live].list()
	moves := slices.ContainsFunc(own, func(m offset) bool { return m.Lost })
	if !moves {
		at, err := src.Get(ctx, st.Barrier)
		if err != nil {
			return err
		}
		moves = at == nil
	}
	if moves && last > st.Barrier {
		if err := r.store.want(ctx, *st.Wanted, last); err != nil {
			return err
		}
		st.Barrier = last
	}
	if oldest(own).Seq < st.Barrier {
		return nil
	}
	if at := st.Offsets[replay]; at != nil && oldest(at.list()).Seq < st.Furthest { // see replayed
		return &heldError{why: fmt.Sprintf("the broker lost the end of stream %s, which is done up to "+
			"sequence %d, and not by all partitions: another layout begins when that replay goes on "+
			"(--replay-id), or is purged (`nats stream purge %[1]s --subject '%[3]s>'`)",
			replayStream(r.cfg.Stream), st.Furthest, replayPrefix(r.cfg.Stream, r.cfg.Name))}
	}
	return errBarrier
}

var errBarrier = &heldError{why: "all instances have to come to where another layout begins"}

// prepareLive compares the offsets with the stream and stores what has changed. It returns a *heldError if
// all that may be done before another layout is done.
func (r *runner) prepareLive(ctx context.Context, st *state, src stream.Source) (streamCheck, error) {
	var check streamCheck
	err := r.keeping(ctx, func(ctx context.Context) (err error) { // it may ask for thousands of messages
		check, err = checkStream(ctx, &r.cfg, src, st, r.begun)
		return err
	})
	if err != nil {
		return check, r.missing(err)
	}
	refiltered := !slices.Equal(st.Filters, r.cfg.Filters)
	if refiltered && !r.cfg.AcceptFilter {
		return check, fault(ErrFilter, nil,
			"Give it another Name, or set AcceptFilter to go on from the marks: earlier events on other "+
				"subjects are never read then", "consumer %s: its marks were made with the filters %q, not "+
				"%q", r.cfg.Name, st.Filters, r.cfg.Filters)
	}
	if j, ok := src.(*joined); ok {
		j.skip(check.gapTo)
	}
	if from := max(check.gapFrom, r.gapTo+1); from <= check.gapTo { // a session that fails finds it again
		r.met.gap(check.gapTo - from + 1)
		r.gapTo = check.gapTo
	}
	changed := check.changed || refiltered || !check.created.Equal(st.Created[live])
	st.Filters, st.Created[live] = r.cfg.Filters, check.created
	if changed {
		if err := r.store.save(ctx, st); err != nil {
			return check, err
		}
	}
	return check, r.checkBarrier(ctx, st, src, check.last)
}

// missing turns an error that the stream does not exist into a fault.
func (r *runner) missing(err error) error {
	if !notFound(err) {
		return err
	}
	return &possibleLoss{fault(ErrSetup, err, "Make it with `outflow init`, or look at Stream and at the "+
		"account of the NATS connection", "there is no stream %s", r.cfg.Stream), "no stream"}
}

func (r *runner) newRun(st *state, source string, src stream.Source, parking *parking) *run {
	p := &run{
		cfg:        &r.cfg,
		dec:        r.dec.dividedBy(&r.cfg, st.Layout.Keying),
		met:        r.met,
		calls:      r.calls,
		limit:      r.limit,
		fails:      r.failures(source, st.Created[source]),
		track:      r.state,
		store:      r.store,
		parking:    parking,
		source:     source,
		src:        src,
		replayedTo: st.ReplayedTo,
		layout:     st.Layout,
	}
	return p
}

// metadata tells the `outflow consumer` commands where the offsets are.
func (r *runner) metadata() map[string]string {
	offsets := "jetstream"
	if r.store.transactional() {
		offsets = "postgres"
	}
	return map[string]string{
		"outflow.consumer": r.cfg.Name, "outflow.marks": offsets,
		"outflow.partitions": strconv.Itoa(r.cfg.Partitions),
		"outflow.filter":     strings.Join(r.cfg.Filters, " "),
	}
}

// replay is the stream with the events that were replayed to this consumer.
func (r *runner) replay() *streamSource {
	return &streamSource{
		js: r.js, stream: replayStream(r.cfg.Stream),
		filters: []string{replayPrefix(r.cfg.Stream, r.cfg.Name) + ">"},
		name:    r.cfg.Name + "-replay", metadata: r.metadata(), replay: true,
	}
}

// replayed returns when the stream of replays was made, and its newest event for this consumer; due reports
// whether this instance has events of it to read. Another layout waits for all offsets to be at one place:
// then one that is behind that event, which is gone, counts as the newest. If the broker has lost the
// stream's end, only up to there: a replay that goes on takes the same sequences.
func (r *runner) replayed(ctx context.Context, st *state) (created time.Time, last uint64, due bool,
	err error) {
	src := r.replay()
	now, err := stateOf(ctx, src)
	if notFound(err) {
		return created, 0, false, nil
	}
	if err == nil {
		r.tellShortReplay(now, st)
		last, err = src.last(ctx)
	}
	if err == nil && last != r.seenReplay && st.Created[replay].Equal(now.Created) {
		if err = r.tellTakenReplay(ctx, src, newest(st.Offsets[replay].list())); err == nil {
			r.seenReplay = last
		}
	}
	if err != nil || last == 0 {
		return created, 0, false, err
	}
	at := st.Offsets[replay]
	if st.Wanted != nil && st.Created[replay].Equal(now.Created) {
		last = max(last, min(st.Furthest, now.Last))
	}
	return now.Created, last, at == nil || !st.Created[replay].Equal(now.Created) ||
			oldest(at.list()).Seq < last,
		nil
}

// tellShortReplay says, once, that the broker has lost an end of the stream of replays that this consumer has
// done: what comes at these sequences is passed over, as it has to be where the replay goes on.
func (r *runner) tellShortReplay(now stream.State, st *state) {
	if !st.Created[replay].Equal(now.Created) || now.Last >= st.Furthest || r.shortReplay == st.Furthest {
		return
	}
	r.shortReplay = st.Furthest
	r.cfg.Log.Warn("the broker lost the end of a replay: go on with it by its --replay-id first, as what is "+
		"replayed next is passed over up to what is done", "stream", replayStream(r.cfg.Stream), "last",
		now.Last, "done", st.Furthest)
}

// tellTakenReplay says that others were replayed where the broker had lost the end of a replay that is done:
// they are passed over like that. A replay of the table that goes on gives its rows other positions.
func (r *runner) tellTakenReplay(ctx context.Context, src *streamSource, done offset) error {
	if !done.known() {
		return nil
	}
	m, err := src.Get(ctx, done.Seq)
	if m == nil || err != nil || !strings.HasPrefix(m.Subject, replayPrefix(r.cfg.Stream, r.cfg.Name)) ||
		done.Pos.Repaired() && m.Header.Get(replaySequenceHeader) == "" {
		return err
	}
	if h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName)); err != nil || h.Pos != done.Pos {
		r.cfg.Log.Warn("the broker lost the end of a replay, and others were replayed in its place: what "+
			"lies up to what is done is passed over, replay it again", "stream", src.stream, "done", done.Seq)
	}
	return nil
}

// doneLive is what is done of the live stream, which is compared with its offsets only when it is read: where
// the broker has lost the message of one by now, what comes again under new sequences is done as well.
func (r *runner) doneLive(ctx context.Context, st *state) (offsets, error) {
	all := maps.Clone(st.Offsets[live])
	err := r.keeping(ctx, func(ctx context.Context) error {
		src := r.live()
		now, err := stateOf(ctx, src)
		if err != nil || !st.Created[live].Equal(now.Created) {
			return err
		}
		if now.Kept, err = frontOf(ctx, src, now.Kept); err != nil { // as checkStream
			return err
		}
		return (&streamCheck{}).findLost(ctx, &r.cfg, src, now, all)
	})
	if outbox.FaultOf(err) != nil || notFound(err) { // it is told then
		return st.Offsets[live], nil
	}
	return all, err
}

// readReplays reads the events that were replayed to this consumer, until there are no more.
func (r *runner) readReplays(ctx context.Context, st *state, parking *parking) error {
	if r.js == nil || r.cfg.hooks.Source != nil {
		return nil
	}
	for {
		created, last, due, err := r.replayed(ctx, st)
		lacks := st.Offsets[replay] == nil && !st.Created[replay].IsZero()
		if err == nil && last == 0 && (lacks || st.Offsets[replay] != nil && st.Wanted != nil) {
			// No instance will read on, and another layout waits for all offsets to be at one place.
			err = r.store.endReplay(ctx, func(ctx context.Context) (is bool, err error) {
				created, last, due, err = r.replayed(ctx, st)
				return err == nil && last == 0, err
			})
			if err == nil && last == 0 {
				delete(st.Offsets, replay)
			}
		}
		if err != nil || !due {
			return err
		}
		if lacks && st.Created[replay].Equal(created) { // a change of the layout in an earlier version
			of := replayStream(r.cfg.Stream)
			return fault(ErrStream, nil, fmt.Sprintf("Purge what is left of it (`nats stream purge %s "+
				"--subject '%s>'`), start the consumer, which forgets it then, and only after that replay "+
				"again what has not had its effect", of, replayPrefix(r.cfg.Stream, r.cfg.Name)),
				"consumer %s has begun to read the replay in stream %s, and its marks in it are gone: "+
					"nobody can tell how much of it is done", r.cfg.Name, of)
		}
		if st.Offsets[replay] == nil || !st.Created[replay].Equal(created) {
			if err := r.store.beginReplay(ctx, created, st.Created[replay]); err != nil {
				return err
			}
			return errAnew
		}
		src := r.replay() // what it is asked first says which stream is read, and which is not
		if now, err := stateOf(ctx, src); err != nil || !now.Created.Equal(created) {
			return cmp.Or(err, errAnew)
		}
		r.cfg.Log.Info("reading a replay", "stream", src.stream, "to", last)
		p := r.newRun(st, replay, src, parking)
		if p.live, err = r.doneLive(ctx, st); err != nil {
			return err
		}
		if err := p.read(ctx, last, st.Offsets[replay]); err != nil {
			return err
		}
		if !p.reached {
			return errAnew
		}
		for partition, w := range p.workers {
			st.Offsets[replay][partition] = w.offset
		}
	}
}
