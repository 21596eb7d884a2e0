package partition

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Action is what is done with a partition.
type Action string

// The actions.
const (
	Create   Action = "create"
	Detach   Action = "detach"
	Finalize Action = "finalize" // end a DETACH that was interrupted
	Seal     Action = "seal"     // set the fence
	Confirm  Action = "confirm"  // note that every slot has confirmed the fence
	Archive  Action = "archive"  // note that the archive has it
	Verify   Action = "verify"   // compare its rows with the stream, or the archive
	Drop     Action = "drop"
	Forget   Action = "forget" // somebody else has dropped it
	Wait     Action = "wait"   // for what Why says
	Refuse   Action = "refuse" // until the operator decides
	Leave    Action = "leave"  // Outflow does nothing with it
	Delete   Action = "delete" // rows of a plain table
)

// does reports whether the action changes something.
func (a Action) does() bool { return a != Wait && a != Refuse && a != Leave }

// Done reports whether the step changes something that no earlier run had done, or rows were deleted.
func (s Step) Done() bool { return s.Action.does() && !s.again && (s.Action != Delete || s.Rows > 0) }

// Step is what is to be done next with a partition, or was done. The JSON names are stable.
type Step struct {
	Partition string `json:"partition"`
	Action    Action `json:"action"`
	Why       string `json:"why,omitempty"`
	Rows      int64  `json:"rows,omitempty"`
	// ids of rows that were never published, at most ten
	Unpublished []string `json:"unpublished,omitempty"`
	Clause      string   `json:"clause,omitempty"` // of Wait: the condition that does not hold

	again bool // an earlier run had done it
}

// String is the step in a line.
func (s Step) String() string {
	text := string(s.Action) + " " + s.Partition
	if s.Why != "" {
		text += ": " + s.Why
	}
	return text
}

// situation is everything that is read before something is decided.
type situation struct {
	*Facts
	all     []*Partition // oldest first
	partman partman
	chosen  map[*Partition]bool // by age, size and number of rows
}

func (s *situation) byDefault() *Partition {
	for _, p := range s.all {
		if p.Default && (p.Attached || p.Pending) {
			return p
		}
	}
	return nil
}

// ranges are the partitions that take rows of a range, oldest first.
func (s *situation) ranges() (all []*Partition) {
	for _, p := range s.all {
		if (p.Attached || p.Pending) && !p.Default && (p.Odd == "" || !p.Upper.IsZero()) {
			all = append(all, p)
		}
	}
	return all
}

// pending is the partition that is half detached; nil: there is none.
func (s *situation) pending() *Partition {
	for _, p := range s.all {
		if p.Pending {
			return p
		}
	}
	return nil
}

// look reads the situation.
func (m *Manager) look(ctx context.Context) (*situation, error) {
	f, err := m.facts(ctx, m.conn)
	if err != nil {
		return nil, err
	}
	s := &situation{Facts: f}
	if m.root.Key == "" {
		return nil, m.badKey()
	}
	if s.all, err = m.read(ctx, f.System); err != nil {
		return nil, err
	}
	for _, p := range s.all {
		if p.System == f.System && p.Fence > f.WALEnd { // that of another cluster is set again
			return nil, m.behind(f, p)
		}
		if m.others(p) && !m.holds(f, p.RefusedBy) {
			// in another stream, and nobody looks for them any more; or in this one; or nobody can tell
			m.o.Pass.recall(p)
		}
		if p.RefusedAt.After(f.Now.Add(maxRest)) { // the clock was ahead
			p.RefusedAt = time.Time{}
		}
		m.ofOlder(f, p)
		m.asOne(f, p)
		if m.cfg.Archive && (p.State == Archived || p.State == Verified) {
			// by an earlier run: the archive may have lost it since
			p.came, p.State, p.Verified = p.State, Durable, nil
		}
	}
	if s.partman, err = m.readPartman(ctx); err != nil {
		return nil, err
	}
	if s.partman.drops {
		return nil, postgres.Fatal(nil, codePartman, fmt.Sprintf("UPDATE part_config SET "+
			"retention_keep_table = true WHERE parent_table = '%s.%s': pg_partman then detaches, and "+
			"Outflow drops what "+
			"everybody has", m.root.Schema, m.root.Name),
			"pg_partman drops old partitions of %s (retention_keep_table = false), and asks nobody whether "+
				"their rows are published", m.root.Quoted())
	}
	for _, p := range s.all {
		for _, q := range s.all { // the clock was ahead: it was sealed before those behind it
			if p.Sealed.After(f.Now) && q.System == p.System && q.Fence > p.Fence && !q.Sealed.IsZero() &&
				q.Sealed.Before(p.Sealed) {
				p.Sealed = q.Sealed
			}
		}
	}
	var attached []*Partition
	for _, p := range s.all {
		if (p.Attached || p.Pending) && !p.Default && p.Odd == "" {
			attached = append(attached, p)
		}
	}
	s.chosen = wanted(&m.cfg, f.Now, attached)
	return s, nil
}

