package repair

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/app/units"
	catalogue "github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
)

// Report is what was found and done. The JSON names are stable.
type Report struct {
	Slot   string `json:"slot"`
	Stream string `json:"stream"`
	Where  string `json:"where,omitempty"`

	EarlierWhere []string `json:"earlier_where,omitempty"`

	newSlot, despite, restore bool

	Fault   string     `json:"fault,omitempty"` // the code that outflow run would stop with; "": no gap
	Beneath string     `json:"beneath,omitempty"`
	What    string     `json:"what,omitempty"`
	From    outbox.LSN `json:"from"`
	To      outbox.LSN `json:"to"`

	Mode  string   `json:"mode,omitempty"` // record, keep or new-slot
	Why   string   `json:"why,omitempty"`
	Notes []string `json:"notes,omitempty"`
	Loss  string   `json:"loss,omitempty"` // what is lost because no table has it; also one of the notes

	Rows     int    `json:"rows"`      // of the table, for which Where holds
	InStream int    `json:"in_stream"` // how many of Rows the stream has
	InWAL    int    `json:"in_wal"`    // how many are still to come from the slot
	Missing  int    `json:"missing"`   // how many are nowhere
	Erased   int    `json:"erased"`    // how many were erased before, and are not published again
	Lost     int    `json:"lost"`      // messages of commits that the server lost, in a restore or a failover
	First    *Event `json:"first,omitempty"`
	Last     *Event `json:"last,omitempty"`
	Compared bool   `json:"compared"` // whether table and stream were compared

	Command   string `json:"command,omitempty"` // that would repair
	Repaired  bool   `json:"repaired"`
	Published uint64 `json:"published"`
}

// Event names an event.
type Event struct {
	Doc string `json:"doc_id"`
	Key string `json:"seq_key"`
	ID  string `json:"id"`
}

func (e *Event) String() string {
	return fmt.Sprintf("doc_id %q, seq_key %q, id %s", e.Doc, e.Key, e.ID)
}

func (r *Report) found(f *finding) {
	if r.Fault = f.code; f.fault == nil {
		return
	}
	r.What, r.From, r.To, r.Beneath = f.fault.Message, f.fault.From, f.fault.To, f.inner
	r.Command = "outflow repair --accept " + f.code
	if r.Where != "" {
		r.Command += " --where " + catalogue.Word(r.Where)
	}
	for _, earlier := range r.EarlierWhere {
		r.Command += " --earlier-where " + catalogue.Word(earlier)
	}
	if r.newSlot {
		r.Command += " --new-slot"
	}
	if r.despite {
		r.Command += " --despite-erasure"
	}
}

func (r *Report) planned(p *plan) {
	r.Mode, r.Why, r.Notes = string(p.mode), p.why, slices.Clone(p.notes)
	const consent = " --accept-loss '" + lossWords + "'"
	if r.Loss = p.loss; r.Loss != "" {
		if r.Notes = append(r.Notes, r.Loss); r.Command != "" && !strings.HasSuffix(r.Command, consent) {
			r.Command += consent
		}
	}
	if p.erasures != nil {
		r.Notes = append(r.Notes, p.erasures.Message)
	}
	if r.restore = p.archived != nil; r.restore {
		r.Notes, r.Command = append(r.Notes, p.archived.Message), "outflow archive restore"
	}
	if s := p.scan; s != nil {
		r.compared(s)
		if s.foreign > 0 {
			r.Notes = append(r.Notes,
				units.Of(s.foreign, "message")+" of the stream "+
					units.Agree(s.foreign, "is not outflow's and stays where it is",
						"are not outflow's and stay where they are"))
		}
		if s.replaced > 0 {
			r.Notes = append(r.Notes, fmt.Sprintf("%s %s as in the stream: the repair that did not finish "+
				"has published or found what the stream has replaced or discarded since",
				units.Of(s.replaced, "event"),
				units.Agree(s.replaced, "is in no message, and counts", "are in no message, and count")))
		}
		if r.Lost = s.lost; s.lost > 0 {
			r.Notes = append(r.Notes,
				fmt.Sprintf("%s %s in the stream, the first at sequence %d, and not in this "+
					"database: it left the timeline of that history at %v. What is in the stream stays, "+
					"and consumers may have acted on it", units.Of(s.lost, "event"),
					units.Agree(s.lost, "is", "are"), s.lostFrom, s.left))
		}
	}
}

func (r *Report) compared(s *scan) {
	r.Compared = s.snap != nil
	r.Rows, r.Missing, r.InStream, r.InWAL = len(s.outcomes), s.counts[missing], s.counts[inStream],
		s.counts[inWAL]
	r.Erased = s.counts[erased]
	r.First, r.Last = s.first, s.last
	if text := s.back.String(); text != "" && r.Erased > 0 && !slices.Contains(r.Notes, text) {
		r.Notes = append(r.Notes, text)
	}
}

// discarded notes what the stream has taken away again of what was published.
func (r *Report) discarded(n uint64) {
	if n > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d of the events that were published are in the stream no "+
			"more: its limits have replaced or discarded them", n))
	}
}

func (r *Report) done(published uint64) { r.Repaired, r.Published = true, published }

// Lines is the report for people.
func (r *Report) Lines() []string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if r.Fault == "" {
		add("no gap: outflow run finds nothing wrong, there is nothing to repair")
	} else {
		add("fault    %s: %s", r.Fault, r.What)
	}
	if r.Beneath != "" {
		add("         beneath it: %s", r.Beneath)
	}
	if r.To != 0 {
		add("range    %v to %v", r.From, r.To)
	}
	if r.Mode != "" {
		add("plan     %s: %s", modes[mode(r.Mode)], r.Why)
	}
	for _, n := range r.Notes {
		add("note     %s", n)
	}
	if r.Compared {
		under := ""
		if r.Where != "" {
			under = " where " + r.Where
		}
		add(
			"rows     %d in the table%s: %d of them in the stream, %d still to come from the slot, "+
				"%d missing", r.Rows, under, r.InStream, r.InWAL, r.Missing)
		if r.First != nil {
			add("first    %v", r.First)
			add("last     %v", r.Last)
		}
		switch {
		case r.restore: // what the table has no more comes from the archive
		case r.Missing > 0 && !r.Repaired:
			add("note     rows that were in the table before outflow init, and rows whose messages " +
				"somebody removed, count as missing: leave them out with --where. " +
				"Rows that were deleted from the table can't be found")
		case slices.Contains([]string{"stream_missing", "stream_recreated", "stream_shortened"}, r.Fault):
			add("note     rows that were deleted from the table, by retention too, can't be found: what " +
				"the stream has lost of them stays lost")
		}
	}
	switch {
	case r.Fault == "":
	case r.Repaired && r.Compared:
		add("done     %s published. Start `outflow run`", units.Of(r.Published, "event"))
	case r.Repaired:
		add("done     nothing had to be published. Start `outflow run`")
	case r.Command != "":
		add("to do    %s", r.Command)
	}
	return out
}

var modes = map[mode]string{
	modeRecord: "only the checkpoint record is written",
	modeKeep: "the slot stays; the missing rows are published at the end of the stream, then outflow " +
		"run goes on where the slot is",
	modeNewSlot: "the slot is made anew; the missing rows are published at the end of the stream, then " +
		"outflow run goes on from the new slot",
}
