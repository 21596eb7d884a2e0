package overview

import (
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/watch"
)

// Retention returns the parts of what leaves table and stream, those that are in use.
func (r *Report) Retention() (parts []Part) {
	if p := &r.Partitions; p.Managed {
		parts = append(parts, r.partitions(p))
	}
	m := r.Maintenance.Maintained
	if m == nil {
		return parts
	}
	if m.Archive != nil || m.Part("archive") != nil {
		parts = append(parts, r.archive(m))
	}
	if m.Kept != nil || m.Part("stream") != nil {
		parts = append(parts, r.streamKept(m))
	}
	return parts
}

func (r *Report) partitions(t *watch.Partitions) Part {
	p := Part{Name: "Old rows", Level: Good, Word: "go when nobody needs them"}
	if t.Ranges {
		p.Name, p.Word = "Partitions", "enough ahead"
	}
	r.read(&p, &t.Read, seldom, Unknown, "not known")
	if t.Ranges {
		p.add("ahead", units.Count(t.Ahead))
		if !t.Until.IsZero() {
			p.add("until", t.Until.UTC().Format("2006-01-02 15:04:05 UTC"))
		}
	}
	if len(t.Blocked) > 0 {
		b := t.Blocked[0]
		p.add("wait for slot", b.Slot+", "+units.Duration(r.now.Sub(b.Since)))
		if r.now.Sub(b.Since) > watch.LongBlocked && p.Level == Good {
			p.Level, p.Word = Warning, "blocked"
		}
	}
	switch {
	case !t.Ranges || p.Level == Unknown:
	case t.Ahead == 0:
		p.Level, p.Word = Bad, "none ahead"
	case t.Ahead < watch.FewestAhead:
		p.Level, p.Word = Warning, "few ahead"
	}
	r.maintained(&p, "partition")
	return p
}

func (r *Report) archive(m *watch.Maintained) Part {
	p := Part{Name: "Archive", Level: Good, Word: "up to date"}
	r.read(&p, &r.Maintenance.Read, seldom, Unknown, "not known")
	if a := m.Archive; a != nil {
		p.add("up to", units.Count(a.Sequence))
		p.add("waiting", units.Count(a.Messages))
		if !a.Oldest.IsZero() {
			p.add("oldest", units.Duration(r.now.Sub(a.Oldest)))
		}
		if m.ArchiveBehind(r.now) && p.Level == Good {
			p.Level, p.Word = Warning, "behind"
		}
	}
	r.maintained(&p, "archive")
	return p
}

func (r *Report) streamKept(m *watch.Maintained) Part {
	p := Part{Name: "Stream retention", Level: Good, Word: "within its limits"}
	r.read(&p, &r.Maintenance.Read, seldom, Unknown, "not known")
	if k := m.Kept; k != nil && k.Messages > 0 {
		p.add("beyond the limits", units.Count(k.Messages))
		p.add("needed by", k.By)
		if p.Level == Good {
			p.Word = "waits"
		}
	}
	r.maintained(&p, "stream")
	return p
}

// maintained says in a part how outflow maintain fares with it, if that does it.
func (r *Report) maintained(p *Part, name string) {
	m := r.Maintenance.Maintained
	if m == nil || m.Part(name) == nil {
		return
	}
	part := m.Part(name)
	p.add("maintained", units.Duration(r.now.Sub(m.At))+" ago")
	if !part.Failing.IsZero() {
		failing := units.Duration(r.now.Sub(part.Failing))
		if part.Code != "" {
			failing = part.Code + ", " + failing
		}
		p.add("fails", failing)
		if p.Level == Good {
			p.Level, p.Word = Warning, "fails"
		}
	}
	if m.Overdue(r.now) && p.Level != Bad {
		p.Level, p.Word = Warning, "nobody maintains"
	}
}
