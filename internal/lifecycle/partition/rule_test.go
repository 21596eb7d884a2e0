package partition

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// history is one random life of a partition, with a model of everything around it. What is lost is decided by
// what became of its rows, not by the rule.
type history struct {
	rnd     *rand.Rand
	without string // the clause that is taken away
	c       Config
	f       Facts
	p       Partition
	rows    []row
	log     []string
	slots   [2]Slot
	hidden  bool // the operator has said that outflow's slot does not count
	dropped bool // the slot of the other reader, which is a shard's, is gone
	gap     bool // outflow run could not start
	anew    bool // stream and slot were made anew
	cold    cold // the archive of the stream as it is now
	gone    bool
	refused bool   // a service's insert failed, because its partition was dropped while it was attached
	lost    string // what was lost; "": nothing
}

// cold is an archive.
type cold struct {
	system          string // the cluster that complete is of
	complete, whole outbox.LSN
	lost, gaps      bool // the stream's limits took messages; that is accepted
}

// row is a row of the partition.
type row struct {
	lsn               outbox.LSN // where it was committed; 0: no slot of this cluster brings it
	table             bool
	stream, archive   bool // archive: of any stream of that name
	current           bool // in the archive of the stream as it is now
	other             bool // the reader of the other slot has it
	needsUs, needsYou bool // it has to come to the stream; to the other reader
}

const own, other = 0, 1 // indexes of the slots

func newHistory(seed uint64, without string) *history {
	h := &history{rnd: rand.New(rand.NewPCG(seed, 1)), without: without}
	h.c = Config{Slot: "outflow", ID: []string{"id", ""}[h.rnd.IntN(2)], Keep: 10 * time.Hour,
		Archive: h.rnd.IntN(2) == 0}
	h.f = Facts{Now: day, WALEnd: 100, System: "1", Slots: []Slot{{Name: "outflow", Confirmed: 100},
		{Name: "other", Confirmed: 100}}, Outside: Outside{Stream: Stream{Created: day}}}
	if h.rnd.IntN(4) == 0 {
		h.f.Others = []string{"other"}
	}
	h.slots = [2]Slot(h.f.Slots)
	h.cold = cold{system: "1", complete: 100, whole: 100} // it was run before
	h.p = Partition{Attached: true, Exists: true, System: "1", State: Attached}
	return h
}

// fails is the production's list without a clause.
func (h *history) fails(only ...string) string {
	if h.without == "" && only == nil {
		name, _ := mayGo(&h.c, &h.f, &h.p)
		return name
	}
	for _, clause := range clauses {
		f := h.f
		if clause.name == "keep" && h.without == "the others' repairs" {
			f.Readers = Readers{}
		}
		if clause.name != h.without && (only == nil || slices.Contains(only, clause.name)) &&
			clause.fails(&h.c, &f, &h.p) != "" {
			return clause.name
		}
	}
	return ""
}

// sum stands for the rows that are in the table.
func (h *history) sum() Sum {
	s := Sum{Hash: "rows"}
	for _, r := range h.rows {
		if r.table {
			s.Rows++
		}
	}
	return s
}

// read lets a slot's reader read up to an LSN, and confirm it.
func (h *history) read(i int, upTo outbox.LSN) {
	s := &h.slots[i]
	if i == other && h.dropped {
		return
	}
	if s.Lost != "" || (h.f.Repairing != "" || h.gap) && i == own {
		return
	}
	for j := range h.rows {
		if r := &h.rows[j]; r.lsn > s.Confirmed && r.lsn <= upTo {
			if i == own {
				r.stream = true
				h.f.Stream.LastSeq++
			} else {
				r.other = true
			}
		}
	}
	s.Confirmed = max(s.Confirmed, upTo)
}

