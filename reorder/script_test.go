package reorder

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/script"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestEachScriptEndsAsItSays runs the files in testdata. Each is a list of inputs, and what the buffer says
// to each stands below it, behind ">".
//
//	settings horizon=20ms sort=seq_key max_events=100 max_bytes=1000000  in force at the start
//	max_taken 2 | unkeyed                                                   further configuration
//	commit <lsn> <time> doc/actor/key ...                                   a transaction
//	tick <lsn> <time>
//	change <lsn> <time> horizon=...                                         a change of settings
//	marker <lsn>                                                         a keepalive, when nothing is held
//	cut <lsn>                                                               closes everything that is held
//	restart                                                           new buffer, from the last checkpoint
//	held                                                                    what is held
//	max_holds 2                                                             of a checkpoint
//	gaps                                                                    which gaps are open
//
// In gap mode settings begin with mode=gap, and an event is doc/actor/counter, doc/actor/counter+span, or
// doc/actor/- without a counter.
func TestEachScriptEndsAsItSays(t *testing.T) {
	t.Parallel()
	script.Run(t, 6, func(_ *testing.T, out *script.Script) script.Do { return (&scripted{Script: out}).do })
}

// scripted is the state of one script.
type scripted struct {
	*script.Script
	cfg  Config
	b    *Buffer
	cp   relay.Checkpoint
	wal  []input
	made []outbox.Counter // newest first
	// the checkpoint is that of the newest window that has one, and so many messages were made up to it
	upTo int
}

func (s *scripted) do(verb string, args []string) (err error) {
	switch verb {
	case "settings":
		s.cfg.Settings, err = parseSettings(args)
		s.cp.Settings = s.cfg.Settings
		return err
	case "max_taken":
		s.cfg.MaxPublishedAhead, err = strconv.Atoi(args[0])
		return err
	case "max_holds":
		s.cfg.MaxHolds, err = strconv.Atoi(args[0])
		return err
	case "unkeyed":
		s.cfg.Unkeyed = true
		return nil
	}
	if s.b == nil {
		s.b = New(s.cfg)
	}
	switch verb {
	case "commit", "tick", "change", "cut":
		in, err := parseInput(verb, args)
		if err != nil {
			return err
		}
		s.wal = append(s.wal, in)
		return s.feed(in)
	case "marker":
		lsn, err := outbox.ParseLSN("0/" + args[0])
		if err != nil {
			return err
		}
		p, ok := s.b.Marker(lsn)
		if !ok {
			s.Out.WriteString("> no checkpoint\n")
			return nil
		}
		s.cp, s.upTo = p, len(s.made)
		s.printCheckpoint()
		return nil
	case "restart":
		cfg := s.cfg
		cfg.Start, cfg.PublishedAhead, cfg.Settings = s.cp.Start(), s.cp.PublishedAhead,
			s.cp.Settings
		s.made = s.made[len(s.made)-s.upTo:]
		cfg.Due, cfg.Holds, cfg.Remembered, cfg.Recent = s.cp.Due, s.cp.Holds, s.cp.Remembered,
			s.made
		s.b = New(cfg)
		fmt.Fprintf(&s.Out, "> from %v\n", cfg.Start)
		for _, in := range s.wal {
			if err := s.feed(in); err != nil {
				return err
			}
		}
		return nil
	case "held":
		events, size := s.b.Held()
		oldest, _ := s.b.OldestLSN()
		fmt.Fprintf(&s.Out, "> %d events, %d bytes, oldest %v, late so far %d\n", events, size, oldest,
			s.b.Late())
		return nil
	}
	if verb == "gaps" {
		s.printGaps()
		return nil
	}
	return fmt.Errorf("unknown")
}

