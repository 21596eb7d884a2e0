package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const (
	openTimeout  = 10 * time.Second
	readTimeout  = time.Second
	standbyPoll  = 200 * time.Millisecond
	writeTimeout = 5 * time.Second

	// up to a dozen questions are asked for a publication, one after another
	publicationTimeout = 5 * time.Second
)

// The codes of the gaps that the readings of a start do not show: of checkpoint.TailCheck, and of
// checkpoint.Config.CheckMemory.
const (
	codeDivergence = "divergence"
	codeMemoryLost = "memory_lost"
)

// errAnew ends a session that got where it wanted: everything is read anew, on new connections, at once.
var errAnew = errors.New("to be read anew")

// errSlotFree ends a standby's session.
var errSlotFree = fmt.Errorf("the slot has become free: %w", errAnew)

// runSession runs one session: connect, read, find the checkpoint, hold the slot, read again, then the loop.
// verified says whether it came so far that the pauses between sessions start small again.
func (p *Pipeline) runSession(ctx context.Context) (verified bool, err error) {
	p.begun = time.Now()
	p.health.set(StateConnecting, nil)
	p.stage = stageConnect
	p.metrics.attempts.Inc()
	openCtx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	conns, err := p.cfg.Open(openCtx)
	if err != nil {
		return false, err
	}
	p.stage = stageStart
	defer conns.Close()
	defer func() { p.recordStop(conns.Store, err) }()
	if p.unrecorded != nil { // a start that did not find it in the record might go on
		return false, p.unrecorded
	}
	if err := conns.JetStream.Check(openCtx); err != nil { // a stream without a leader may never answer
		return false, err
	}

	first, start, err := p.findStart(ctx, conns)
	if errors.Is(err, checkpoint.ErrOwner) && p.mayTake(conns, &first) {
		return false, p.takeEpoch(ctx, conns, first.Revision)
	}
	if errors.Is(err, checkpoint.ErrOwner) {
		return false, p.follow(ctx, conns)
	}
	if err != nil {
		return false, err
	}
	if err := p.refuseGapMode(conns.Decoder.Mapping, first.Record); err != nil {
		return false, err
	}
	if first.Slot.Active {
		return false, p.standBy(ctx, conns, first.Slot)
	}
	if err := p.settleCut(ctx, conns, first, start); err != nil {
		return false, err
	}
	binary := conns.Binary && !p.text
	startCtx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if err := conns.Source.Start(startCtx, start.Checkpoint.Start(), binary); err != nil {
		if fault := outbox.FaultOf(err); fault != nil && fault.Code == relay.CodeSlotInUse {
			return false, p.standBy(ctx, conns, first.Slot)
		}
		return false, fmt.Errorf("start replication at %v: %w", start.Checkpoint.Start(), err)
	}

	// The slot is ours. What was read before may have been the work of its last owner in the middle. Whoever
	// publishes to the stream from now on is seen, or what he published is read.
	if err := conns.JetStream.Watch(startCtx); err != nil {
		return false, err
	}
	held, again, err := p.findStart(ctx, conns)
	if errors.Is(err, checkpoint.ErrOwner) { // by now: the next start stands by
		return false, fmt.Errorf("%w: %w", err, errAnew)
	}
	if err != nil {
		return false, ranged(err, start.Checkpoint.At(), first.Server.WALEnd)
	}
	if !start.Same(again) {
		return false, fmt.Errorf("the place moved from %v/%d to %v/%d while the slot was taken over",
			start.Checkpoint.Due, start.Checkpoint.Seq, again.Checkpoint.Due, again.Checkpoint.Seq)
	}
	if table := conns.Decoder.TableOID; held.Publication.TableOID != table {
		return false, fmt.Errorf("table %s was replaced while the session was opened: its OID was %d",
			conns.Checkpoint.Table, table)
	}
	p.health.busy(true) // a large memory takes longer than an attempt to start may
	recent, err := again.Recent(ctx, conns.JetStream.Recent)
	p.health.busy(false)
	if err == nil {
		err = conns.Checkpoint.CheckMemory(again, len(recent))
	}
	if err != nil {
		return false, err
	}
	fence, err := newestCut(ctx, conns.JetStream, held)
	if err != nil {
		return false, err
	}
	s := newSession(ctx, p, conns, held, again, recent, fence)
	defer s.close()
	p.log.Log(ctx, p.stateLevel(), "session started", "checkpoint", again.Checkpoint.Due, "seq",
		again.Checkpoint.Seq, "last_seq",
		again.LastSeq,
		"already_stored", again.AlreadyStored, "binary", binary, "settings", again.Checkpoint.Settings)
	switch {
	case again.Loss != "" && again.Rewrite:
		p.log.Warn("the loss is confirmed; what the WAL has of it is published again", "loss", again.Loss)
	case again.Loss != "" && again.AlreadyStored > 0:
		p.log.Warn("the stream was emptied soon after it was written, by its limits or a purge: nothing of "+
			"that is published again. If the NATS server lost it, which looks the same, it is missing",
			"seen", again.Loss, "from", again.Checkpoint.Seq+1, "to", again.End)
	case again.Loss != "":
		p.log.Info("the stream was emptied, by its limits or a purge: nothing of that is published again",
			"seen", again.Loss)
	}
	if st := held.Stream; 0 < st.NewestSeq && st.NewestSeq < again.End {
		// A loss of what was durable can't be told from that; it may not pass in silence.
		p.log.Error("messages at the end of the stream that were confirmed are not there: somebody deleted "+
			"them, or the NATS server lost them",
			"from", st.NewestSeq+1, "to", again.End)
	}
	p.stage = stagePublish
	err = s.run(ctx)
	newest := s.tracker.Newest().Due
	err = ranged(err, newest, max(s.in.last, newest))
	if errors.Is(err, decoder.ErrNeedText) {
		p.text = true
	}
	return s.check.Verified(), err
}

