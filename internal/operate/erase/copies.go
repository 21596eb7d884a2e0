package erase

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// replayed is the name of the stream in which consumers find what is replayed to them.
func replayed(stream string) string { return stream + "_replay" }

// copies lists the streams of the account that have copies of the messages: those that mirror it or source
// from it, over others too, what is replayed to consumers, what was restored from the archive, and those that
// the command line names.
func (c *command) copies(ctx context.Context) error {
	if err := c.listStreams(ctx); err != nil {
		return err
	}
	is := map[string]bool{}
	for _, name := range c.o.Copies {
		if c.info(name) == nil || name == c.cfg.Stream {
			return &outbox.Fault{Class: outbox.Usage, Code: "flags",
				Message: fmt.Sprintf("--copy %q: the account has no such other stream", name)}
		}
		is[name] = true
	}
	if name := replayed(c.cfg.Stream); c.info(name) != nil {
		is[name] = true
	}
	for more := true; more; {
		more = false
		for _, s := range c.list {
			if !is[s.name] && s.name != c.cfg.Stream && (c.ours(s.restored) && !s.live ||
				slices.ContainsFunc(s.origins, func(o origin) bool {
					return o.Name == c.cfg.Stream || is[o.Name]
				})) {
				is[s.name], more = true, true
			}
		}
	}
	c.rep.Copies = []Copy{}
	for _, name := range c.inOrder(is) {
		c.rep.Copies = append(c.rep.Copies, Copy{Stream: name})
	}
	return nil
}

// restoring names the streams that are being restored, perhaps from what the archive had before it was erased
// there.
func (c *command) restoring() {
	for _, s := range c.list {
		if c.ours(s.restoring) && s.name != c.cfg.Stream {
			c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("stream %s is being restored from the archive",
				s.name))
		}
	}
}

// inOrder puts streams behind those that they copy from: what is still in one of these may come again.
func (c *command) inOrder(is map[string]bool) (all []string) {
	left := slices.Sorted(maps.Keys(is))
	for len(left) > 0 {
		next := slices.IndexFunc(left, func(name string) bool {
			return !slices.ContainsFunc(c.info(name).origins, func(o origin) bool {
				return slices.Contains(left, o.Name)
			})
		})
		next = max(next, 0) // they copy from one another
		all = append(all, left[next])
		left = slices.Delete(left, next, next+1)
	}
	return all
}

// eraseCopies erases from all copies. They are looked for after the archive was rewritten, since something
// may be restored from it meanwhile, and again at the end: one may have been made, or made again, and then
// those that copy from it are read again as well.
func (c *command) eraseCopies(ctx context.Context, until time.Time) error {
	done := map[string]time.Time{} // when those were made that it was erased from
	for {
		if err := c.copies(ctx); err != nil {
			return err
		}
		if s := c.info(c.cfg.Stream); s == nil || !s.created.Equal(c.rd.Stream.Created) {
			return c.madeAnew()
		}
		first := slices.IndexFunc(c.rep.Copies, func(k Copy) bool {
			made, is := done[k.Stream]
			return !is || !made.Equal(c.info(k.Stream).created)
		})
		if first < 0 {
			return nil
		}
		for _, k := range c.rep.Copies[first:] {
			if err := c.eraseCopy(ctx, k.Stream, until); err != nil {
				return err
			}
			done[k.Stream] = c.info(k.Stream).created
		}
	}
}

// eraseCopy erases from a copy.
func (c *command) eraseCopy(ctx context.Context, name string, until time.Time) error {
	all, err := c.inWhole(ctx, name, until)
	if err != nil {
		return err
	}
	if len(all) > 0 {
		if err := c.denied(name); err != nil {
			return err
		}
		ok, err := c.replicas(ctx, name, until, c.rec.Copies[name] > 0)
		if err != nil || !ok {
			return err
		}
	}
	c.rec.Copies[name] = max(c.rec.Copies[name], uint64(len(all))) // a run that is killed leaves fewer
	if err := c.ledger.Save(ctx, c.rec); err != nil {
		return err
	}
	if err := c.note(ctx, all); err != nil {
		return err
	}
	task := progress.Count(ctx, "erasing from stream "+name, "messages", int64(len(all)))
	defer task.End()
	if err := c.deleteNoted(ctx, name, all, "erase.copy", func() { task.Add(1) }); err != nil {
		return err
	}
	if c.rec.Copies[name] > 0 {
		_, err = c.replicas(ctx, name, until, true)
	}
	return err
}

