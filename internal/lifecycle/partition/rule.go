package partition

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// Config says how the table is kept small.
type Config struct {
	Table string // schema.name
	Slot  string // Outflow's own
	ID    string // the id column; "": there is none, and rows can't be compared with the stream

	Every time.Duration // what a new partition spans; 0: as much as the newest one
	Ahead int           // so many partitions are made ahead

	Slack time.Duration // so long a partition is left alone after its range, and after its last insert
	Keep  time.Duration // without an archive: so long after the fence was set, a repair finds the rows here

	// how much goes: what is older, or beyond that size or number. All zero: all that may
	Age  time.Duration
	Size int64
	Rows int64

	OtherSlots  []string      // slots that do not count, unless an Outflow reads this table by it, or may
	LockTimeout time.Duration // how long a lock on the outbox is waited for each time; 0: 2 s
	Archive     bool          // there is one; Keep does not count then for rows that go to this stream only

	// Own is the condition of the rows that go to this stream; "": all do. The others go to streams, and
	// archives, that nothing is known of here.
	Own     string
	ShardBy string // the column that it is made of

	// OwnOnly: what was replicated from other servers is not published.
	OwnOnly bool

	beat     time.Duration // 0: the constant
	looked   time.Duration // likewise
	again    time.Duration // likewise
	together int64         // likewise
	inMemory int           // likewise
}

// Slot is a slot that reads rows from the database.
type Slot struct {
	Name      string
	Confirmed outbox.LSN
	Active    bool
	Lost      string // why it can't be read any more; "": it can
	Counts    string // why it counts although retain.other_slots names it; "": it does not
}

// Outside is what others know: the checkpoint record and the stream.
type Outside struct {
	Repairing string // what is under way by a record; "": nothing
	Readers
	Stream  Stream
	Streams map[string]time.Time // of the others, by slots, when the stream of each was made, by its record
	Archive Reach
}

// Readers are slots of other Outflows, of shards among them.
type Readers struct {
	Others []string // those that read the table, by their records
	// Apart are those that read rows of another shard only, by their records, whatever their table.
	Apart []string
	// May are those that may read the table, if they are slots of this database: why such a slot may count,
	// and what one can do about it.
	May map[string]string
}

// Counting leaves those of all slots that count: all but those that are named in retain.other_slots. Of these
// the own one counts, and those of Outflows that read the table, or may.
func (r Readers) Counting(all []Slot, own string, named []string) []Slot {
	all = slices.DeleteFunc(all, func(s Slot) bool {
		return slices.Contains(named, s.Name) && s.Name != own && r.counts(s.Name) == ""
	})
	for i, s := range all {
		if slices.Contains(named, s.Name) {
			all[i].Counts = r.counts(s.Name)
		}
	}
	return all
}

func (r Readers) counts(slot string) string {
	why, may := r.May[slot]
	switch {
	case slices.Contains(r.Others, slot):
		return "by its record it reads this table; uninstall that Outflow if nobody needs it"
	case may:
		return "it may read this table, and " + why
	}
	return ""
}

// Reach is how far the archive of the stream has come. Its LSNs are of the WAL of this server: those of
// another cluster, or of a timeline that was left before, are not among them.
type Reach struct {
	Last     uint64     // the newest sequence that is archived
	Complete outbox.LSN // the messages of all events below it are archived, or were lost by an accepted gap
	Whole    outbox.LSN // none of those below it were lost
	Err      error      // it can't be read
}

// Stream identifies the stream that has the messages.
type Stream struct {
	Created time.Time // zero: there is none
	LastSeq uint64
}

// Facts are what a decision is made from, read at one moment.
type Facts struct {
	Now    time.Time // by PostgreSQL's clock
	WALEnd outbox.LSN
	System string // system identifier
	Slots  []Slot // those that count
	Outside
}

func (f *Facts) has(slot string) bool {
	return slices.ContainsFunc(f.Slots, func(s Slot) bool { return s.Name == slot })
}