// findStart reads slot, record, stream and server, in this order, and resolves the checkpoint to go on from.
// A loss that this is the first reading to show ends the session.
func (p *Pipeline) findStart(ctx context.Context, conns *Conns) (checkpoint.Readings, checkpoint.Start,
	error) {
	r, err := conns.read(ctx)
	if err != nil {
		return r, checkpoint.Start{}, err
	}
	p.health.read(&r, r.Asked)
	p.recheckAfter = r.RecheckAfter()
	start, err := checkpoint.Resolve(conns.Checkpoint, r)
	if f := outbox.FaultOf(err); start.Loss != "" || f != nil && f.Code == "stream_shortened" {
		p.nameDurables(&r)
	}
	if err != nil {
		return r, start, err
	}
	if start.Loss != "" && !p.unconfirmed.confirmedBy(start.Loss, r.Asked) {
		return r, start, &errUnconfirmed{unconfirmed{loss: start.Loss, at: r.Now, after: p.recheckAfter}}
	}
	if start.Loss == "" {
		p.unconfirmed = unconfirmed{} // this reading does not agree
	}
	return r, start, nil
}

// nameDurables says, once, whom the loss of messages that were in the stream concerns. The list may be
// missing from a reading.
func (p *Pipeline) nameDurables(r *checkpoint.Readings) {
	if names := r.Stream.Durables; len(names) > 0 && !slices.Equal(names, p.durables) {
		p.log.Warn("durable consumers at the end of the stream may have had messages that it lost",
			"consumers", names)
		p.durables = names
	}
}

// read reads everything that a start decides from; each question has its own time limit.
func (c *Conns) read(ctx context.Context) (checkpoint.Readings, error) {
	r := checkpoint.Reader{
		Slot: limited("slot", c.Source.Slot), Record: c.load, Stream: limited("stream", c.JetStream.State),
		Server: limited("server", c.Source.Server), Publication: publication(c.Source),
	}
	return r.Read(ctx)
}

// publication reads a source's publication within the time limit for that.
func publication(of Source) func(context.Context) (relay.PublicationIdentity, error) {
	return within(publicationTimeout, "publication", of.Publication)
}

// load reads the record within the time limit of a question.
func (c *Conns) load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	return load(ctx, c.Store)
}

func load(ctx context.Context, from Store) (*checkpoint.Record, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	rec, revision, err := from.Load(ctx)
	if err != nil {
		err = fmt.Errorf("read checkpoint record: %w", err)
	}
	return rec, revision, err
}

// standBy waits until nobody holds the slot any more.
func (p *Pipeline) standBy(ctx context.Context, conns *Conns, slot relay.SlotState) error {
	p.stage = stageStandby
	p.health.set(StateStandby, nil)
	p.log.Info("standby: the slot is held by another session", "pid",
		slot.ActivePID, "holder", slot.Holder)
	poll := time.NewTicker(standbyPoll)
	defer poll.Stop()
	begun := time.Now()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-poll.C:
		}
		slot, err := limited("slot", conns.Source.Slot)(ctx)
		if err != nil {
			return err
		}
		if !slot.Active {
			return errSlotFree
		}
		if time.Since(begun) >= HoldPause {
			p.recovered()
		}
	}
}

// ranged puts what was seen to happen to the stream, rather than read, into the range that it may concern.
func ranged(err error, from, to outbox.LSN) error {
	fault := outbox.FaultOf(err)
	if fault == nil || fault.Class != outbox.Gap || fault.To != 0 {
		return err
	}
	ranged := *fault
	ranged.From, ranged.To = from, to
	return &ranged
}
