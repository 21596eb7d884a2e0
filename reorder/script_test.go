package reorder

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

var update = flag.Bool("update", false, "write what the scripts print into testdata")

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
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) < 6 {
		t.Fatalf("scripts %v, %v", files, err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			var s script
			got := s.run(t, string(text))
			if *update {
				if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != string(text) {
				t.Errorf("%s prints\n%s", name, got)
			}
		})
	}
}

// script is the state of one of them.
type script struct {
	cfg   Config
	b     *Buffer
	place relay.Checkpoint
	wal   []input
	out   bytes.Buffer
}

func (s *script) run(t *testing.T, text string) string {
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		if strings.HasPrefix(line, ">") {
			continue
		}
		s.out.WriteString(line + "\n")
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "#" {
			continue
		}
		if err := s.do(fields[0], fields[1:]); err != nil {
			t.Fatalf("line %d: %s: %v", i+1, line, err)
		}
	}
	return s.out.String()
}

func (s *script) do(verb string, args []string) (err error) {
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
		s.place = s.b.Marker(lsn)
		s.printPlace()
		return nil
	case "restart":
		cfg := s.cfg
		cfg.Start, cfg.PublishedAhead, cfg.Settings = s.place.Due, s.place.PublishedAhead, s.place.Settings
		s.b = New(cfg)
		fmt.Fprintf(&s.out, "> from %v\n", s.place.Due)
		for _, in := range s.wal {
			if err := s.feed(in); err != nil {
				return err
			}
		}
		return nil
	case "held":
		events, size := s.b.Held()
		oldest, _ := s.b.OldestLSN()
		fmt.Fprintf(&s.out, "> %d events, %d bytes, oldest %v, late so far %d\n", events, size, oldest,
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

func (s *script) feed(in input) error {
	w, err := feed(s.b, in)
	if w == nil || err != nil {
		return err
	}
	fmt.Fprintf(&s.out, "> window of %d, due %v, thru %v, %d pulled, by %v\n", w.Of, w.Due, w.Thru, w.Pull,
		w.Sort)
	for _, e := range w.Events {
		fmt.Fprintf(&s.out, ">   %-8v %s/%s/%s\n", e.Pos, e.Doc, e.Actor, e.Key)
	}
	s.place = w.Place
	s.printPlace()
	return nil
}

func (s *script) printPlace() {
	fmt.Fprintf(&s.out, "> place %v, taken %v, %v\n", s.place.Due, s.place.PublishedAhead, s.place.Settings)
}
