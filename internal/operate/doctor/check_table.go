package doctor

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/finding"
)

const (
	manyRows = 10_000_000
	mostDead = 20 // percent
	someDead = 100_000
)

var tableChecks = []check{
	{name: "table.usable", needs: []source{srcTable}, beforeInit: true, about: (*Facts).hasTable,
		run: func(f *Facts, r *reporter) {
			if err := f.Layout.CheckKey(); err != nil {
				r.fault(err)
			}
			r.ok("%s, %d columns are read", f.Layout.Mapping.Table, len(f.Layout.Columns()))
		}},
	{name: "table.nulls", needs: []source{srcTable}, beforeInit: true, about: (*Facts).hasTable,
		run: func(f *Facts, r *reporter) {
			m := f.Layout.Mapping
			for _, column := range []struct{ setting, name string }{
				{"columns.doc_id", m.Doc}, {"columns.seq_key", m.Key}, {"columns.payload", m.Payload},
			} {
				if c, ok := f.Layout.Table.Column(column.name); ok && !c.NotNull {
					r.find("column_nullable",
						"column %q of table %s (%s) may be NULL, and a row with NULL there "+
							"can't be published", c.Name, m.Table, column.setting).Command =
						fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s SET NOT NULL", f.Layout.Table.Quoted(),
							quote(c.Name))
				}
			}
		}},
	{name: "table.growth", needs: []source{srcTableStats}, about: (*Facts).hasTable,
		run: func(f *Facts, r *reporter) {
			t := f.Table
			switch {
			case t.Rows > manyRows:
				r.find("table_grows", "table %s has about %d rows", f.Layout.Mapping.Table, t.Rows)
			case t.Dead > someDead && t.Dead*100 > (t.Rows+t.Dead)*mostDead:
				r.find("table_grows", "table %s has about %d dead rows beside %d live ones: vacuum does "+
					"not keep up",
					f.Layout.Mapping.Table, t.Dead, t.Rows)
			}
			r.ok("about %s", units.Of(t.Rows, "row"))
		}},
	{name: "table.partitions", needs: []source{srcPartitions},
		about: func(f *Facts) bool {
			return f.hasTable() && (f.Partitions.Ranges || len(f.Partitions.Blocked) > 0)
		},
		run: func(f *Facts, r *reporter) {
			p := f.Partitions
			// who makes partitions in another way may make each when its time has come
			if p.Ranges && (p.Ahead == 0 || p.Managed && p.Ahead < watch.FewestAhead) {
				then := "and takes no row of %s or later"
				if p.Default {
					then = "and rows of %s or later go to its default partition"
				}
				r.find("partitions_ahead", "table %s has %s ahead of now, "+then,
					f.Layout.Mapping.Table, units.Of(p.Ahead, "partition"),
					p.Until.UTC().Format("2006-01-02 15:04:05 UTC"))
			}
			if !p.Hole.IsZero() {
				r.findAs(finding.Warning, "partition_default", "rows of now, until %s, go to the default "+
					"partition of table %s, and stay there", p.Hole.UTC().Format("2006-01-02 15:04:05 UTC"),
					f.Layout.Mapping.Table)
			}
			blocked := map[string]bool{} // slots
			for _, b := range p.Blocked {
				if f.Now.Sub(b.Since) > watch.LongBlocked && !blocked[b.Slot] {
					blocked[b.Slot] = true
					held := r.find("partition_blocked", "%s can't go since %s: slot %s has not confirmed %v",
						b.Name, b.Since.UTC().Format("2006-01-02 15:04:05 UTC"), b.Slot, b.Fence)
					if b.Slot == f.Config.Slot { // not one that somebody may drop
						held.Hint = "The slot is Outflow's own: publishing is behind. Do what " +
							"`outflow status` says."
					}
				}
			}
			r.ok("%d ahead", p.Ahead)
		}},
	{name: "table.counters", deep: true, needs: []source{srcRows}, about: (*Facts).hasCounters,
		run: func(f *Facts, r *reporter) {
			if n := len(f.Rows.Gaps); n > 0 {
				g := f.Rows.Gaps[0]
				as := finding.Note // nothing depends on counters without gaps
				if f.Config.Reorder.Settings().ByGap() {
					as = finding.Warning
				}
				r.findAs(as, "counter_gaps",
					"%s counters are in no row of table %s: document %q, actor %q goes "+
						"from %.0f to %.0f, for example", number(n, 100), f.Layout.Mapping.Table, g.Doc,
					g.Actor,
					g.After,
					g.At)
			}
			r.ok("no gap in the newest %s", units.Of(f.Rows.Looked, "row"))
		}},
	{name: "table.key_order", deep: true, needs: []source{srcRows},
		about: func(f *Facts) bool { return f.hasCounters() && f.Layout.Mapping.Key != "" },
		run: func(f *Facts, r *reporter) {
			if n := len(f.Rows.Disorder); n > 0 {
				d := f.Rows.Disorder[0]
				r.find("key_order", "%s rows of table %s have a later counter than another one of their "+
					"sequence "+
					"and no later key: document %q, actor %q, counters %.0f and %.0f, for example",
					number(n, 100),
					f.Layout.Mapping.Table, d.Doc, d.Actor, d.After, d.At)
			}
			r.ok("keys ascend with counters in the newest %s", units.Of(f.Rows.Looked, "row"))
		}},
	{name: "table.payloads", deep: true, needs: []source{srcRows},
		about: func(f *Facts) bool { return f.hasTable() && f.Rows.Looked > 0 },
		run: func(f *Facts, r *reporter) {
			largest, limit := f.Rows.Largest, int64(f.Config.Sink.MaxPayload)
			if largest > limit {
				r.findAs(finding.Error, "payload_large",
					"the largest payload of the newest %s of table %s has "+
						"%s, sink.max_payload is %s", units.Of(f.Rows.Looked, "row"),
					f.Layout.Mapping.Table, size(largest), size(limit))
			} else if largest*10 > limit*8 {
				r.find("payload_large", "the largest payload of the newest %s of table %s has %s, "+
					"sink.max_payload is %s", units.Of(f.Rows.Looked, "row"), f.Layout.Mapping.Table,
					size(largest), size(limit))
			}
			r.ok("%s at most in the newest %s", size(largest), units.Of(f.Rows.Looked, "row"))
		}},
	{name: "publication.complete", needs: []source{srcPublication},
		about: func(f *Facts) bool { return f.Readings.Slot.Exists || f.Readings.Record != nil },
		run: func(f *Facts, r *reporter) {
			if hidden := f.Publication.Identity.Hidden; hidden != nil {
				r.fault(hidden)
			}
			if rec := f.Readings.Record; f.known(srcRecord, srcReplication) && rec != nil && !rec.Creating {
				// where everything could be read slot.start has said it
				if err := f.checkpoint().CheckPublication(rec.Publication, f.Publication.Identity,
					f.Identity.WALEnd); err != nil {
					r.fault(err)
				}
			}
			r.ok("%s", f.Config.Publication)
		}},
	{name: "publication.all_tables", needs: []source{srcPublication},
		about: func(f *Facts) bool { return f.Readings.Slot.Exists || f.Readings.Record != nil },
		run: func(f *Facts, r *reporter) {
			if f.Publication.AllTables {
				r.find("publication_all_tables",
					"publication %s publishes all tables: the server sends the changes "+
						"of each, and outflow throws them away", quote(f.Config.Publication))
			}
		}},
}

// hasCounters reports whether rows show the counters of sequences.
func (f *Facts) hasCounters() bool {
	return f.hasTable() && f.Layout.Mapping.Actor != "" && f.Layout.Mapping.Counter != "" &&
		!f.Layout.Table.Partitioned
}
