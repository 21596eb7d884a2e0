package checkpoint

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

// TestEachScriptEndsAsItSays runs the files in testdata. Below each line stands what Resolve and the tracker
// say to it, behind ">".
//
//	durable 150s                            Config.DurableAfter
//	record <due>:<seq>:<age>[:<from>] ...   the checkpoints of the record and how long ago they were
//	                                        stored; with from in gap mode, 0 where nothing is held
//	holes <from>-<to> ...                   those that the record knows
//	stream <last seq> [newest seq]          what the stream says; without a second number both are the same
//	thru <thru>                             that of its newest message's header
//	slot <confirmed>
//	resolve                                 a start from these; the tracker of the session is made
//	made <n>                                n messages were made
//	window <due> <n> [from]                 a window of n messages was made
//	keepalive <due> [from]
//	input <lsn>                             an input is read before all that is stored was made
//	acked <seq>
//	begin | saved | unsaved                 of a save
//	wait <duration>                         time passes
//	heard                                   the broker answers: what may be confirmed is confirmed
func TestEachScriptEndsAsItSays(t *testing.T) {
	t.Parallel()
	script.Run(t, 4, func(_ *testing.T, out *script.Script) script.Do {
		s := scripted{Script: out, now: epoch, cfg: config, r: readings()}
		return s.do
	})
}

// scripted is the state of one script.
type scripted struct {
	*script.Script
	cfg     Config
	r       Readings
	now     time.Time
	tracker *Tracker
	check   *TailCheck
}

func (s *scripted) do(verb string, args []string) (err error) {
	switch verb {
	case "durable":
		s.cfg.DurableAfter, err = time.ParseDuration(args[0])
	case "record":
		s.r.Record.Checkpoints = nil
		for _, arg := range args {
			part := strings.Split(arg, ":")
			due, seq := number(part[0], 16), number(part[1], 10)
			age, err := time.ParseDuration(part[2])
			if err != nil {
				return err
			}
			p := at(outbox.LSN(due), seq, age)
			if len(part) > 3 {
				p = holding(p, outbox.LSN(number(part[3], 16)), 0)
			}
			s.r.Record.Checkpoints = append(s.r.Record.Checkpoints, p)
		}
	case "holes":
		s.r.Record.Holes = nil
		for _, arg := range args {
			from, to, _ := strings.Cut(arg, "-")
			s.r.Record.Holes = append(s.r.Record.Holes, Range{number(from, 10), number(to, 10)})
		}
	case "stream":
		st := &s.r.Stream
		st.LastSeq = number(args[0], 10)
		st.NewestSeq = number(args[len(args)-1], 10)
		st.Messages = st.NewestSeq
	case "slot":
		s.r.Slot.Confirmed = outbox.LSN(number(args[0], 16))
	case "thru":
		h := *s.r.Stream.Newest
		h.Thru = outbox.LSN(number(args[0], 16))
		s.r.Stream.Newest = &h
	case "resolve":
		s.r.Now = s.now
		start, err := Resolve(s.cfg, s.r)
		if err != nil {
			fault := outbox.FaultOf(err)
			fmt.Fprintf(&s.Out, "> %s, %v to %v\n", fault.Code, fault.From, fault.To)
			return nil
		}
		s.tracker, s.check = NewTracker(s.cfg, start, s.now), NewTailCheck(s.cfg, start)
		if p := start.Checkpoint; p.Start() != p.Due {
			fmt.Fprintf(&s.Out, "> replication starts at %v\n", p.Start())
		}
		fmt.Fprintf(&s.Out, "> from %v:%d, %d already stored, end %d, last %d, holes %v, rewrite %t, loss "+
			"%t\n", start.Checkpoint.Due,
			start.Checkpoint.Seq, start.AlreadyStored, start.End, start.LastSeq, start.Holes, start.Rewrite,
			start.Loss != "")
		s.print()
	default:
		return s.track(verb, args)
	}
	return err
}

// track does something with the tracker.
func (s *scripted) track(verb string, args []string) error {
	t := s.tracker
	switch verb {
	case "made":
		t.Made(int(number(args[0], 10)))
	case "window":
		t.Made(int(number(args[1], 10)))
		t.Window(checkpointOf(args[0], args[2:]))
	case "keepalive":
		if !t.Keepalive(checkpointOf(args[0], args[1:])) {
			s.Out.WriteString("> does not count\n")
		}
	case "input":
		if f := outbox.FaultOf(s.check.Input(outbox.LSN(number(args[0], 16)))); f != nil {
			fmt.Fprintf(&s.Out, "> %s, %v to %v\n", f.Code, f.From, f.To)
		}
		return nil
	case "acked":
		t.Acked(number(args[0], 10))
	case "begin":
		u := t.BeginSave(s.now)
		fmt.Fprintf(&s.Out, "> saves %s, holes %v\n", text(u), u.Holes)
	case "saved":
		t.Saved(s.now)
	case "unsaved":
		t.Unsaved()
	case "wait":
		d, err := time.ParseDuration(args[0])
		if err != nil {
			return err
		}
		s.now = s.now.Add(d)
	case "heard":
		lsn := t.Confirmable(s.now)
		t.Confirmed(lsn)
		fmt.Fprintf(&s.Out, "> confirms %v\n", lsn)
		return nil
	default:
		return fmt.Errorf("unknown")
	}
	s.print()
	return nil
}

// print prints what the session would do next.
func (s *scripted) print() {
	newest := s.tracker.Newest()
	fmt.Fprintf(&s.Out, "> newest %v:%d", newest.Due, newest.Seq)
	if in, ok := s.tracker.SaveIn(s.now); ok {
		fmt.Fprintf(&s.Out, ", saves in %v", in)
	}
	if s.tracker.MustSave() {
		s.Out.WriteString(", must save before it sends")
	}
	s.Out.WriteString("\n")
}

// checkpointOf is a checkpoint at due; in gap mode, with a held event, where from is given.
func checkpointOf(due string, from []string) relay.Checkpoint {
	p := relay.Checkpoint{Due: outbox.LSN(number(due, 16)), Settings: settings, Timeline: 1}
	if len(from) > 0 {
		p = inGap(p, outbox.LSN(number(from[0], 16)))
	}
	return p
}

func number(text string, base int) uint64 {
	n, err := strconv.ParseUint(text, base, 64)
	if err != nil {
		panic(err)
	}
	return n
}
