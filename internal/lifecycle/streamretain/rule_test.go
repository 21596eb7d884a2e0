package streamretain

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

var day = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

// history is one random life of a stream, with a model of everybody around it. What is lost is decided by
// what they miss, not by the rule.
type history struct {
	rnd     *rand.Rand
	without string // the clause that is taken away
	c       Config
	log     []string
	lost    string // what somebody missed first; "": nothing
	gone    uint64

	created     time.Time
	first, last uint64 // all between are there
	newest      uint64 // but those after this one, which the broker has lost

	known      time.Time // the stream of the record
	confirmed  uint64    // the record's oldest checkpoint
	base       uint64
	gap        bool   // the checkpoint is one of gap mode
	remembered uint64 // by that
	repairing  bool
	restored   bool // from a backup, and no repair has looked yet

	archived uint64
	readers  [2]uint64 // how far they are
	ignored  int       // one of them; -1: none
}

const memory = 5

func newHistory(seed uint64, without string) *history {
	h := &history{rnd: rand.New(rand.NewPCG(seed, 1)), without: without, created: day, known: day, first: 1}
	h.c.Archive, h.ignored = h.rnd.IntN(2) == 0, h.rnd.IntN(4)
	if h.ignored < len(h.readers) {
		h.c.Ignore = []string{fmt.Sprint(h.ignored)}
	}
	return h
}

func (h *history) missing(format string, args ...any) {
	if h.lost == "" {
		h.lost = fmt.Sprintf(format, args...)
	}
}

func (h *history) facts() *Facts {
	p := relay.Checkpoint{Seq: h.confirmed, Remembered: int(h.remembered)}
	if h.gap {
		p.Settings = relay.Settings{Sort: outbox.ByGap, Gap: relay.Gap{Memory: memory}}
	}
	f := &Facts{Created: h.created, First: h.first, Last: h.last, Newest: h.newest, Archived: h.archived,
		Record: &checkpoint.Record{Created: h.known, Base: h.base,
			Checkpoints: []checkpoint.StoredCheckpoint{{Checkpoint: p}}}}
	if h.repairing {
		f.Record.Repairing = "slot_missing"
	}
	for i, done := range h.readers {
		f.Readers = append(f.Readers, Reader{Name: fmt.Sprint(i), Done: done})
	}
	return f
}

// retain lets everything go that may.
func (h *history) retain() {
	var bounds []Bound
	for _, b := range Bounds(&h.c, h.facts()) {
		if b.Clause != h.without {
			bounds = append(bounds, b)
		}
	}
	to := min(MayGo(bounds), h.last)
	if to < h.first {
		return
	}
	if h.c.Archive && to > h.archived {
		h.missing("%d is in no archive", to)
	}
	if h.restored || h.repairing {
		h.missing("a repair publishes %d to %d once more", h.first, to)
	}
	h.gone += to - h.first + 1
	h.first = to + 1
}

// start is what outflow run needs to begin.
func (h *history) start() {
	if h.repairing || h.restored {
		return
	}
	if h.first > h.confirmed+1 {
		h.missing("a start finds nothing to compare behind %d", h.confirmed)
	}
	if h.newest < h.last && h.first > h.newest {
		h.missing("a start takes %d to %d for stored", h.newest+1, h.last)
	}
	h.newest = h.last // they come again
	if h.remembered > 0 && h.first > h.confirmed-h.remembered+1 {
		h.missing("gap mode remembers %d messages up to %d, and the stream begins at %d", h.remembered,
			h.confirmed, h.first)
	}
}

func (h *history) read(i int, upTo uint64) {
	if upTo <= h.readers[i] {
		return
	}
	if i != h.ignored && h.first > h.readers[i]+1 {
		h.missing("reader %d is at %d, and the stream begins at %d", i, h.readers[i], h.first)
	}
	h.readers[i] = upTo
}

func (h *history) between(from, to uint64) uint64 { return from + h.rnd.Uint64N(max(to, from)-from+1) }

