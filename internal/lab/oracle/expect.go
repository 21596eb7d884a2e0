package oracle

import (
	"errors"
	"fmt"
	"slices"
)

// Config is what decides, beside the WAL, which stream an outflow makes.
type Config struct {
	Slot string // outflow's own: changes of settings for others are none
	// the due of its first checkpoint: what was committed at or below it is not an input.
	// 0: all that was read is
	Start    LSN
	Settings Settings
	Unkeyed  bool             // the table has neither a key nor actor and counter
	Timeline func(LSN) uint32 // nil: 1 for all; see [Timelines]
	Resets   []Reset          // where a repair made it begin anew, ascending
	// Where another cluster closed all that it held, because the home was silent; ascending. They are the
	// only inputs that are not in the WAL. Not together with Resets
	Cuts []LSN
	// What it has left to other clusters, because they had claimed it; ascending. Not in gap mode
	Left []Left
	Home int // cluster.id of whose events these are, which each message names; 0: none does

	// What is tolerated, and counted.
	// messages that a repair published: what they are of and what they hold is compared, neither header nor
	// place
	Repaired    bool
	DeadLetters bool // dead letters: only their header is compared
	Removed     bool // messages missing at the beginning of the stream, by retention
	Headers     bool // other headers than those of the format
}

// Reset is a place at which the order begins anew, with nothing held: that of a repair.
type Reset struct {
	At       LSN       // what was committed at or below it is not an input of what follows
	Settings *Settings // nil: those in force
}

// Left is what is not published: of the messages behind the one with Due and N (0: of all) those of commits
// at or below To.
type Left struct {
	Due LSN
	N   int
	To  LSN
}

// leaves reports whether a message of a window is not to be there.
func (l Left) leaves(e *expected) bool {
	behind := e.window.due > l.Due || e.window.due == l.Due && e.n > l.N
	return behind && e.Pos.LSN <= l.To
}

// repairedIndex is the least index of a position that a repair made.
const repairedIndex = 1 << 30

// expected is one message of the stream that ought to be.
type expected struct {
	*Event
	n      int
	window *window
}

// expectation is the stream that the WAL makes.
type expectation struct {
	timeline func(LSN) uint32
	leaves   []Left
	messages []expected
	loose    []*Event // a reset left them without a window: a repair has to publish them
	before   []*Event // the start: nobody has to
	held     []*Event // nothing has closed a window for them yet
	left     []*Event // another cluster publishes them
	windows  int
}

func (x *expectation) header(e *expected) string {
	h := Header{
		Pos: e.Pos, N: e.n, Of: e.window.of, Due: e.window.due, Thru: e.window.thru, Pull: e.window.pull,
		Timeline: x.timeline(e.Pos.LSN), Sort: e.window.sort, ID: e.ID, Key: e.Key,
	}
	if e.window.sort == ByGap {
		h.Sequence, h.Counter, h.Span, h.Late = e.sequence(), e.Counter, e.Span, e.window.late[e.n]
	}
	return h.String()
}

// input says what a transaction is for an outflow: the settings of a change, if it is one.
func (c *commit) input(slot string) (set *Settings, is bool) {
	if len(c.events) > 0 {
		return nil, true
	}
	for i := range c.changes {
		if c.changes[i].slot == slot {
			set = &c.changes[i].settings
		}
	}
	return set, set != nil || c.tick
}

// expect makes the stream.
func (t *Truth) expect(cfg Config) (*expectation, error) {
	x := &expectation{timeline: cfg.Timeline, leaves: cfg.Left}
	if x.timeline == nil {
		x.timeline = func(LSN) uint32 { return 1 }
	}
	if cfg.Settings == (Settings{}) {
		cfg.Settings = DefaultSettings
	}
	if cfg.Settings.MaxEvents < 1 || cfg.Settings.MaxBytes < 1 {
		return nil, fmt.Errorf("settings %+v: the limits must be 1 or more", cfg.Settings)
	}
	if len(cfg.Cuts) > 0 && len(cfg.Resets) > 0 || !slices.IsSorted(cfg.Cuts) {
		return nil, fmt.Errorf("cuts at %v with %d resets: they must ascend, without resets", cfg.Cuts,
			len(cfg.Resets))
	}
	x.messages = make([]expected, 0, t.Events)
	o := newOrder(cfg.Settings, cfg.Unkeyed)
	resets, cuts := cfg.Resets, cfg.Cuts
	for i := range t.commits {
		c := &t.commits[i]
		if c.lsn <= cfg.Start {
			x.before = append(x.before, c.events...)
			continue
		}
		for len(resets) > 0 && c.lsn > resets[0].At {
			set := o.set
			if resets[0].Settings != nil {
				set = *resets[0].Settings
			}
			x.loose = append(x.loose, o.remains()...)
			o = newOrder(set, cfg.Unkeyed)
			resets = resets[1:]
		}
		for ; len(cuts) > 0 && c.lsn > cuts[0]; cuts = cuts[1:] {
			x.add(o.cut(cuts[0]))
		}
		if set, is := c.input(cfg.Slot); is {
			x.add(o.add(c.lsn, c.time, c.events, set))
		}
	}
	for _, lsn := range cuts {
		x.add(o.cut(lsn))
	}
	x.held = o.remains()
	for i := range x.messages {
		if len(cfg.Left) > 0 && x.messages[i].window.sort == ByGap {
			return nil, errors.New("gap mode remembers messages: what is left to others can't be judged")
		}
	}
	return x, nil
}

// add adds the messages of a window, nil if there is none.
func (x *expectation) add(w *window, events []*Event) {
	if w == nil {
		return
	}
	x.windows++
	for n, e := range events {
		m := expected{e, n, w}
		if slices.ContainsFunc(x.leaves, func(l Left) bool { return l.leaves(&m) }) {
			x.left = append(x.left, e)
			continue
		}
		x.messages = append(x.messages, m)
	}
}

func eventsOf(entries []*entry) []*Event {
	events := make([]*Event, len(entries))
	for i, e := range entries {
		events[i] = e.Event
	}
	return slices.Clip(events)
}