// inCopy finds what goes from a copy. The document is in the subject that a message had in the stream. The
// state is that from before it was read.
func (c *command) inCopy(ctx context.Context, name string) (all []found, state copyState, err error) {
	ask, cancel := context.WithTimeout(ctx, askTimeout)
	state.asked = time.Now()
	err = c.l.NATS.API().Ask(ask, "STREAM.INFO."+name, nil, &state)
	cancel()
	if err != nil {
		return nil, state, err
	}
	original := func(subject string, h nats.Header) string { return c.original(name, subject, h) }
	all, err = c.find(ctx, name, state.State.Last, original, c.inCopies(name))
	return all, state, err
}

// original is the subject that a message of another stream, or a replayed one, had in the stream. The header
// of a sourced one has it before a transform.
func (c *command) original(name, subject string, h nats.Header) string {
	if s := sourceOf(h); s != nil && s.subject != "" {
		name, subject = s.from, s.subject
	}
	// what outflow replay publishes has the original subject behind these
	for _, stream := range []string{c.cfg.Stream, name} {
		if rest, is := strings.CutPrefix(subject, "_outflow_replay."+stream+"."); is {
			_, rest, _ = strings.Cut(rest, ".") // the consumer
			return rest
		}
	}
	if rest, is := strings.CutPrefix(subject, "replay."+name+"."); is {
		return rest
	}
	return subject
}

// inCopies says which messages of a copy go. What lies before the cut is known by sequences if the copy has
// those of the stream of then, or says them, and otherwise by positions alone: an event of an earlier
// database cluster may have one behind the cut. What is older than the stream is of one that had the name
// before, unless the broker's clock was set back since the stream was made: some of that one's own messages
// are older than it is.
func (c *command) inCopies(name string) goes {
	copies := map[string]bool{c.cfg.Stream: true}
	for _, k := range c.rep.Copies {
		copies[k.Stream] = true
	}
	made, newest := micro(c.rd.Stream.Created), c.rd.Stream.LastTime
	back := c.back || !newest.IsZero() && newest.Before(made)
	return func(h nats.Header, seq uint64, at time.Time) (bool, bool) {
		header, of := h.Get(outbox.HeaderName), name
		if s := sourceOf(h); s != nil {
			of, seq = s.from, s.seq
			if s := c.info(of); s != nil && s.live && !copies[of] {
				return false, false // another outbox has a document of that name
			}
		}
		created, known := c.sequencesOf(of)
		switch {
		case !known || seq == 0:
			created, seq = c.rec.Created, 0
		case !at.Before(created):
		case back && created.Equal(made): // it may be of either
			goes, _ := c.goesFrom(created, header, seq)
			return goes, !goes && !c.rec.IsLast(header)
		default:
			created = time.Time{} // it is of a stream that had the name before
		}
		return c.goesFrom(created, header, seq)
	}
}

// sequencesOf is when the stream was made whose sequences the messages of this one have: the stream of the
// settings, or one that had its name before.
func (c *command) sequencesOf(name string) (created time.Time, known bool) {
	for range len(c.list) + 1 {
		if name == c.cfg.Stream {
			return micro(c.rd.Stream.Created), true
		}
		s := c.info(name)
		if s == nil {
			return created, false
		}
		if c.ours(s.restored) {
			_, created, known = archive.StreamOf(s.restored)
			return micro(created), known
		}
		name = s.mirror
	}
	return created, false
}

// headerSource is the header in which the server says from which stream, and from where in it, a message of a
// stream with sources is.
const headerSource = "Nats-Stream-Source"

// place is where a message of a stream with sources comes from.
type place struct {
	from    string // the stream
	filters string // of the source
	seq     uint64 // in that stream; 0: not known
	subject string // there, before a transform; "": not known
}

// sourceOf reads the header; nil: the message was not sourced. Its fields may have other white space in them
// than the blanks between them.
func sourceOf(h nats.Header) *place {
	fields := strings.Split(h.Get(headerSource), " ")
	if fields[0] == "" {
		return nil
	}
	s := &place{}
	s.from, _, _ = strings.Cut(fields[0], ":C=") // the consumer that the source names
	if len(fields) > 1 {
		s.seq, _ = strconv.ParseUint(fields[1], 10, 64)
	}
	if len(fields) > 4 {
		s.filters, s.subject = fields[2], fields[4]
	}
	return s
}
