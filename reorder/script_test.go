package reorder

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/script"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestScripts runs the files in testdata. Each is a list of inputs, and what the buffer says to each stands
// below it, behind ">".
//
//	settings horizon=20ms sort=seq_key max_events=100 max_bytes=1000000  in force at the start
//	max_taken 2 | unkeyed                                                   further configuration
//	commit <lsn> <time> doc/actor/key ...                                   a transaction
//	tick <lsn> <time>
//	change <lsn> <time> horizon=...                                         a change of settings
//	marker <lsn>                                                         a keepalive, when nothing is held
//	restart                                                           new buffer, from the last checkpoint
//	held                                                                    what is held
func TestScripts(t *testing.T) {
	t.Parallel()
	script.Run(t, 6, func(_ *testing.T, out *script.Script) script.Do { return (&scripted{Script: out}).do })
}

// scripted is the state of one script.
type scripted struct {
	*script.Script
	cfg   Config
	b     *Buffer
	place relay.Checkpoint
	wal   []input
}

func (s *scripted) do(verb string, args []string) (err error) {
	switch verb {
	case "settings":
		s.cfg.Settings, err = parseSettings(args)
		s.place.Settings = s.cfg.Settings
		return err
	case "max_taken":
		s.cfg.MaxPublishedAhead, err = strconv.Atoi(args[0])
		return err
	case "unkeyed":
		s.cfg.Unkeyed = true
		return nil
	}
	if s.b == nil {
		s.b = New(s.cfg)
	}
	switch verb {
	case "commit", "tick", "change":
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
		s.place, _ = s.b.Marker(lsn)
		s.printPlace()
		return nil
	case "restart":
		cfg := s.cfg
		cfg.Start, cfg.PublishedAhead, cfg.Settings = s.place.Due, s.place.PublishedAhead, s.place.Settings
		s.b = New(cfg)
		fmt.Fprintf(&s.Out, "> from %v\n", s.place.Due)
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
	return fmt.Errorf("unknown")
}

func parseSettings(args []string) (relay.Settings, error) {
	_, set, err := relay.ParseSettings("v=1 slot=outflow " + strings.Join(args, " "))
	return set, err
}

func parseInput(verb string, args []string) (in input, err error) {
	if in.commit.LSN, err = outbox.ParseLSN("0/" + args[0]); err != nil {
		return in, err
	}
	at, err := time.ParseDuration(args[1])
	if err != nil {
		return in, err
	}
	in.commit.Time = at.Microseconds()
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
			in.events = append(in.events, relay.Event{Pos: outbox.Position{Index: uint32(i)}, Doc: v[0],
				Actor: v[1], Key: v[2]})
		}
		in.commit.Events = len(in.events)
	}
	return in, err
}

func (s *scripted) feed(in input) error {
	w, err := feed(s.b, in)
	if w == nil || err != nil {
		return err
	}
	fmt.Fprintf(&s.Out, "> window of %d, due %v, thru %v, %d pulled, by %v\n", w.Of, w.Due, w.Thru, w.Pull,
		w.Sort)
	for _, e := range w.Events {
		fmt.Fprintf(&s.Out, ">   %-8v %s/%s/%s\n", e.Pos, e.Doc, e.Actor, e.Key)
	}
	s.place = w.Place
	s.printPlace()
	return nil
}

func (s *scripted) printPlace() {
	fmt.Fprintf(&s.Out, "> place %v, taken %v, %v\n", s.place.Due, s.place.PublishedAhead, s.place.Settings)
}
