package streamretain

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/sink/stream"
)

// Config says what the stream keeps.
type Config struct {
	Archive bool     // there is one
	Memory  int      // reorder.memory, if gap mode is configured
	Ignore  []string // readers that are not waited for
}

// Facts are what a decision is made from.
type Facts struct {
	Created     time.Time // the stream's
	First, Last uint64    // its sequences
	Denied      string    // the setting of the stream that lets nobody remove messages; "": none
	Newest      uint64    // the last one that has a message: a broker may have lost those after it; 0: none
	Cuts        int       // so many of its messages are cuts, where clusters share it

	Record   *checkpoint.Record // nil: there is none
	Archived uint64             // the archive of this stream has everything up to here, and has verified it
	Readers  []Reader
}

// CountCuts reads how many cuts the stream of the record has.
func (f *Facts) CountCuts(ctx context.Context, s *stream.Stream) (err error) {
	if f.Record != nil && f.Record.Epoch > 0 {
		f.Cuts, err = s.Cuts(ctx)
	}
	return err
}

// Reader is a consumer of the stream.
type Reader struct {
	Name string
	Done uint64 // it goes on behind this message; where that is not known 0
	Why  string // how that is known, or why it is not
}

// Bound is up to where messages may go for the sake of one clause. The JSON names are stable.
type Bound struct {
	Clause string `json:"clause"`
	Name   string `json:"name,omitempty"` // the consumer
	UpTo   uint64 `json:"up_to"`
	Why    string `json:"why"`
}

func (b Bound) String() string {
	by := b.Clause
	if b.Name != "" {
		by += " " + b.Name
	}
	return fmt.Sprintf("%s: up to %d may go: %s", by, b.UpTo, b.Why)
}

// clause is a condition of what may go.
type clause struct {
	name   string
	bounds func(c *Config, f *Facts) []Bound
}

// clauses are all of them.
var clauses = []clause{
	{"stream", func(_ *Config, f *Facts) []Bound {
		switch {
		case f.Denied != "":
			return nothing("the stream has " + f.Denied + ": the server removes nothing for anybody")
		case f.Record == nil:
			return nothing("there is no checkpoint record: nothing is confirmed")
		case !f.Record.Created.Equal(f.Created):
			return nothing(fmt.Sprintf("the checkpoint record is of another stream, made at %v",
				f.Record.Created.UTC().Format(time.RFC3339Nano)))
		case len(f.Record.Checkpoints) > 0 && f.Last < f.Record.Checkpoints[0].Seq:
			return nothing(fmt.Sprintf("the stream ends at %d, before the confirmed %d: it has lost its end",
				f.Last, f.Record.Checkpoints[0].Seq))
		}
		return nil
	}},
	{"repairing", func(_ *Config, f *Facts) []Bound {
		switch r := f.Record; {
		case r == nil:
			return nil
		case r.Repairing == checkpoint.ForSnapshot:
			return nothing("outflow init --snapshot has not finished")
		case r.Repairing != "":
			return nothing("outflow repair --accept " + r.Repairing + " has not finished")
		case r.Creating:
			return nothing("outflow init has not finished, or the slot was uninstalled")
		case r.Stopped != "":
			return nothing("outflow run has stopped with " + r.Stopped + ": a repair may need the stream")
		}
		return nil
	}},
	{"confirmed", func(_ *Config, f *Facts) []Bound {
		if f.Record == nil || len(f.Record.Checkpoints) == 0 {
			return nothing("nothing is confirmed yet")
		}
		seq := f.Record.Checkpoints[0].Seq
		if seq > 0 && seq >= f.Newest { // right after a repair, or what came after it was lost
			return []Bound{{UpTo: max(f.Newest, 1) - 1, Why: fmt.Sprintf("%d is the newest message: without "+
				"it nobody could tell whether the stream has lost its end", f.Newest)}}
		}
		return []Bound{{UpTo: seq, Why: fmt.Sprintf("the confirmed checkpoint is at %d: a start compares "+
			"what is after it, and it moves on with later events", seq)}}
	}},
	{"archive", func(c *Config, f *Facts) []Bound {
		if !c.Archive {
			return nil
		}
		return []Bound{{UpTo: f.Archived, Why: fmt.Sprintf("archived up to %d", f.Archived)}}
	}},
	{"consumer", func(c *Config, f *Facts) (all []Bound) {
		for _, r := range f.Readers {
			if !slices.Contains(c.Ignore, r.Name) {
				// the message itself stays: by it the consumer knows that the stream is still the same
				all = append(all, Bound{Name: r.Name, UpTo: r.Done - min(r.Done, 1), Why: r.Why})
			}
		}
		return all
	}},
	{"memory", func(c *Config, f *Facts) []Bound {
		if f.Record == nil {
			return nil
		}
		upTo, most := uint64(math.MaxUint64), 0
		for _, p := range f.Record.Checkpoints {
			memory := c.Memory
			if p.Settings.ByGap() {
				memory = max(memory, p.Settings.Gap.Memory, p.Remembered)
			}
			if memory == 0 {
				continue
			}
			p.Remembered = memory + f.Cuts // which no record keeps for so long: all may lie between
			above, _, _ := checkpoint.Start{Checkpoint: p.Checkpoint, Holes: f.Record.Holes,
				Accepted: f.Record.Base}.Memory()
			upTo, most = min(upTo, above), max(most, memory)
		}
		if most == 0 {
			return nil
		}
		return []Bound{{UpTo: upTo, Why: fmt.Sprintf("gap mode remembers the %d messages before a "+
			"checkpoint (reorder.memory)", most)}}
	}},
}

func nothing(why string) []Bound { return []Bound{{Why: why}} }

// Bounds returns what each clause says, the one that holds the most first.
func Bounds(c *Config, f *Facts) (all []Bound) {
	for _, clause := range clauses {
		for _, b := range clause.bounds(c, f) {
			b.Clause = clause.name
			all = append(all, b)
		}
	}
	slices.SortStableFunc(all, func(a, b Bound) int { return cmp.Compare(a.UpTo, b.UpTo) })
	return all
}

// MayGo is up to where messages may go.
func MayGo(bounds []Bound) uint64 {
	if len(bounds) == 0 {
		return 0
	}
	return bounds[0].UpTo
}