// behind is the fault of a fence in the future.
func (m *Manager) behind(f *Facts, p *Partition) error {
	return &outbox.Fault{Class: outbox.Gap, Code: codeBehind,
		Message: fmt.Sprintf("the server's WAL ends at %v, before the fence of %s", f.WALEnd, p.Name),
		From:    f.WALEnd, To: p.Fence,
		Hint: fmt.Sprintf("It was restored from an older copy, or is another server: correct postgres.url, "+
			"or run `outflow repair`. Then: UPDATE %s SET state = 'detaching', fence = NULL WHERE state <> "+
			"'dropped' AND fence > pg_current_wal_insert_lsn()", m.ledger())}
}

func (m *Manager) badKey() error {
	if m.root.Strategy == "" {
		return postgres.Fatal(nil, codeKey, "Set retain.table.method to delete, or make a new outbox with "+
			"init.partition.by", "table %s is not partitioned", m.root.Quoted())
	}
	return postgres.Fatal(nil, codeKey, "Partition it by range of one column of type timestamptz, timestamp "+
		"or date, or leave retention of this table to somebody else",
		"table %s is not partitioned by ranges of time", m.root.Quoted())
}

// Plan says what Apply would begin with, and changes nothing.
func (m *Manager) Plan(ctx context.Context) ([]Step, error) {
	s, err := m.look(ctx)
	if err != nil {
		return nil, err
	}
	var steps []Step
	missing, err := m.missing(s)
	if err != nil {
		return nil, err
	}
	for _, p := range missing {
		step := p.create()
		switch err := m.vacant(ctx, s, p); {
		case inTheWay(err):
			step.Action, step.Why = Leave, outbox.FaultOf(err).Message
		case err != nil:
			return nil, err
		}
		steps = append(steps, step)
	}
	for _, p := range s.all {
		step := m.next(s, p)
		if p.Refused > 0 && (step.Action == Archive || step.Action == Verify) {
			step.Action = Refuse
			step.Why = fmt.Sprintf("%d of its %s %s never published, by the last run of apply (%s): "+
				"publish or accept. The next apply compares again", p.Refused,
				units.Of(p.SealedSum.Rows, "row"), units.Agree(p.Refused, "was", "were"), codeUnpublished)
		}
		steps = append(steps, step)
	}
	return steps, nil
}

// next says what is to be done with a partition.
func (m *Manager) next(s *situation, p *Partition) Step {
	step := func(a Action, format string, args ...any) Step {
		return Step{Partition: p.Name, Action: a, Why: fmt.Sprintf(format, args...), Rows: p.SealedSum.Rows}
	}
	switch {
	case !p.Exists:
		return step(Forget, "it is gone")
	case p.State == Kept && !p.Attached:
		return step(Leave, "somebody else detached it")
	case p.Pending && p.State != Detaching && !s.partman.manages:
		return step(Leave, "somebody else detaches it; until that has ended PostgreSQL detaches no other one")
	case p.Pending:
		return step(Finalize, "its DETACH was interrupted")
	case p.Attached:
		return m.nextAttached(s, p, step)
	case p.Odd != "":
		return step(Leave, "%s", p.Odd)
	case (p.State == Ahead || p.State == Attached) && !s.partman.manages:
		return step(Leave, "somebody else detached it")
	case p.State == Ahead || p.State == Attached:
		return step(Seal, "pg_partman detached it")
	case p.State == Detaching:
		return step(Seal, "it is detached")
	case p.System != s.System:
		return step(Seal, "its fence is of another database cluster")
	}
	return m.nextSealed(s, p, step)
}

