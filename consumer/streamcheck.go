package consumer

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// streamCheck is what a session finds out about the live stream before it reads: whether it is still the
// stream that the offsets refer to.
//
// Each offset names the newest message up to which its partition is done. If the stream has that message, the
// broker has lost nothing that was done in the partition: whatever is beyond the offset has not been applied,
// and the sequence alone decides. That is asked for each of them: other instances may have moved another one
// since the broker lost what this one names. Of the newest one the fields below say why it is missing.
type streamCheck struct {
	created time.Time
	newest  offset // of this instance's offsets
	last    uint64 // the stream's last sequence at the time of the check

	// shorter: the stream ends before the newest offset. Outflow publishes the same messages again at the
	// same sequences.
	shorter bool
	// removed: retention has removed the newest message, or the stream was put back after it was erased. What
	// follows must have a later header as well, otherwise nobody can tell what it is.
	removed bool
	// republishing: the broker has lost the end of its stream and continued at a higher sequence, so messages
	// are published again under new sequences. The offsets whose message is gone are marked as lost;
	// republishing ends with lastLost, the last of those messages.
	republishing bool
	lastLost     offset
	changed      bool // offsets were marked as lost, which has to be stored

	// begins: the consumer is new, and begins at the first message that it reads. A stream that is full has
	// lost by then what was the first one.
	begins bool

	home int // whose events these are, as the newest message says that names a home; 0: none does

	// The sequences that were removed before they were read, as Config.AcceptGap allows. 0: none.
	gapFrom, gapTo uint64
}

// checkStream compares the offsets with the stream's state, and marks offsets as lost.
func checkStream(ctx context.Context, cfg *Config, src stream.Source, st *state, begun bool) (streamCheck,
	error) {
	now, err := stateOf(ctx, src)
	if err != nil {
		return streamCheck{}, fmt.Errorf("stream %s: %w", cfg.Stream, err)
	}
	c := streamCheck{created: now.Created, last: now.Last}
	all := st.Offsets[live]
	at := oldest(all.list())
	if at.Seq < now.Kept {
		if now.Kept, err = frontOf(ctx, src, now.Kept); err != nil {
			return c, fmt.Errorf("stream %s: %w", cfg.Stream, err)
		}
	}
	for _, m := range all.list() {
		if m.Seq > c.newest.Seq || m.Seq == c.newest.Seq && m.known() {
			c.newest = m
		}
	}
	if c.newest.Seq > 0 {
		if err := c.compare(ctx, cfg, src, now, st.Created[live]); err != nil {
			return c, err
		}
		if err := c.findLost(ctx, cfg, src, now, all); err != nil {
			return c, err
		}
	}
	for _, m := range all.list() {
		if m.Lost && (!c.republishing || m.order(c.lastLost) > 0) {
			c.republishing, c.lastLost = true, m
		}
	}
	gone := now.Erased.Lacking(at.Seq+1, min(now.First, now.Kept)-1)
	c.begins = begun && !c.newest.known()
	if len(gone) > 0 && !(c.shorter && now.Last < now.First) && !c.begins {
		if !cfg.AcceptGap {
			return c, gapFault(cfg, gone[0].From, gone[len(gone)-1].To, true)
		}
		c.gapFrom, c.gapTo = at.Seq+1, now.First-1
		cfg.Log.Warn("messages were removed before they were read: going on, as AcceptGap says", "from",
			c.gapFrom, "to", c.gapTo)
	}
	return c, nil
}

// frontOf is the sequence before which retention has taken everything: that of the stream's first message or,
// where this says that the broker had lost those right before it, which come again, the first of them.
func frontOf(ctx context.Context, src stream.Source, kept uint64) (uint64, error) {
	first, err := src.Get(ctx, kept)
	return lostBefore(first, kept), err
}

// lostBefore is the first of the sequences right before a message that the broker had lost, as that says, or
// the message's own if it has lost none; nil: there is no message.
func lostBefore(m *stream.Message, seq uint64) uint64 {
	if m == nil {
		return seq
	}
	lost, err := strconv.ParseUint(m.Header.Get(outbox.HeaderLost), 10, 64)
	if err != nil || lost == 0 {
		return seq
	}
	return min(lost, seq)
}

func (c *streamCheck) compare(ctx context.Context, cfg *Config, src stream.Source, now stream.State,
	created time.Time) error {
	m, err := src.Get(ctx, c.newest.Seq)
	if m != nil {
		c.home, _ = outbox.HomeOf(m.Header) // a malformed one was refused when it was read
	}
	switch {
	case err != nil:
		return fmt.Errorf("stream %s: %w", cfg.Stream, err)
	case m != nil && c.newest.known(): // restored from a backup, a stream has another time of creation
		return checkSame(ctx, cfg, src, now, m, c.newest)
	case !created.IsZero() && !created.Equal(now.Created):
		restored, err := c.restored(ctx, cfg, src, now)
		if restored || err != nil {
			c.removed = true
			return err
		}
		return &possibleLoss{fault(ErrStream, nil, hintStream(cfg), "stream %s, consumer %s: the marks "+
			"count in a stream made at %v, this one was made at %v, and does not have the message of "+
			"sequence %d", cfg.Stream, cfg.Name, created, now.Created, c.newest.Seq), "another stream"}
	case now.Last < c.newest.Seq:
		c.shorter = true
		cfg.Log.Warn("the stream went back: what comes again up to the marks is passed over", "last",
			now.Last, "mark", c.newest.Seq)
	case m != nil || !c.newest.known() || now.Erased.Has(c.newest.Seq):
	case c.newest.Seq < now.Kept:
		c.removed = true
	default:
		cfg.Log.Warn("the stream has lost the newest message that was read: what comes again under new "+
			"sequences is passed over", "mark", c.newest.Seq)
	}
	return nil
}

