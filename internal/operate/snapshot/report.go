package snapshot

import (
	"fmt"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// progressEvery is how often progress is reported.
const progressEvery = 5 * time.Second

// Report is what was done. The JSON names are stable.
type Report struct {
	Slot   string `json:"slot"`
	Stream string `json:"stream"`
	Table  string `json:"table"`

	// rows committed up to here were published; later ones come from the slot
	At        outbox.LSN `json:"at"`
	Already   uint64     `json:"already"`   // messages published by an interrupted snapshot
	Rows      int        `json:"rows"`      // the others
	Published uint64     `json:"published"` // of them
	First     uint64     `json:"first,omitempty"`
	Last      uint64     `json:"last,omitempty"` // the stream sequences of these
	Order     string     `json:"order"`
	Seconds   float64    `json:"seconds"` // of sorting and publishing
	Finished  bool       `json:"finished"`
}

// String is the report in words.
func (r *Report) String() string {
	s := fmt.Sprintf("snapshot finished: %d rows of %s published in stream %s", r.Published, r.Table,
		r.Stream)
	if r.Published > 0 {
		s += fmt.Sprintf(" (sequences %d to %d, in the order %s)", r.First, r.Last, r.Order)
	}
	if r.Already > 0 {
		s += fmt.Sprintf(", behind %d that were there from one that did not finish", r.Already)
	}
	return s + fmt.Sprintf("; what was committed after %v comes from slot %s. Start `outflow run`", r.At,
		r.Slot)
}

// RowProgress says how many rows are published.
type RowProgress struct {
	Done      int           `json:"done"`
	Of        int           `json:"of"`
	Rate      float64       `json:"per_second"`
	Remaining time.Duration `json:"-"`
	Seconds   float64       `json:"remaining_seconds"`
}

func (p RowProgress) String() string {
	return fmt.Sprintf("%d of %d rows published (%.0f %%), %.0f a second, about %v left",
		p.Done, p.Of, 100*float64(p.Done)/float64(max(p.Of, 1)), p.Rate, p.Remaining.Round(time.Second))
}

// reporter reports progress every progressEvery.
type reporter struct {
	of          int
	begun, said time.Time
	tell        func(RowProgress)
}

func newReporter(of int, tell func(RowProgress)) *reporter {
	now := time.Now()
	return &reporter{of: of, begun: now, said: now, tell: tell}
}

// checkEvery is after how many rows the clock is read.
const checkEvery = 64

func (p *reporter) row(done int) {
	if done%checkEvery != 0 || p.tell == nil {
		return
	}
	now := time.Now()
	if now.Sub(p.said) < progressEvery {
		return
	}
	p.said = now
	p.tell(p.at(done, now))
}

func (p *reporter) at(done int, now time.Time) RowProgress {
	rate := float64(done) / max(now.Sub(p.begun).Seconds(), 1e-3)
	left := float64(p.of-done) / max(rate, 1e-3)
	return RowProgress{Done: done, Of: p.of, Rate: rate,
		Remaining: time.Duration(left * float64(time.Second)), Seconds: left}
}
