package snapshot

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/outbox"
)

// Report is what was done. The JSON names are stable.
type Report struct {
	Slot   string `json:"slot"`
	Stream string `json:"stream"`
	Table  string `json:"table"`

	// rows committed up to here were published; later ones come from the slot
	At        outbox.LSN `json:"at"`
	Already   uint64     `json:"already"`   // messages published by an interrupted snapshot
	Rows      int        `json:"rows"`      // the others
	Erased    int        `json:"erased"`    // rows that were erased before, and are not published again
	Published uint64     `json:"published"` // of Rows
	Discarded uint64     `json:"discarded"` // of Published, which the stream's own limits removed again
	First     uint64     `json:"first,omitempty"`
	Last      uint64     `json:"last,omitempty"` // the stream sequences of these
	Order     string     `json:"order"`
	Seconds   float64    `json:"seconds"` // of sorting and publishing
	Finished  bool       `json:"finished"`
}

// String is the report in words.
func (r *Report) String() string {
	s := fmt.Sprintf("snapshot finished: %s of %s published in stream %s", units.Of(r.Published, "row"),
		r.Table, r.Stream)
	if r.Published > 0 {
		s += fmt.Sprintf(" (sequences %d to %d, in the order %s)", r.First, r.Last, r.Order)
	}
	if r.Discarded > 0 {
		s += fmt.Sprintf(", %d of which its limits have replaced or discarded", r.Discarded)
	}
	if r.Already > 0 {
		s += fmt.Sprintf(", behind %d that were there from one that did not finish", r.Already)
	}
	if r.Erased > 0 {
		s += fmt.Sprintf(", without %s erased before and there again", units.Of(r.Erased, "row"))
	}
	return s + fmt.Sprintf("; what was committed after %v comes from slot %s. Start `outflow run`", r.At,
		r.Slot)
}