// others reports whether rows were refused that are to be in another stream.
func (m *Manager) others(p *Partition) bool {
	return p.Refused > 0 && p.RefusedBy != "" && p.RefusedBy != m.cfg.Slot
}

// holds reports whether what the Outflow of another slot refuses are rows of another shard. One that may read
// the table may be one.
func (m *Manager) holds(f *Facts, slot string) bool {
	_, may := f.May[slot]
	return m.cfg.ID != "" && f.has(slot) && (slices.Contains(f.Apart, slot) || may && m.cfg.Own != "")
}

// asOne makes of what all who read the table have found out of a partition what this Outflow has.
func (m *Manager) asOne(f *Facts, p *Partition) {
	alone := !f.elsewhere(&m.cfg, p) && len(p.VerifiedBy) == 0 // and nobody else was there before
	if m.cfg.ID == "" || alone || p.State != Durable && p.State != Archived && p.State != Verified {
		return
	}
	by, ok := p.verifiedBy(m.cfg.Slot)
	switch {
	case ok && by.Created.Equal(f.Stream.Created):
		sum := p.SealedSum
		p.State, p.Verified, p.Stream = Verified, &sum, by
		return
	case !ok && !f.apart(&m.cfg, p) && p.Stream.Created.Equal(f.Stream.Created):
		return // an older version has noted it for whoever has this stream
	}
	delete(p.VerifiedBy, m.cfg.Slot) // by a former stream
	if p.Verified = nil; p.State == Verified {
		p.State = Durable
	}
}

// ofOlder makes up for what an older version has not noted when it set a fence: for which streams. Where
// several read the table nobody knows, so those there are now are taken for them.
func (m *Manager) ofOlder(f *Facts, p *Partition) {
	for _, s := range p.Streams {
		if s.Fence == p.Fence {
			return
		}
	}
	if p.Fence == 0 {
		return
	}
	own := f.Stream
	if !p.Stream.Created.IsZero() && !f.elsewhere(&m.cfg, p) {
		own = p.Stream
	}
	p.Streams, p.older = m.streams(f, own), true
	p.fenced()
}

// streams are those that rows go to which are behind a fence of now, by slots.
func (m *Manager) streams(f *Facts, own Stream) map[string]verifying {
	all := map[string]verifying{m.cfg.Slot: {Stream: own}}
	for slot, created := range f.Streams {
		if f.counts(slot) != "" && f.has(slot) {
			all[slot] = verifying{Stream: Stream{Created: created}}
		}
	}
	return all
}

// fenced notes of which fence the streams are: a version that does not know them sets another one.
func (p *Partition) fenced() {
	for slot, s := range p.Streams {
		p.Streams[slot] = verifying{s.Stream, p.Fence}
	}
}

func (m *Manager) nextAttached(s *situation, p *Partition, step func(Action, string, ...any) Step) Step {
	after := func(t time.Time) time.Time { return t.Add(m.cfg.Slack) }
	ends := p.Upper.Add(behindUTC(m.root.KeyType))
	switch {
	case p.Default:
		return step(Leave, "it takes what no other partition does; because of it the others can only be "+
			"detached under a lock that writers wait for, 2 s at most each time")
	case p.Odd != "":
		return step(Leave, "%s", p.Odd)
	case s.partman.manages:
		return step(Leave, "pg_partman detaches it")
	case p.Upper.IsZero():
		return step(Leave, "its range has no end")
	case s.Now.Before(p.Upper):
		return step(Leave, "its range ends at %s", stamp(p.Upper))
	case s.Now.Before(after(ends)):
		why := "its range has ended; until %s rows may still come (retain.table.slack)"
		if ends != p.Upper {
			why = "its range has ended by UTC, and for who writes with another time zone up to 12 h later; " +
				"until %s rows may still come (retain.table.slack)"
		}
		return step(Wait, why, stamp(after(ends)))
	case !s.chosen[p]:
		return step(Leave, "the table is within retain.table.age, size and rows")
	case p.Inserts == nil || *p.Inserts != p.Written:
		return step(Wait, "it is watched for inserts from now on (retain.table.slack)")
	case s.Now.Before(after(p.QuietSince)):
		return step(Wait, "rows were written to it at %s or before; until %s more may come "+
			"(retain.table.slack)", stamp(p.QuietSince), stamp(after(p.QuietSince)))
	case s.pending() != nil: // PostgreSQL allows one at a time
		return step(Wait, "the DETACH of %s has not ended", s.pending().Name)
	case s.byDefault() != nil:
		return step(Detach, "not CONCURRENTLY, because %s takes what no other partition does: writers wait "+
			"meanwhile, 2 s at most", s.byDefault().Name)
	}
	return step(Detach, "its range has ended")
}