// restored reports whether a stream that was made at another time is the one that the newest message was
// erased from: it says that it was erased, and the event before it is an earlier one, or was erased as well.
// What follows has to be later.
func (c *streamCheck) restored(ctx context.Context, cfg *Config, src stream.Source, now stream.State) (bool,
	error) {
	if !c.newest.known() || !now.Erased.Has(c.newest.Seq) {
		return false, nil
	}
	for seq := c.newest.Seq - 1; seq >= now.First; seq-- {
		if now.Erased.Has(seq) {
			continue
		}
		m, err := src.Get(ctx, seq)
		if err != nil {
			return false, fmt.Errorf("stream %s: %w", cfg.Stream, err)
		}
		if m == nil || cutOf(m) != nil {
			continue
		}
		h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
		if err != nil {
			return false, fault(ErrForeign, err, hintStream(cfg), "stream %s, sequence %d", cfg.Stream, seq)
		}
		before := offsetOf(seq, &h)
		return before.order(c.newest) < 0, nil
	}
	return len(now.Erased.Lacking(1, c.newest.Seq)) == 0, nil
}

// checkSame returns an error if the message at an offset is not the one that was read.
func checkSame(ctx context.Context, cfg *Config, src stream.Source, now stream.State, m *stream.Message,
	at offset) error {
	if cutOf(m) != nil {
		return checkBefore(ctx, cfg, src, now, at)
	}
	h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
	if err != nil {
		return fault(ErrForeign, err, hintStream(cfg), "stream %s, sequence %d", cfg.Stream, m.Sequence)
	}
	here := offsetOf(m.Sequence, &h)
	switch {
	case here.Pos != at.Pos:
		return otherMessage(cfg, m.Sequence, at, here)
	case here.order(at) != 0:
		return checkWindow(ctx, cfg, src, here)
	}
	return nil
}

// findLost marks the offsets whose message the broker has lost. It returns an error if another one is there.
func (c *streamCheck) findLost(ctx context.Context, cfg *Config, src stream.Source, now stream.State,
	all offsets) error {
	stored := map[uint64]*stream.Message{}
	for _, p := range all.partitions() {
		m := all[p]
		if m.Seq < now.Kept || m.Seq > now.Last || !m.known() || m.Lost {
			continue
		}
		if _, asked := stored[m.Seq]; !asked {
			message, err := src.Get(ctx, m.Seq)
			if err != nil {
				return fmt.Errorf("stream %s: %w", cfg.Stream, err)
			}
			stored[m.Seq] = message
		}
		if message := stored[m.Seq]; message != nil {
			if err := checkSame(ctx, cfg, src, now, message, m); err != nil {
				return err
			}
		} else if !now.Erased.Has(m.Seq) {
			m.Lost, c.changed = true, true
			all[p] = m
		}
	}
	return nil
}

// checkOffset compares a message with the newest offset, and notes when the stream is past republished
// events.
func (c *streamCheck) checkOffset(cfg *Config, here offset) error {
	if c.republishing && here.order(c.lastLost) > 0 && here.Seq > c.lastLost.Seq {
		c.republishing = false
	}
	if !c.newest.known() {
		return nil
	}
	order := here.order(c.newest)
	switch {
	case here.Seq == c.newest.Seq && here.Pos != c.newest.Pos,
		c.shorter && here.Seq > c.last && here.Seq < c.newest.Seq && order >= 0:
		return otherMessage(cfg, here.Seq, c.newest, here)
	case c.removed && here.Seq > c.newest.Seq && order <= 0:
		return fault(ErrStream, nil, hintStream(cfg),
			"stream %s, consumer %s: sequence %d has position %v, before %v at the mark, whose message was "+
				"removed: nobody can tell whether these are later events of another database cluster, or "+
				"earlier ones that come again", cfg.Stream, cfg.Name, here.Seq, here.Pos, c.newest.Pos)
	case c.removed && here.Seq > c.newest.Seq:
		c.removed = false
	}
	return nil
}

// checkHome returns an error if a stream has events of several clusters, as one that sources their streams
// has. Positions of one say nothing about those of another, so the marks can't tell what comes again when the
// broker loses something.
func (c *streamCheck) checkHome(cfg *Config, e *Event) error {
	if e.Home == 0 {
		return nil
	}
	if c.home != 0 && e.Home != c.home {
		return fault(ErrStream, nil,
			"Read the stream of each cluster by a consumer of its own (docs/clusters.md)",
			"stream %s, consumer %s: sequence %d is an event of cluster %d, and before it came one of "+
				"cluster %d", cfg.Stream, cfg.Name, e.seq, e.Home, c.home)
	}
	c.home = e.Home
	return nil
}

// stateOf is a stream's state, with times in the precision of a database.
func stateOf(ctx context.Context, src stream.Source) (stream.State, error) {
	st, err := src.State(ctx)
	st.Created = st.Created.UTC().Truncate(time.Microsecond)
	st.Kept = cmp.Or(st.Kept, st.First)
	return st, err
}
