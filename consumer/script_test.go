package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/script"
	"github.com/outflowhq/outflow/outbox"
)

// TestSessionsFollowTheirScripts runs the files in testdata: what happens to a stream and to the sessions of
// a consumer, one thing after the other. What is done about it stands below each line, behind ">". Documents
// a and b are in different partitions of two.
//
//	partitions 3        of the sessions that follow; 2 at first
//	accept_gap          of the sessions that follow
//	publish a b a       the next events of these documents, named e1, e2, ...
//	again 2 3           the broker is given e2 and e3 again
//	lose 5 [back]       it loses everything from sequence 5; back: its last sequence goes back as well
//	remove 1 2          it removes sequences, as retention does
//	erase 1 2           it removes them, and says so
//	recreate            the stream is deleted and made again
//	session             a session begins
//	read                it reads all that there is
//	look                it looks around: is the barrier reached? Workers without events follow the others
//	stop                it ends cleanly; without it, it crashes
func TestSessionsFollowTheirScripts(t *testing.T) {
	t.Parallel()
	script.Run(t, 8, func(t *testing.T, out *script.Script) script.Do { return newScript(t, out).do })
}

// scripted is the state of one script.
type scripted struct {
	*script.Script
	t *testing.T

	publisher publisher
	published []*stream.Message // e1 is the first
	stream    *memoryStream
	cfg       Config
	store     *documentStore

	session *run // nil: none runs
	reading *dispatcher
	applied bool // the handler was called
}

func newScript(t *testing.T, out *script.Script) *scripted {
	s := &scripted{Script: out, t: t, stream: newMemoryStream(),
		cfg: Config{Name: "orders", Stream: "OUTBOX", Keying: outbox.DefaultSubject, Partitions: 2,
			Lease: time.Hour}}
	s.stream.created = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s.cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	s.store = newDocumentStore(&memoryCell{}, &s.cfg)
	return s
}

func (s *scripted) do(verb string, args []string) error {
	numbers := func() (all []uint64) {
		for _, a := range args {
			if n, err := strconv.ParseUint(a, 10, 64); err == nil {
				all = append(all, n)
			}
		}
		return all
	}
	switch verb {
	case "partitions":
		s.cfg.Partitions = int(numbers()[0])
	case "accept_gap":
		s.cfg.AcceptGap = true
	case "publish":
		for _, document := range args {
			m := s.publisher.event(document)
			s.published = append(s.published, m)
			s.stream.publish(m)
		}
	case "again":
		for _, n := range numbers() {
			s.stream.publish(s.published[n-1])
		}
	case "lose":
		s.stream.lose(numbers()[0], len(args) > 1)
	case "remove":
		s.stream.remove(numbers()...)
	case "erase":
		s.stream.erase(numbers()...)
	case "recreate":
		s.stream.change(func() {
			clear(s.stream.held)
			s.stream.created, s.stream.last = s.stream.created.Add(time.Hour), 0
		})
	case "session":
		s.ended(s.begin())
	case "read":
		s.ended(s.read())
	case "look":
		err := s.reading.skipToBarrier()
		if err == nil {
			s.reading.advanceIdle()
			err = s.work()
		}
		s.ended(err)
	case "stop":
		for _, w := range s.session.workers {
			w.push(item{to: s.reading.at, republished: s.session.check.republishing})
		}
		s.ended(s.work())
		s.session = nil
	default:
		return fmt.Errorf("unknown")
	}
	return nil
}

// ended prints why the session has ended, if it has, and the offsets that are stored.
func (s *scripted) ended(err error) {
	if err != nil {
		why := "another one follows"
		var held *heldError
		if errors.As(err, &held) {
			why = held.why
		}
		if f := outbox.FaultOf(err); f != nil {
			why = f.Code
		}
		fmt.Fprintf(&s.Out, "> the session ends: %s\n", why)
		s.session = nil
	}
	if renewed := s.store.renew(s.t.Context()); renewed != nil {
		s.t.Fatal(renewed)
	}
	fmt.Fprintf(&s.Out, "> offsets%s\n", offsetText(s.store.doc.Offsets[live].list()))
	if s.store.doc.Wanted != nil {
		fmt.Fprintf(&s.Out, "> wanted: %d partitions, from sequence %d on\n", s.store.doc.Wanted.Partitions,
			s.store.doc.Barrier)
	}
}

// offsetText shows offsets as sequences and events.
func offsetText(all []offset) (text string) {
	for _, o := range all {
		text += fmt.Sprintf(" %d", o.Seq)
		if o.known() {
			text += fmt.Sprintf("/e%d", o.Due/16)
		}
		if o.Lost {
			text += "(lost)"
		}
	}
	return text
}

// begin does what a session does before it reads.
func (s *scripted) begin() error {
	ctx := s.t.Context()
	cfg := s.cfg
	cfg.hooks.Source = s.stream
	c, err := New(nil, Memory(), cfg)
	if err != nil {
		return err
	}
	r := &runner{Consumer: c, store: s.store, calls: &calls{cfg: &c.cfg, track: c.state}}
	r.calls.handler = func(context.Context, pgx.Tx, *Event) error {
		s.applied = true
		return nil
	}
	st, err := s.store.acquire(ctx, none)
	if err == nil && st.Layout.Partitions == 0 {
		if err = r.begin(ctx); err == nil {
			st, err = s.store.acquire(ctx, none)
		}
	}
	if err == nil {
		err = r.checkLayout(ctx, st)
	}
	if err != nil {
		return err
	}
	check, err := r.prepareLive(ctx, st, s.stream)
	if err != nil {
		return err
	}
	s.session = r.newRun(st, live, s.stream, nil)
	s.session.check = check
	s.session.stop, s.session.work, s.session.wait = ctx, ctx, ctx
	s.session.prepare(st.Offsets[live])
	s.reading = newDispatcher(s.session, st.Barrier, oldest(st.Offsets[live].list()))
	s.reading.reader, err = s.stream.Open(ctx, s.reading.at.Seq)
	return err
}

// read dispatches what there is, and has the workers do it, one message at a time.
func (s *scripted) read() error {
	for s.stream.more() && (s.reading.until == 0 || s.reading.at.Seq < s.reading.until) {
		m, err := s.reading.reader.Read(s.t.Context())
		if err != nil {
			return err
		}
		if err := s.reading.take(m); err != nil {
			return err
		}
		s.applied = false
		if err := s.work(); err != nil {
			return err
		}
		if m.Sequence > s.reading.at.Seq {
			return nil // beyond the barrier
		}
		what := "is passed over"
		if s.applied {
			what = "has its effect"
		}
		fmt.Fprintf(&s.Out, "> sequence %d: e%s of document %s %s\n", m.Sequence,
			strings.TrimPrefix(string(m.Data), "id-"), strings.TrimPrefix(m.Subject, "outbox."), what)
	}
	return nil
}

// work has each worker do what it was given.
func (s *scripted) work() error {
	for _, w := range s.session.workers {
		for len(w.queue) > 0 {
			items, err := w.next()
			if err == nil {
				err = w.perform(items)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}
