package reorder

import (
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// tuning holds the sizes that decide how much memory is used and nothing else. Tests make them small.
type tuning struct {
	memory int64 // for events that are held and read; 0: the settings' MaxBytes
	least  int64 // what a transaction that is being read may always take up
	block  int   // read from a run at a time
	fanIn  int   // runs that are merged at a time, at least 2
	// names sequences; outbox.SequenceOf everywhere but in tests, which want two to have the same name
	sequence func(doc, actor string) uint64
}

// A merge of 64 runs, each with a block that is read and one that its last events still share, takes up 2
// MiB; two at most are under way at a time.
var defaultTuning = tuning{least: 1 << 20, block: 16 << 10, fanIn: 64, sequence: outbox.SequenceOf}

// writeSize is how much is collected before it is written.
const writeSize = 64 << 10

// sorter sorts more events than fit in memory: what has been added is sorted and written as a run whenever it
// weighs more than limit, and the runs are merged.
type sorter struct {
	disk  *disk
	tune  *tuning
	by    order
	limit int64

	slab   []*chunk
	items  []item // in memory
	weight int64
	total  *int64 // weight of all sorters
	file   *file
	runs   []run
	// events are added in the order by: one run is written piece by piece, and memory comes after it
	serial bool
}

// run is a sorted part of the sorter's file.
type run struct{ off, end int64 }

func (s *sorter) add(e *relay.Event, place outbox.Position) error {
	i := len(s.items)
	if i/chunkLen == len(s.slab) {
		s.slab = append(s.slab, new(chunk))
	}
	at := &s.slab[i/chunkLen][i%chunkLen].Event
	*at = *e
	s.items = append(s.items, item{at, place})
	if s.weigh(weight(e)); s.weight > s.limit {
		return s.flush()
	}
	return nil
}

func (s *sorter) weigh(n int64) {
	s.weight += n
	*s.total += n
}

// flush writes what is in memory as a run.
func (s *sorter) flush() error {
	if len(s.items) == 0 {
		return nil
	}
	if s.file == nil {
		var err error
		if s.file, err = s.disk.create(); err != nil {
			return err
		}
	}
	start := s.file.size
	if !s.serial {
		s.sort()
	}
	for i := range s.items {
		var err error
		if s.file.buf, err = appendRecord(s.file.buf, &s.items[i]); err != nil {
			return &ioError{"write", err}
		}
		*s.items[i].e = relay.Event{}
		if len(s.file.buf) >= writeSize {
			if err := s.file.flush(); err != nil {
				return err
			}
		}
	}
	if err := s.file.flush(); err != nil {
		return err
	}
	if s.serial && len(s.runs) > 0 {
		s.runs[0].end = s.file.size
	} else {
		s.runs = append(s.runs, run{start, s.file.size})
	}
	s.weigh(-s.weight)
	s.items = s.items[:0]
	return nil
}

func (s *sorter) sort() {
	slices.SortFunc(s.items, s.by)
}

// sources returns what has been added as sorted lists, as many as may be merged at a time and one of what is
// in memory.
func (s *sorter) sources() ([]*source, error) {
	for len(s.runs) > s.tune.fanIn {
		if err := s.pass(); err != nil {
			return nil, err
		}
	}
	var list []*source
	for _, r := range s.runs {
		list = append(list, s.source(r))
	}
	if len(s.items) > 0 {
		if !s.serial {
			s.sort()
		}
		list = append(list, &source{memory: s.items})
	}
	return list, nil
}

func (s *sorter) source(r run) *source {
	return &source{file: &reader{file: s.file, off: r.off, end: r.end, size: s.tune.block}}
}

// pass merges the runs into fewer in a new file.
func (s *sorter) pass() error {
	to, err := s.disk.create()
	if err != nil {
		return err
	}
	var runs []run
	for part := range slices.Chunk(s.runs, s.tune.fanIn) {
		var list []*source
		for _, r := range part {
			list = append(list, s.source(r))
		}
		m, err := newMerge(s.by, list)
		if err != nil {
			return err
		}
		start := to.size
		for {
			src, err := m.nextSource()
			if err != nil {
				return err
			}
			if src == nil {
				break
			}
			to.buf = append(to.buf, src.record...)
			if len(to.buf) >= writeSize {
				if err := to.flush(); err != nil {
					return err
				}
			}
		}
		if err := to.flush(); err != nil {
			return err
		}
		runs = append(runs, run{start, to.size})
	}
	s.file.drop()
	s.file, s.runs = to, runs
	return nil
}

// drop removes the file.
func (s *sorter) drop() {
	s.file.drop()
	s.weigh(-s.weight)
	s.slab, s.items, s.runs, s.file = nil, nil, nil, nil
}