func (s *scripted) printGaps() {
	for _, g := range s.b.Gaps(10) {
		missing := fmt.Sprintf("%d to %d", g.First, g.Last)
		if g.Cold {
			missing = fmt.Sprintf("? to %d", g.Last)
		}
		fmt.Fprintf(&s.Out, "> %s/%s waits for %s since %v, %d events\n", g.Doc, g.Actor, missing,
			time.Duration(g.Since)*time.Microsecond, g.Waiting)
	}
	for _, g := range s.b.GivenUp() {
		fmt.Fprintf(&s.Out, "> given up: %s/%s up to %d, %v\n", g.Doc, g.Actor, g.Last, g.Reason)
	}
	if at, ok := s.b.Deadline(); ok {
		fmt.Fprintf(&s.Out, "> until %v\n", time.Duration(at)*time.Microsecond)
	}
}

func parseSettings(args []string) (relay.Settings, error) {
	version := 1
	if args[0] == "mode=gap" {
		version = 2
	}
	_, set, err := relay.ParseSettings(fmt.Sprintf("v=%d slot=outflow %s", version, strings.Join(args, " ")))
	return set, err
}

func parseInput(verb string, args []string) (in input, err error) {
	if in.commit.LSN, err = outbox.ParseLSN("0/" + args[0]); err != nil {
		return in, err
	}
	if verb == "cut" {
		in.commit.Kind = aCut
		return in, nil
	}
	at, err := time.ParseDuration(args[1])
	if err != nil {
		return in, err
	}
	in.commit.Time, in.commit.Start = at.Microseconds(), in.commit.LSN-0x20
	switch verb {
	case "tick":
		in.commit.Kind = relay.Heartbeat
	case "change":
		in.commit.Kind = relay.SettingsChange
		in.commit.Settings, err = parseSettings(args[2:])
	default:
		in.commit.Kind = relay.Events
		for i, a := range args[2:] {
			v := strings.Split(a, "/")
			e := relay.Event{Pos: outbox.Position{Index: uint32(i)}, Doc: v[0], Actor: v[1], Key: v[2]}
			if e.Counter, err = parseCounter(v[2]); err != nil {
				return in, err
			}
			in.events = append(in.events, e)
		}
		in.commit.Events = len(in.events)
	}
	return in, err
}

func parseCounter(text string) (c outbox.Counter, err error) {
	if text == "-" {
		return c, nil
	}
	first, span, more := strings.Cut(text, "+")
	if c.First, err = strconv.ParseInt(first, 10, 64); err != nil {
		return outbox.Counter{}, nil // a key of horizon mode
	}
	if c.Span = 1; more {
		n, err := strconv.ParseUint(span, 10, 32)
		c.Span = uint32(n)
		return c, err
	}
	return c, nil
}

func (s *scripted) feed(in input) error {
	w, err := feed(s.b, in)
	if w == nil || err != nil {
		return err
	}
	fmt.Fprintf(&s.Out, "> window of %d, due %v, thru %v, %d pulled, by %v\n", w.Of, w.Due, w.Thru, w.Pull,
		w.Sort)
	for _, e := range w.Events {
		late := ""
		if e.Counter.Late {
			late = " late"
		}
		fmt.Fprintf(&s.Out, ">   %-8v %s/%s/%s%s\n", e.Pos, e.Doc, e.Actor, e.Key, late)
		s.made = slices.Insert(s.made, 0, e.Counter)
	}
	if w.Checkpoint.Due == 0 {
		s.Out.WriteString("> no checkpoint\n")
		return nil
	}
	s.cp, s.upTo = w.Checkpoint, len(s.made)
	s.printCheckpoint()
	return nil
}

func (s *scripted) printCheckpoint() {
	if s.cp.Settings.ByGap() {
		fmt.Fprintf(&s.Out, "> checkpoint %v, remembers %d", s.cp.Due, s.cp.Remembered)
		for _, h := range s.cp.Holds {
			text, _ := h.MarshalText()
			fmt.Fprintf(&s.Out, ", holds %s", text)
		}
		s.Out.WriteString("\n")
		return
	}
	fmt.Fprintf(&s.Out, "> checkpoint %v, taken %v, %v\n", s.cp.Due, s.cp.PublishedAhead, s.cp.Settings)
}