func (m *Manager) nextSealed(s *situation, p *Partition, step func(Action, string, ...any) Step) Step {
	if m.others(p) && p.State != Sealed {
		w := step(Wait, "%s of another shard %s never published, by the last run of that of slot %s",
			units.Of(p.Refused, "row"), units.Agree(p.Refused, "was", "were"), p.RefusedBy)
		w.Clause = "shards"
		return w
	}
	// While a repair is under way, the slot that it has made confirms what nobody has published yet, and the
	// stream lacks that.
	if name, why := m.fails(s.Facts, p, "server", "own slot", "shards", "slots", "repairing"); why != "" {
		w := step(Wait, "%s", why)
		w.Clause = name
		return w
	}
	switch {
	case p.State == Sealed:
		return step(Confirm, "every slot has confirmed %v", p.Fence)
	case m.cfg.Archive && p.State == Durable:
		why := lacking(&m.cfg, s.Facts, p)
		if why != "" && s.Archive.Err == nil {
			w := step(Wait, "%s", why)
			w.Clause = "archive"
			return w
		}
		// What an earlier run has compared is compared again when it may go, not by each run until then.
		if name, waits := m.fails(s.Facts, p, "keep"); waits != "" && why == "" &&
			p.came == Verified {
			w := step(Wait, "%s", waits)
			w.Clause = name
			return w
		}
		return step(Archive, "%s", cmp.Or(why, fmt.Sprintf("the archive is complete below %v",
			s.Archive.Complete)))
	case p.Verified == nil && m.cfg.ID == "":
		return step(Verify, "there is no id column: that it was written below %v is all that shows that its "+
			"rows are published", p.Fence)
	case p.Verified == nil:
		return step(Verify, "its rows are compared with the %s", m.where())
	}
	before := *p
	before.Found = p.Verified // they are counted under the lock
	_, other := m.fails(s.Facts, p, "stream")
	switch name, why := mayGo(&m.cfg, s.Facts, &before); {
	case name == "stream" || other != "" && s.Repairing == "" && !s.elsewhere(&m.cfg, p):
		// at once: after retain.table.keep the messages that a repair made may have been removed
		return step(Verify, "%s", other)
	case why != "":
		w := step(Wait, "%s", why)
		w.Clause = name
		return w
	}
	if p.Accepted > 0 {
		return step(Drop, "%d of its %s %s never published, which is accepted; all others are in "+
			"the %s", p.Accepted, units.Of(p.SealedSum.Rows, "row"), units.Agree(p.Accepted, "was", "were"),
			m.where())
	}
	return step(Drop, "%s", m.allIn(p))
}

// allIn says where the rows of a partition are.
func (m *Manager) allIn(p *Partition) string {
	return fmt.Sprintf("its %s %s%s in the %s", units.Of(p.SealedSum.Rows, "row"), m.but(),
		units.Agree(p.SealedSum.Rows, "is", "are"), m.where())
}

// but says which rows are not compared.
func (m *Manager) but() string {
	if m.cfg.Own == "" {
		return ""
	}
	return "but for those of other shards "
}

// where is what rows are compared with.
func (m *Manager) where() string {
	if m.cfg.Archive {
		return "archive"
	}
	return "stream"
}
