package initialize

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/catalog"
)

// maxCounted is up to how many rows are counted.
const maxCounted = 100_000

// notes points out what is possible but may not be intended, and which ordering mode fits.
func (s *setup) notes(ctx context.Context) error {
	m := s.layout.Mapping
	for _, column := range []struct{ setting, name string }{
		{"columns.doc_id", m.Doc}, {"columns.seq_key", m.Key}, {"columns.payload", m.Payload},
	} {
		if c, ok := s.layout.Table.Column(column.name); ok && !c.NotNull {
			s.note("note: column %q of table %s (%s) may be NULL: a row with NULL there can't be published "+
				"(sink.on_poison)", c.Name, s.cfg.Table, column.setting)
		}
	}
	if s.cfg.Reorder.Mode == config.ModeGap {
		for _, note := range counterNotes(s.layout.Table, m) {
			s.note("note: %s", note)
		}
	} else if !m.Keyed() { // gap mode needs no order key
		s.note("note: table %s has no order key, neither columns.seq_key nor both columns.actor_id and "+
			"columns.counter: "+
			"events are published in the order in which their transactions commit", s.cfg.Table)
	}
	return s.noteOrdering(ctx)
}

// counterNotes points out what of the counter's column gap mode has no good use for.
func counterNotes(t catalog.Table, m relay.Mapping) (notes []string) {
	c, ok := t.Column(m.Counter)
	if !ok {
		return nil
	}
	switch c.TypeOID {
	case pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID:
	default:
		notes = append(notes, fmt.Sprintf("column %q of table %s (columns.counter) is of type %s: in gap "+
			"mode a row whose counter is not an integer of at most 64 bits can't be published "+
			"(sink.on_poison)",
			c.Name, m.Table, c.TypeName))
	}
	if !c.NotNull {
		notes = append(notes, fmt.Sprintf("column %q of table %s (columns.counter) may be NULL: in gap mode "+
			"a row with NULL there waits for nothing, and nothing waits for it", c.Name, m.Table))
	}
	return notes
}

// noteOlderRows says how many rows the new slot will not bring, and how to publish them.
func (s *setup) noteOlderRows(ctx context.Context) error {
	if !s.rows {
		return nil
	}
	n, ok, err := s.pg.CountRows(ctx, s.layout.Table, maxCounted+1)
	if err != nil || ok && n == 0 {
		return err
	}
	has := fmt.Sprintf("table %s has %s", s.cfg.Table, units.Of(n, "row"))
	switch {
	case !ok:
		has = fmt.Sprintf("the role may not read table %s, so its rows, if it has some, were not counted",
			s.cfg.Table)
	case n > maxCounted:
		has = fmt.Sprintf("table %s has more than %d rows", s.cfg.Table, maxCounted)
	}
	s.note("note: %s. What is older than the slot will not be published. To have it first in the stream, "+
		"run `outflow init --snapshot` instead; afterwards `outflow repair --check` finds it, and `outflow "+
		"repair --accept rows_missing` publishes it behind what is there", has)
	return nil
}