// concerns reports whether the Outflow of a slot may need rows that are to go with p. Of a plain table only
// those of the own shard do.
func (f *Facts) concerns(slot string, p *Partition) bool {
	return p.Horizon == 0 || !slices.Contains(f.Apart, slot)
}

// elsewhere reports whether rows that are to go with p are in another stream as well, or instead. The repair
// of that one finds them in the table, and not in the archive, which is of this stream.
func (f *Facts) elsewhere(c *Config, p *Partition) bool {
	return c.Own != "" && p.Horizon == 0 || slices.ContainsFunc(f.Slots, func(s Slot) bool {
		return f.counts(s.Name) != "" && f.concerns(s.Name, p)
	})
}

// Sum stands for the rows of a table: how many there are, and the sum of the hashes of their ids.
type Sum struct {
	Rows int64
	Hash string
}

// clause is a condition of what may go.
type clause struct {
	name string
	// fails says why it does not hold; "": it does
	fails func(c *Config, f *Facts, p *Partition) string
}

// clauses are all of them. A partition is dropped while all hold, under the lock that keeps its rows as they
// are.
var clauses = []clause{
	{"detached", func(_ *Config, _ *Facts, p *Partition) string {
		if p.Attached || p.Pending {
			return "it is attached"
		}
		return ""
	}},
	{"server", func(_ *Config, f *Facts, p *Partition) string {
		switch {
		case p.Fence == 0:
			return "it has no fence"
		case p.System != f.System:
			return "its fence is of another database cluster"
		case p.Fence > f.WALEnd:
			return fmt.Sprintf("its fence %v lies behind the end of WAL at %v", p.Fence, f.WALEnd)
		}
		return ""
	}},
	{"own slot", func(c *Config, f *Facts, _ *Partition) string {
		if !f.has(c.Slot) {
			return fmt.Sprintf("slot %s does not exist", c.Slot)
		}
		return ""
	}},
	{"shards", func(c *Config, f *Facts, p *Partition) string {
		for _, slot := range f.Others {
			if !f.has(slot) && f.concerns(slot, p) && !slices.Contains(c.OtherSlots, slot) {
				return fmt.Sprintf("slot %s does not exist, and by its record it reads this table: repair "+
					"or uninstall that Outflow, or name the slot in retain.other_slots", slot)
			}
		}
		return f.uncompared(c, p)
	}},
	{"slots", func(_ *Config, f *Facts, p *Partition) string {
		var behind []string
		for _, s := range f.Slots {
			if s.Confirmed < p.Fence {
				behind = append(behind, s.Behind(p.Fence))
			}
		}
		return strings.Join(behind, ", ")
	}},
	{"archive", lacking},
	{"keep", func(c *Config, f *Facts, p *Partition) string {
		if (!c.Archive || f.elsewhere(c, p)) && f.Now.Before(p.Sealed.Add(c.Keep)) {
			return fmt.Sprintf("a repair may need it until %s "+
				"(retain.table.keep)", stamp(p.Sealed.Add(c.Keep)))
		}
		return ""
	}},
	{"verified", func(_ *Config, _ *Facts, p *Partition) string {
		switch {
		case p.Verified == nil:
			return "it is not verified"
		case p.Found == nil || *p.Found != *p.Verified:
			return "its rows are not those that were verified"
		}
		return ""
	}},
	{"repairing", func(_ *Config, f *Facts, _ *Partition) string {
		if f.Repairing != "" {
			return f.Repairing + " has not finished"
		}
		return ""
	}},
	{"stream", func(_ *Config, f *Facts, p *Partition) string {
		if f.Stream.Created.IsZero() || !f.Stream.Created.Equal(p.Stream.Created) ||
			f.Stream.LastSeq < p.Stream.LastSeq {
			return "the stream is not the one that it was verified by"
		}
		return ""
	}},
}

// lacking says why the archive may not have what lies below the fence.
func lacking(c *Config, f *Facts, p *Partition) string {
	switch a := f.Archive; {
	case !c.Archive:
	case a.Err != nil:
		return "the archive does not count: " + a.Err.Error()
	case p.Fence > a.Complete:
		return fmt.Sprintf("the archive ends at sequence %d, complete below %v, not %v", a.Last, a.Complete,
			p.Fence)
	}
	return ""
}

