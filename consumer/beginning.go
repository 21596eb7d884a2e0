package consumer

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// beginning is what a session finds out about the live stream before it reads: whether it is still the stream that the marks count in.
//
// The newest mark names the newest message that was done. If that message is there, the broker has lost nothing that was done since the
// marks were made: what is beyond a mark has not been done, whatever headers say. If it is not there, it tells why.
type beginning struct {
	created time.Time
	newest  mark   // of all marks
	last    uint64 // the stream's last sequence then

	// shorter: the stream ends before the newest mark. Outflow publishes the same messages again at the same sequences.
	shorter bool
	// removed: retention has taken the newest message. What follows must be later ones by their headers too, or nobody can tell.
	removed bool
	// again: messages come again under new sequences, because the broker has lost its end without going back. The marks whose message is
	// lost are holed. What comes again ends with beyond, the last of those messages.
	again  bool
	beyond mark
	found  bool // marks became holed: they are to be stored
}

// begin reads the stream's state and compares it with the marks. It says of marks that they are holed.
func begin(ctx context.Context, cfg *Config, src Source, st *state) (beginning, error) {
	now, err := stateOf(ctx, src)
	if err != nil {
		return beginning{}, fmt.Errorf("stream %s: %w", cfg.Stream, err)
	}
	b := beginning{created: now.Created, last: now.Last}
	all := st.all(live)
	for _, m := range all {
		if m.Seq > b.newest.Seq || m.Seq == b.newest.Seq && m.known() {
			b.newest = *m
		}
	}
	if b.newest.Seq > 0 {
		if err := b.compare(ctx, cfg, src, now, st.Created[live], all); err != nil {
			return b, err
		}
	}
	for _, m := range all {
		if m.Holed && (!b.again || m.order(b.beyond) > 0) {
			b.again, b.beyond = true, *m
		}
	}
	if at := oldest(st.Marks[live]); now.First > at.Seq+1 && !(b.shorter && now.Last < now.First) {
		if !cfg.AcceptGap {
			return b, gapFault(cfg, at.Seq+1, now.First-1, true)
		}
		cfg.Log.Warn("messages were removed before they were read: going on, as AcceptGap says", "from", at.Seq+1, "to", now.First-1)
	}
	return b, nil
}

func (b *beginning) compare(ctx context.Context, cfg *Config, src Source, now StreamState, created time.Time, all []*mark) error {
	m, err := src.Get(ctx, b.newest.Seq)
	switch {
	case err != nil:
		return fmt.Errorf("stream %s: %w", cfg.Stream, err)
	case m != nil && b.newest.known():
		h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
		if err != nil {
			return &Fault{Kind: ErrForeign, What: fmt.Sprintf("stream %s, sequence %d", cfg.Stream, m.Sequence), Err: err, Cure: cureStream(cfg)}
		}
		if h.Pos != b.newest.Pos {
			return otherMessage(cfg, m.Sequence, b.newest, markOf(m.Sequence, &h))
		}
		return nil // a stream that was put back from a copy counts as new, and is the same
	case !created.IsZero() && !created.Equal(now.Created):
		return &Fault{Kind: ErrStream, What: fmt.Sprintf("stream %s, consumer %s: the marks count in a stream made at %v, this one was made at %v, and does not have the message of sequence %d",
			cfg.Stream, cfg.Name, created, now.Created, b.newest.Seq), Cure: cureStream(cfg), sign: "another stream"}
	case now.Last < b.newest.Seq:
		b.shorter = true
		cfg.Log.Warn("the stream went back: what comes again up to the marks is passed over", "last", now.Last, "mark", b.newest.Seq)
	case m != nil || !b.newest.known():
	case b.newest.Seq < now.First:
		b.removed = true
	default:
		cfg.Log.Warn("the stream has lost the newest message that was read: what comes again under new sequences is passed over", "mark", b.newest.Seq)
		return b.hole(ctx, cfg, src, now.First, all)
	}
	return nil
}

// hole finds the marks whose message the broker has lost.
func (b *beginning) hole(ctx context.Context, cfg *Config, src Source, first uint64, all []*mark) error {
	there := map[uint64]bool{}
	for _, m := range all {
		if m.Seq < first || !m.known() {
			continue
		}
		if _, asked := there[m.Seq]; !asked {
			message, err := src.Get(ctx, m.Seq)
			if err != nil {
				return fmt.Errorf("stream %s: %w", cfg.Stream, err)
			}
			there[m.Seq] = message != nil
		}
		if !there[m.Seq] && !m.Holed {
			m.Holed, b.found = true, true
		}
	}
	return nil
}

// judge compares a message with the newest mark. Once the stream is beyond what comes again, nothing does any more.
func (b *beginning) judge(cfg *Config, here mark) error {
	if b.again && here.order(b.beyond) > 0 && here.Seq > b.beyond.Seq {
		b.again = false
	}
	if !b.newest.known() {
		return nil
	}
	order := here.order(b.newest)
	switch {
	case here.Seq == b.newest.Seq && here.Pos != b.newest.Pos,
		b.shorter && here.Seq > b.last && here.Seq < b.newest.Seq && order >= 0:
		return otherMessage(cfg, here.Seq, b.newest, here)
	case b.removed && here.Seq > b.newest.Seq && order <= 0:
		return &Fault{Kind: ErrStream, What: fmt.Sprintf("stream %s, consumer %s: sequence %d has position %v, before %v at the mark, whose message was removed: "+
			"nobody can tell whether these are later events of another database cluster, or earlier ones that come again", cfg.Stream, cfg.Name, here.Seq, here.Pos, b.newest.Pos),
			Cure: cureStream(cfg)}
	case b.removed && here.Seq > b.newest.Seq:
		b.removed = false
	}
	return nil
}

// stateOf is a stream's state, with its time as a database keeps it.
func stateOf(ctx context.Context, src Source) (StreamState, error) {
	st, err := src.State(ctx)
	st.Created = st.Created.UTC().Truncate(time.Microsecond)
	return st, err
}
