package initialize

import (
	"testing"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/catalog"
)

func TestInGapModeTheCounterShouldBeAnIntegerAndNotNull(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		typ     uint32
		notNull bool
		notes   int
	}{
		{pgtype.Int2OID, true, 0},
		{pgtype.Int4OID, true, 0},
		{pgtype.Int8OID, true, 0},
		{pgtype.Int8OID, false, 1},
		{pgtype.NumericOID, true, 1},
		{pgtype.TextOID, false, 2},
	} {
		table := catalog.Table{Columns: []catalog.Column{{Name: "n", TypeOID: c.typ, NotNull: c.notNull}}}
		if notes := counterNotes(table, relay.Mapping{Counter: "n"}); len(notes) != c.notes {
			t.Errorf("type %d, not null %v: %q", c.typ, c.notNull, notes)
		}
	}
}