// Behind says how far it is from a fence.
func (s Slot) Behind(fence outbox.LSN) string {
	why := fmt.Sprintf("slot %s has confirmed %v, not %v", s.Name, s.Confirmed, fence)
	switch {
	case s.Lost != "":
		why += " (it is lost: " + s.Lost + ")"
	case !s.Active:
		why += " (nobody reads it)"
	}
	if s.Counts != "" {
		why += " (it counts although retain.other_slots names it: " + s.Counts + ")"
	}
	return why
}

// mayGo says by which clause, and why, a partition may not go.
func mayGo(c *Config, f *Facts, p *Partition) (name, why string) {
	for _, clause := range clauses {
		if why := clause.fails(c, f, p); why != "" {
			return clause.name, why
		}
	}
	return "", ""
}

// apart reports whether each shard has to compare its rows of a partition before one may drop it: only ids
// show that they were published, and each has but the ids of its own stream.
func (f *Facts) apart(c *Config, p *Partition) bool {
	if c.Own == "" || c.ID == "" {
		return false
	}
	for slot, now := range f.Streams {
		if f.shard(slot) && f.former(p, slot, now) {
			return true
		}
	}
	return !p.Made || f.former(p, c.Slot, f.Stream.Created)
}

// shard reports whether another slot is that of another shard, or may be.
func (f *Facts) shard(slot string) bool {
	_, may := f.May[slot]
	return may || slices.Contains(f.Others, slot) && slices.Contains(f.Apart, slot)
}

// former reports whether the rows of p need not be in the stream that a slot has now, although it has
// confirmed the fence: when that was set there was another stream, or no Outflow of that slot.
func (f *Facts) former(p *Partition, slot string, now time.Time) bool {
	return !now.IsZero() && !p.Streams[slot].Created.Equal(now)
}

// uncompared says which other shards have not compared their rows of a partition, when this one has. An
// Outflow that may read the table may be one.
func (f *Facts) uncompared(c *Config, p *Partition) string {
	if _, own := p.verifiedBy(c.Slot); !f.apart(c, p) || !own && p.Verified == nil {
		return ""
	}
	var slots []string
	for _, s := range f.Slots {
		_, may := f.May[s.Name]
		by, compared := p.verifiedBy(s.Name)
		now, known := f.Streams[s.Name]
		switch {
		case compared && (!known || by.Created.Equal(now)):
		case may:
			slots = append(slots, s.Name+" ("+f.counts(s.Name)+")")
		case f.shard(s.Name):
			slots = append(slots, s.Name)
		}
	}
	if len(slots) == 0 {
		return ""
	}
	return fmt.Sprintf("other shards have not compared their rows, of which the fence alone shows nothing: "+
		"let `outflow partition apply` run for slot %s", strings.Join(slots, ", "))
}

// shown reports whether the fence alone shows that the rows are in the stream and, where there is one, in its
// archive: by the fence of a partition whose rows went to this stream, and before any accepted gap.
func shown(c *Config, f *Facts, p *Partition) bool {
	return p.Stream.Created.Equal(f.Stream.Created) && (!c.Archive || p.Fence <= f.Archive.Whole)
}

// wanted says which of the partitions, oldest first, are to go, as far as age, size and number of rows say
// so.
func wanted(c *Config, now time.Time, all []*Partition) map[*Partition]bool {
	chosen := map[*Partition]bool{}
	var size, rows int64
	for _, p := range all {
		size, rows = size+p.Size, rows+p.Rows
	}
	for _, p := range all {
		if p.Upper.IsZero() { // it never goes
			continue
		}
		any := c.Age == 0 && c.Size == 0 && c.Rows == 0
		if !any && !(c.Age > 0 && !now.Before(p.Upper.Add(c.Age)) || c.Size > 0 && size > c.Size ||
			c.Rows > 0 && rows > c.Rows) {
			break
		}
		chosen[p], size, rows = true, size-p.Size, rows-p.Rows
	}
	return chosen
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }
