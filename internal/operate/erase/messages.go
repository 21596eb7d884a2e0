package erase

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// batch is how many messages are noted as erased before they are: so many a run that is killed may leave.
const batch = 256

// mayGo is up to where messages may go, and why not further.
func (c *command) mayGo(ctx context.Context) (streamretain.Bound, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	rec, _, err := wiring.Store(c.cfg, c.l.NATS).Load(ctx)
	if err != nil {
		return streamretain.Bound{}, err
	}
	st, err := c.stream.Tail(ctx)
	if err != nil {
		return streamretain.Bound{}, err
	}
	rule := streamretain.Config{}
	if c.cfg.Reorder.Mode == config.ModeGap {
		rule.Memory = c.cfg.Reorder.Memory
	}
	facts := streamretain.Facts{Created: st.Created, Last: st.LastSeq, Newest: st.NewestSeq, Record: rec}
	if err := facts.CountCuts(ctx, c.stream); err != nil {
		return streamretain.Bound{}, err
	}
	return streamretain.Bounds(&rule, &facts)[0], nil
}

// deletable refuses to begin where a stream has messages of the document and lets nobody delete one: what is
// noted as erased, and is not, keeps the archive waiting for ever.
func (c *command) deletable(ctx context.Context) error {
	rec := c.rec
	defer func() { c.rec = rec }()
	if c.rec == nil || c.rec.Cut == 0 {
		c.rec = c.begunNow()
	}
	for _, s := range c.list {
		var all []found
		var err error
		switch {
		case s.denied == "":
		case s.name == c.cfg.Stream:
			all, err = c.find(ctx, s.name, c.rd.Stream.LastSeq, asItIs, c.inStream)
		case c.rep.copy(s.name):
			all, _, err = c.inCopy(ctx, s.name)
		}
		if err == nil && len(all) > 0 {
			err = c.denied(s.name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// denied refuses to delete from a stream that lets nobody.
func (c *command) denied(name string) error {
	s := c.info(name)
	if s == nil || s.denied == "" {
		return nil
	}
	return &outbox.Fault{Class: outbox.Fatal, Code: "erase_denied", Message: fmt.Sprintf("stream %s has "+
		"messages of the document, and %s: the server deletes none for anybody, and that can't be taken back",
		name, s.denied)}
}

// messages erases those of the stream, as far as they may go until then.
func (c *command) messages(ctx context.Context, until time.Time) error {
	// All that was committed below the cut is in the stream: its own slot has confirmed it.
	st, err := c.stream.Tail(ctx)
	if err != nil {
		return err
	}
	if !st.Created.Equal(c.rd.Stream.Created) {
		return c.madeAnew()
	}
	c.rd.Stream = st // what has gone since this began is not found any more
	left, err := c.find(ctx, c.cfg.Stream, st.LastSeq, asItIs, c.inStream)
	if err == nil {
		err = c.noteAgain(ctx)
	}
	if err != nil {
		return err
	}
	if len(left) > 0 {
		if err := c.denied(c.cfg.Stream); err != nil {
			return err
		}
		ok, err := c.replicas(ctx, c.cfg.Stream, until, len(c.rec.Erased) > 0)
		if err != nil || !ok {
			return err
		}
	}
	if err := c.eraseAll(ctx, left, until); err != nil || len(c.rec.Erased) == 0 {
		return err
	}
	_, err = c.replicas(ctx, c.cfg.Stream, until, true)
	return err
}

// noteAgain notes what a run has erased that was killed before it had looked whether its note is still
// there. Where the stream has a message, that was not deleted yet, or another one came in place of one that
// was lost, as one will behind the end.
func (c *command) noteAgain(ctx context.Context) error {
	if !micro(c.rd.Stream.Created).Equal(c.rec.Created) {
		return nil // these are sequences of a former one
	}
	var gone outbox.Sequences
	for _, r := range c.rec.Erased.Within(1, c.rd.Stream.LastSeq) {
		gone = append(gone, c.held.Lacking(r.From, r.To)...)
	}
	return c.noteErased(ctx, c.cfg.Stream, gone)
}

// eraseAll erases messages of the stream, as far as they may go until then.
func (c *command) eraseAll(ctx context.Context, left []found, until time.Time) error {
	task := progress.Count(ctx, "erasing from stream "+c.cfg.Stream, "messages", int64(len(left)))
	defer task.End()
	for len(left) > 0 {
		bound, err := c.mayGo(ctx)
		if err != nil {
			return err
		}
		n := 0
		for n < len(left) && n < batch && left[n].seq <= bound.UpTo {
			n++
		}
		if n > 0 {
			if err := c.eraseBatch(ctx, left[:n]); err != nil {
				return err
			}
			task.Add(int64(n))
			left = left[n:]
			continue
		}
		if more, err := pause(ctx, until); err != nil || !more {
			c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("%s of the stream, from %d on, can't "+
				"go yet: %s", units.Of(len(left), "message"), left[0].seq, bound.Why))
			return err
		}
	}
	return nil
}

// eraseBatch notes that messages are erased, and erases them. What a run that was killed has noted stays
// noted: it is of the document, and the next run erases it.
func (c *command) eraseBatch(ctx context.Context, all []found) error {
	c.rec.Erased = c.rec.Erased.With(sequences(all)...)
	if err := c.ledger.Save(ctx, c.rec); err != nil {
		return err
	}
	if err := c.note(ctx, all); err != nil {
		return err
	}
	c.o.Hit("erase.saved")
	return c.deleteNoted(ctx, c.cfg.Stream, all, "erase.message", func() {})
}

// deleteNoted deletes messages of a stream whose sequences it has noted there. A server changes a stream's
// metadata as a whole, whatever they have become since they were read. Whoever else was about to change them
// may have taken the note away, so afterwards it is looked whether it is there.
func (c *command) deleteNoted(ctx context.Context, name string, all []found, point string,
	each func()) error {
	noted := sequences(all)
	if err := c.noteErased(ctx, name, noted); err != nil {
		return err
	}
	if name == c.cfg.Stream {
		c.o.Hit("erase.noted")
	}
	for _, f := range all {
		if err := c.delete(ctx, name, f); err != nil {
			return err
		}
		each()
		c.o.Hit(point)
	}
	return c.noteErased(ctx, name, noted)
}

// noteErased notes what is erased where consumers read: in the stream, and in what was restored of it.
func (c *command) noteErased(ctx context.Context, name string, all outbox.Sequences) error {
	own := name == c.cfg.Stream
	if !own && !c.ours(c.info(name).restored) || len(all) == 0 {
		return nil
	}
	ask, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err := stream.New(c.l.NATS.API(), name, c.log).NoteErased(ask, all)
	if f := outbox.FaultOf(err); !own && f != nil && f.Code == "erase_room" {
		return nil
	}
	return err
}

// note notes the ids of messages, so that their rows are known when they come back.
func (c *command) note(ctx context.Context, all []found) error {
	for some := range slices.Chunk(all, batch) {
		var headers []string
		for _, f := range some {
			headers = append(headers, f.header)
		}
		if err := c.ledger.Note(ctx, c.rec, headers); err != nil {
			return err
		}
	}
	return nil
}

// delete erases a message from a stream, if it is the one that was read.
func (c *command) delete(ctx context.Context, name string, f found) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	api := c.l.NATS.API()
	m, err := api.Message(ctx, name, jsapi.MessageRequest{Seq: f.seq})
	if err != nil || m == nil {
		return err
	}
	h, err := headerOf(m)
	if err != nil {
		return err
	}
	if m.Subject != f.subject || h.Get(outbox.HeaderName) != f.header {
		return &outbox.Fault{Class: outbox.Gap, Code: "stream_recreated", Message: fmt.Sprintf("stream %s "+
			"has another message at sequence %d than a moment ago: it was made anew", name, f.seq)}
	}
	// without no_erase the server overwrites it
	err = api.Ask(ctx, "STREAM.MSG.DELETE."+name, map[string]uint64{"seq": f.seq}, &jsapi.Answer{})
	if err != nil {
		m, other := api.Message(ctx, name, jsapi.MessageRequest{Seq: f.seq})
		if other == nil && m == nil {
			return nil
		}
		return fmt.Errorf("erase message %d of stream %s: %w", f.seq, name, err)
	}
	return nil
}

// madeAnew is the fault of a stream that is another one than when the run began.
func (c *command) madeAnew() error {
	return &outbox.Fault{Class: outbox.Gap, Code: "stream_recreated",
		Message: fmt.Sprintf("stream %s was made anew while this ran", c.cfg.Stream)}
}