// archive is a run of outflow archive run, after which nobody waits for messages that the limits took.
func (h *history) archive() {
	if !h.c.Archive || h.f.Repairing != "" || h.gap {
		return
	}
	for j := range h.rows {
		if r := &h.rows[j]; r.stream {
			r.archive, r.current = true, true
		}
	}
	h.cold.gaps = h.cold.gaps || h.cold.lost
	if h.cold.system != h.f.System {
		h.cold.system, h.cold.complete, h.cold.whole = h.f.System, 0, 0
	}
	h.cold.complete = h.slots[own].Confirmed
	if !h.cold.gaps {
		h.cold.whole = h.cold.complete
	}
}

// reach is what a run sees of the archive.
func (h *history) reach() Reach {
	r := Reach{Complete: h.cold.complete, Whole: h.cold.whole}
	if h.cold.system != h.f.System && h.without != "the archive's cluster" {
		r = Reach{}
	}
	if h.without == "the archive's gaps" {
		r.Whole = r.Complete
	}
	return r
}

// limits take what is not archived yet from the stream.
func (h *history) limits() {
	for j := range h.rows {
		if r := &h.rows[j]; h.c.Archive && r.stream {
			r.stream, h.cold.lost = false, h.cold.lost || !r.current
		}
	}
}

// found reports whether a row's id is where rows are looked for.
func (h *history) found(r row) bool {
	if h.c.Archive && h.without != "the archive's ids" {
		return r.current
	}
	return r.stream
}

// repair makes the stream from what is left: the table and the archive, and a slot of now.
func (h *history) repair() {
	for j := range h.rows {
		if r := &h.rows[j]; r.table || r.archive {
			r.stream = true
			h.f.Stream.LastSeq++
		}
	}
	h.f.Repairing, h.gap = "", false
	h.slots[own].Lost = ""
}

// apply is a run of outflow partition apply that is killed after one step.
func (h *history) apply() {
	p := &h.p
	h.f.Slots, h.f.Archive = h.slots[:], h.reach()
	if h.hidden {
		h.f.Slots = h.f.Slots[other:]
	}
	if h.dropped {
		h.f.Slots = h.f.Slots[:len(h.f.Slots)-1]
	}
	switch {
	case h.gone || h.gap && h.f.Repairing == "":
	case p.Attached && (p.State == Attached || p.State == Detaching):
		p.State, p.Attached = Detaching, false
	case p.Attached && h.without != "detached": // somebody has attached it again
		p.reset()
		p.State = Attached
	case p.State == Detaching || h.without != "server" && p.System != h.f.System:
		before := *p
		p.reset()
		if before.Sealed.IsZero() {
			p.Stream = h.f.Stream
		} else if before.System == h.f.System || h.without == "server" {
			p.Stream = before.Stream
		}
		p.Fence, p.Sealed, p.System, p.State = h.f.WALEnd, h.f.Now, h.f.System, Sealed
		p.SealedSum = h.sum()
	case p.State == Sealed:
		if h.fails("server", "own slot", "shards", "slots") == "" {
			p.State = Durable
		}
	case p.State == Durable && h.c.Archive:
		if h.fails("archive") == "" {
			p.State = Archived
		}
	case p.State == Durable || p.State == Archived:
		missing := slices.ContainsFunc(h.rows, func(r row) bool { return r.table && !h.found(r) })
		c := h.c
		if h.without == "archive" && h.cold.whole == h.cold.complete { // only a gap is asked for
			c.Archive = false
		}
		switch {
		case h.without == "verified", h.c.ID != "" && !missing, h.c.ID == "" && shown(&c, &h.f, p):
			found := h.sum()
			p.State, p.Verified, p.Stream = Verified, &found, h.f.Stream
		}
	case p.State == Verified:
		found := h.sum()
		p.Found = &found
		switch h.fails() {
		case "":
			h.drop()
		case "verified":
			p.State, p.Verified = Detaching, nil
		case "stream":
			p.State, p.Verified = Durable, nil
		}
	}
}

// dropOrMakeOther: what was written while the slot was gone, its shard's repair finds in the table.
func (h *history) dropOrMakeOther() {
	if h.dropped {
		for j := range h.rows {
			h.rows[j].other = h.rows[j].other || h.rows[j].table
		}
		h.slots[other].Lost, h.slots[other].Confirmed = "", h.f.WALEnd
	}
	h.dropped = !h.dropped
}

// repairOther: the other's stream was deleted, and its repair makes it anew of what the table has.
func (h *history) repairOther() {
	late := h.gone && !h.f.Now.Before(h.p.Sealed.Add(h.c.Keep)) // nobody has promised anything
	for j := range h.rows {
		r := &h.rows[j]
		r.other, r.needsYou = r.table, r.needsYou && !late
	}
}

func (h *history) drop() {
	h.gone = true
	h.refused = h.p.Attached
	for j := range h.rows {
		h.rows[j].table = false
	}
}

// step is something that happens.
func (h *history) step() {
	type event struct {
		weight int
		name   string
		do     func()
	}
	events := []event{
		{14, "apply", h.apply},
		{2, "outflow reads", func() { h.read(own, h.f.WALEnd) }},
		{2, "the other reads", func() { h.read(other, h.f.WALEnd) }},
		{3, "hours", func() { h.f.Now = h.f.Now.Add(4 * time.Hour) }},
		{2, "other WAL", func() { h.f.WALEnd += 10 }},
		{1, "stream deleted", func() {
			for j := range h.rows {
				r := &h.rows[j]
				r.stream = false
				if h.gone && !h.c.Archive && !h.f.Now.Before(h.p.Sealed.Add(h.c.Keep)) {
					r.needsUs = false // so late nobody has promised anything
				}
			}
			h.newStream()
			h.gap = true
		}},
		{1, "repair begins", func() { // with a new slot: it confirms what nobody has published
			h.f.Repairing, h.slots[own].Lost, h.slots[own].Confirmed = "repair", "", h.f.WALEnd
		}},
		{1, "a slot is lost", func() {
			i := h.rnd.IntN(2)
			h.slots[i].Lost, h.gap = "rows", h.gap || i == own
		}},
		{1, "outflow's slot does not count", func() { h.hidden = !h.hidden }},
	}
	if len(h.f.Others) > 0 {
		events = append(events, event{1, "the other's slot is dropped, or a repair makes it",
			h.dropOrMakeOther}, event{1, "the other's stream is repaired", h.repairOther})
	}
	// without ids nothing shows that a row is older than a slot
	if sealed := h.p.Fence != 0 && !h.p.Attached; h.c.ID != "" || sealed {
		events = append(events, event{1, "stream and slot are made " +
			"anew", func() { // by somebody who does without what is published
			h.newStream()
			h.gap, h.f.Repairing, h.slots[own].Lost, h.slots[own].Confirmed = false, "", "", h.f.WALEnd
			h.anew = true
			for j := range h.rows {
				r := &h.rows[j]
				r.stream, r.needsUs = false, r.needsUs && r.table
			}
		}})
	}
	if h.c.Archive {
		events = append(events, event{3, "archive", h.archive})
		if !h.p.Attached {
			events = append(events, event{1, "limits", h.limits})
		}
	}
	if h.p.Attached && len(h.rows) == 0 {
		events = append(events, event{1, "another cluster", func() { // its WAL has not come so far
			h.f.System += "x"
			h.f.WALEnd = 20
			for i := range h.slots {
				h.slots[i].Confirmed, h.slots[i].Lost = h.f.WALEnd, ""
			}
		}})
	}
	if h.f.Repairing != "" {
		events = append(events, event{2, "repair ends", h.repair})
	}
	if h.p.Attached && !h.gone {
		events = append(events, event{4, "insert", func() {
			h.f.WALEnd += 10
			h.rows = append(h.rows, row{lsn: h.f.WALEnd, table: true, needsUs: true, needsYou: true})
		}})
	}
	if !h.gone && h.c.ID != "" { // without ids only the fence holds, as documented
		events = append(events, event{1, "an unpublished row", func() {
			h.rows = append(h.rows, row{table: true, needsUs: true})
		}})
	}
	if !h.gone && !h.p.Attached && h.p.Fence != 0 && (h.c.ID != "" || !h.anew) {
		events = append(events, event{1, "attached again", func() { h.p.Attached = true }},
			event{1, "dump and restore", func() {
				h.f.System += "x"
				h.f.WALEnd += 1000
				h.slots[own].Confirmed, h.slots[other].Confirmed = h.f.WALEnd, h.f.WALEnd
				h.slots[own].Lost, h.slots[other].Lost = "", ""
				// system_changed; or init goes on behind the messages that the stream has
				h.gap = h.rnd.IntN(2) == 0
				for j := range h.rows {
					h.rows[j].lsn, h.rows[j].needsYou = 0, false
				}
			}})
	}
	all := 0
	for _, e := range events {
		all += e.weight
	}
	for n := h.rnd.IntN(all); ; events = events[1:] {
		if n -= events[0].weight; n < 0 {
			h.log = append(h.log, events[0].name)
			events[0].do()
			return
		}
	}
}