// step is something that happens.
func (h *history) step() {
	usable := !h.repairing && !h.restored
	events := []struct {
		weight int
		name   string
		can    bool
		do     func()
	}{
		{6, "apply", true, h.retain},
		{6, "publish", usable, func() {
			h.start()
			h.last += h.between(1, 6)
			h.newest = h.last
		}},
		{5, "confirm", usable, func() {
			h.start()
			before := h.confirmed
			h.confirmed = h.between(h.confirmed, h.last)
			switch {
			case h.c.Memory == 0 && h.confirmed > before:
				h.gap, h.remembered = false, 0
			case h.gap:
				h.remembered = min(memory, h.remembered+h.confirmed-before)
			case h.c.Memory > 0: // it comes into force somewhere before
				h.gap, h.remembered = true, min(memory, h.between(0, h.confirmed-before))
			}
		}},
		{3, "archive", h.c.Archive && usable, func() {
			if h.first > h.archived+1 {
				h.missing("the archive ends at %d, and the stream begins at %d", h.archived, h.first)
			}
			h.archived = h.confirmed
		}},
		{3, "reader 0", true, func() { h.read(0, h.between(h.first-1, h.newest)) }},
		{3, "reader 1", true, func() { h.read(1, h.between(h.first-1, h.newest)) }},
		{1, "rewind", h.readers[0] >= h.first, func() {
			h.readers[0] = h.between(h.first-1, h.readers[0])
		}},
		{2, "start", true, h.start},
		{1, "the broker loses its end", usable, func() {
			h.last = max(h.between(h.confirmed, h.last), h.first-1)
			h.newest = min(h.newest, h.last)
		}},
		{1, "the broker loses its end, and knows how far that came", usable && h.newest >= h.first, func() {
			h.newest = max(h.between(h.confirmed, h.newest), h.first)
		}},
		{1, "gap mode", true, func() { h.c.Memory = memory - h.c.Memory }},
		{1, "restored from a backup", h.first == 1 && h.confirmed > 0, func() {
			h.created, h.restored = h.created.Add(time.Second), true
			h.last = h.between(1, h.confirmed)
			h.newest, h.archived = h.last, 0
		}},
		{1, "repair begins", !h.repairing, func() { h.repairing, h.known = true, h.created }},
		{2, "repair ends", h.repairing, func() {
			h.repairing, h.restored = false, false
			h.last += h.between(0, 4)
			h.newest = h.last
			h.confirmed, h.base, h.gap, h.remembered = h.last, h.last, false, 0
		}},
	}
	all := 0
	for _, e := range events {
		all += e.weight
	}
	for {
		n := h.rnd.IntN(all)
		for _, e := range events {
			if n -= e.weight; n < 0 {
				if e.can {
					h.log = append(h.log, e.name)
					e.do()
					return
				}
				break
			}
		}
	}
}

// end lets everybody do what is left to do.
func (h *history) end() {
	h.start()
	for i := range h.readers {
		h.read(i, h.last)
	}
}

// TestEveryClauseOfTheRuleIsNeeded: with all clauses nobody misses anything in any history, and without any
// one of them somebody does in some.
func TestEveryClauseOfTheRuleIsNeeded(t *testing.T) {
	t.Parallel()
	const steps, enough = 40, 3
	histories := uint64(2000)
	if tier.Long() {
		histories = 40_000
	}
	run := func(seed uint64, without string) *history {
		h := newHistory(seed, without)
		for range steps {
			h.step()
		}
		h.end()
		return h
	}
	gone := uint64(0)
	for seed := range histories {
		h := run(seed, "")
		if gone += h.gone; h.lost != "" {
			t.Fatalf("seed %d: %s, after: %s", seed, h.lost, strings.Join(h.log, ", "))
		}
	}
	if gone < histories {
		t.Errorf("only %d messages went in %d histories", gone, histories)
	}
	t.Logf("with all clauses %d messages go, and nobody misses any", gone)
	for _, clause := range clauses {
		lost, seed := 0, uint64(0)
		for ; seed < histories && lost < enough; seed++ {
			if h := run(seed, clause.name); h.lost != "" {
				if lost++; lost == 1 {
					t.Logf("without %q, seed %d: %s, after: %s", clause.name, seed, h.lost,
						strings.Join(h.log, ", "))
				}
			}
		}
		if lost == 0 {
			t.Errorf("without the clause %q nobody misses anything", clause.name)
		}
	}
}
