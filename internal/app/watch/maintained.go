package watch

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/outbox"
)

// Partitions is how far the outbox's partitions reach, and what keeps its rows. It is read by SQL.
type Partitions struct {
	Read
	Managed bool      `json:"managed"`           // by Outflow, which has made its table of states
	Ranges  bool      `json:"ranges"`            // of time, each of which ends
	Ahead   int       `json:"ahead"`             // so many are to come, up to the first range without one
	Until   time.Time `json:"until,omitzero"`    // where the last of these ends
	Blocked []Blocked `json:"blocked,omitempty"` // one for each slot, longest first, at most [MaxBlocked]
}

// MaxBlocked is how many slots are named at most.
const MaxBlocked = 10

// Blocked says since when rows wait for a slot, the ones that have waited for longest.
type Blocked struct {
	Slot  string    `json:"slot"`
	Name  string    `json:"name"` // the partition; of a plain table its fence
	Since time.Time `json:"since"`
}

// Maintained is what outflow maintain says of itself, and has left in the bucket of the checkpoint record.
// The JSON names are stable.
type Maintained struct {
	At time.Time `json:"at"` // when that was, by the broker's clock where it was read from there
	// maintain.every; of --once the time since the last one; 0: not known
	Interval time.Duration  `json:"interval"`
	Once     bool           `json:"once,omitempty"`
	Host     string         `json:"host,omitempty"`
	PID      int            `json:"pid"`
	Version  string         `json:"version,omitempty"`
	Parts    []MaintainPart `json:"parts"`

	Archive *Archived `json:"archive,omitempty"` // nil: there is none, or nothing is known of it
	Kept    *Kept     `json:"kept,omitempty"`    // nil: retain.stream sets no limit, or nothing is known
}

// MaintainPart is how a part of outflow maintain fares.
type MaintainPart struct {
	Name      string    `json:"name"`               // archive, partition or stream
	Succeeded time.Time `json:"succeeded,omitzero"` // when it last did
	Failing   time.Time `json:"failing,omitzero"`   // since when it does not
	Code      string    `json:"code,omitempty"`     // of the fault; "": it is none of the catalogue
	Message   string    `json:"message,omitempty"`
}

// Archived is how far the archive is.
type Archived struct {
	Sequence uint64 `json:"sequence"` // everything up to it is archived
	Messages uint64 `json:"messages"` // that are confirmed and not archived
	// when the oldest of them was stored; zero: there is none
	Oldest     time.Time     `json:"oldest,omitzero"`
	SegmentAge time.Duration `json:"segment_age"` // archive.segment_age: so old the oldest one gets by itself
}

// Kept is what stays in the stream beyond retain.stream.
type Kept struct {
	Messages uint64 `json:"messages"`     // that are beyond age, size or number, and stay
	By       string `json:"by,omitempty"` // the clause, or consumer, that needs the oldest of them
	Why      string `json:"why,omitempty"`
}

// Maintenance is what was read of outflow maintain.
type Maintenance struct {
	Read
	*Maintained // nil: none has run
}

const maxText = 1000

// What has to be exceeded until it is said; the alerts have the same figures.
const (
	overdue      = 15 * time.Minute // beyond three intervals
	overdueOnce  = 24 * time.Hour   // where the interval is not known
	behindBy     = 30 * time.Minute // beyond archive.segment_age and an interval
	LongBlocked  = time.Hour        // that rows wait for a slot
	LongFailing  = 15 * time.Minute // that a part of outflow maintain fails
	FewestAhead  = 2                // partitions
	intervalsOff = 3
)

// Overdue reports whether outflow maintain should have run again.
func (m *Maintained) Overdue(now time.Time) bool {
	if m.Interval == 0 {
		return now.Sub(m.At) > overdueOnce
	}
	return now.Sub(m.At) > overdue+intervalsOff*m.Interval
}

// Part is the part of that name; nil: there is none.
func (m *Maintained) Part(name string) *MaintainPart {
	for i := range m.Parts {
		if m.Parts[i].Name == name {
			return &m.Parts[i]
		}
	}
	return nil
}

// ArchiveBehind reports whether messages wait for longer than archive.segment_age explains: at one run the
// oldest may be a little younger, and the next one is to come.
func (m *Maintained) ArchiveBehind(now time.Time) bool {
	a := m.Archive
	return a != nil && !a.Oldest.IsZero() && now.Sub(a.Oldest) > a.SegmentAge+m.Interval+behindBy
}

// Fail notes that a part failed, since the first of several times.
func (p *MaintainPart) Fail(err error, now time.Time) {
	if p.Failing.IsZero() {
		p.Failing = now
	}
	p.Code, p.Message = "", err.Error()
	if f := outbox.FaultOf(err); f != nil {
		p.Code = f.Code
	}
	if len(p.Message) > maxText {
		p.Message = strings.ToValidUTF8(p.Message[:maxText], "") + "…"
	}
}

// Succeed notes that a part did what there was to do.
func (p *MaintainPart) Succeed(now time.Time) {
	*p = MaintainPart{Name: p.Name, Succeeded: now}
}

// ReadMaintained reads what outflow maintain has left; nil: nothing.
func ReadMaintained(ctx context.Context, store *checkpoint.Store) (*Maintained, error) {
	doc, stored, err := store.Maintained(ctx)
	if doc == nil || err != nil {
		return nil, err
	}
	m := new(Maintained)
	if err := json.Unmarshal(doc, m); err != nil {
		return nil, errors.New("what outflow maintain has left in the record's bucket is not what it writes")
	}
	m.At = stored
	return m, nil
}

// maintained reads what outflow maintain has left. Without it everything else is still true, so an error is
// only said beside it.
func (n *natsSide) maintained(ctx context.Context) {
	m, err := ReadMaintained(ctx, wiring.Store(n.w.cfg.Config, n.conn))
	now := time.Now()
	n.w.update(func(r *Reading) {
		if err != nil {
			r.Maintenance.failed(err, now)
			return
		}
		r.Maintenance.Maintained = m
		r.Maintenance.fresh(now)
	})
}