// end lets everybody do what can still be done: repairs, and readers whose slots are lost read the table.
// What is missing then is lost.
func (h *history) end() {
	if h.gap || h.f.Repairing != "" {
		h.repair()
	}
	h.read(own, h.f.WALEnd)
	h.read(other, h.f.WALEnd)
	for _, r := range h.rows {
		switch {
		case r.needsUs && !r.stream && !r.archive && !r.table:
			h.lost = fmt.Sprintf("the stream lacks the row at %v", r.lsn)
		case r.needsYou && !r.other && !r.table:
			h.lost = fmt.Sprintf("the other reader lacks the row at %v", r.lsn)
		}
	}
	if h.refused {
		h.lost = "inserts into its range fail"
	}
}

func (h *history) newStream() {
	h.cold = cold{}
	for j := range h.rows {
		h.rows[j].current = false
	}
	h.f.Stream = Stream{Created: h.f.Now.Add(time.Duration(h.rnd.IntN(1e9)))}
}

// conditions are those that are no clauses, but part of what the clauses "archive", "verified" and "keep"
// ask.
var conditions = []string{"the archive's ids", "the archive's cluster", "the archive's gaps",
	"the others' repairs"}

// loses has, for each clause and each condition of one, a history that loses something without it. Most are
// rare: one of tens of thousands, or more.
var loses = map[string]uint64{
	"the archive's ids": 1927, "the archive's cluster": 1081904, "the archive's gaps": 81511,
	"the others' repairs": 1763, "detached": 3, "server": 22414, "own slot": 405832, "shards": 8837,
	"slots": 1143, "archive": 16559, "keep": 785, "verified": 11, "repairing": 53061, "stream": 1590,
}

// TestEveryClauseOfTheRuleIsNeeded: with all clauses no history loses anything, and without any one of them,
// or of the conditions, some history does.
func TestEveryClauseOfTheRuleIsNeeded(t *testing.T) {
	t.Parallel()
	const steps = 60
	histories := uint64(2000) // of the whole rule
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
	dropped := uint64(0)
	for seed := range histories {
		h := run(seed, "")
		if h.gone {
			dropped++
		}
		if h.lost != "" {
			t.Fatalf("seed %d: %s, after: %s", seed, h.lost, strings.Join(h.log, ", "))
		}
	}
	if dropped < histories/20 {
		t.Errorf("only %d of %d partitions were dropped", dropped, histories)
	}
	names := slices.Clone(conditions)
	for _, clause := range clauses {
		names = append(names, clause.name)
	}
	for _, name := range names {
		first, ok := loses[name]
		h := run(first, name)
		if ok && h.lost != "" {
			continue
		}
		for seed := uint64(0); h.lost == "" && seed < 40_000; seed++ {
			first, h = seed, run(seed, name)
		}
		if h.lost == "" {
			t.Errorf("without the clause %q nothing is lost", name)
			continue
		}
		t.Errorf("without the clause %q it is seed %d now that loses something, which %s", name, first,
			"costs a search each time: write it into the table")
	}
}
