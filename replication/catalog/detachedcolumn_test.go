package catalog

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/outbox"
)

// TestAColumnOfAFormerTableIsTheOutboxsOrRefused: which one is renamed is told by what both tables lack, and
// by the order in which the outbox got its columns.
func TestAColumnOfAFormerTableIsTheOutboxsOrRefused(t *testing.T) {
	t.Parallel()
	column := func(name string, n int16, base uint32) Column {
		return Column{Name: name, Number: n, TypeOID: base, BaseOID: base, TypeName: "newtype"}
	}
	const text, number, bytes = pgtype.TextOID, pgtype.Int8OID, pgtype.ByteaOID
	domain := column("b", 2, text)
	domain.TypeOID = 16400
	a, b, c := column("a", 1, text), column("b", 2, text), column("c", 3, text)
	only := func(base uint32) []Column { return []Column{column("b", 1, base)} }
	for name, s := range map[string]struct {
		now, was []Column // of the outbox, and of the partition; asked for is b
		want     string   // SQL, or what the fault says
	}{
		"as it was":     {[]Column{a, b, c}, []Column{a, b, c}, `"b"`},
		"added last":    {[]Column{a, column("b", 4, text)}, []Column{a}, "NULL"},
		"bytes, added":  {[]Column{a, column("b", 4, bytes)}, []Column{a}, "NULL::bytea"},
		"renamed":       {[]Column{a, b, c}, []Column{a, column("was", 2, text), c}, `RENAME COLUMN "was" TO "b"`},
		"last, renamed": {[]Column{a, b}, []Column{a, column("was", 2, text)}, `RENAME COLUMN "was" TO "b"`},
		"one was dropped": {[]Column{a, column("b", 4, text)}, []Column{a, c},
			`If it is a new one: ALTER TABLE "public"."p" ADD COLUMN "b" newtype`},
		"of its type": {[]Column{a, b}, []Column{a, column("x", 2, number), column("y", 3, text)},
			`RENAME COLUMN "y" TO "b"`},
		"renamed, and its name used again": {[]Column{a, b, column("was", 4, text)},
			[]Column{a, column("was", 2, text)}, `RENAME COLUMN ... TO "b"`},
		"a longer number":   {only(number), only(pgtype.Int4OID), `"b"`},
		"a number at will":  {only(pgtype.NumericOID), only(number), `"b"`},
		"a whole number":    {only(number), only(pgtype.NumericOID), "USING"},
		"a float":           {only(pgtype.Float8OID), only(number), "USING"},
		"text at will":      {[]Column{b}, only(pgtype.VarcharOID), `"b"`},
		"a domain":          {[]Column{domain}, []Column{b}, `"b"`},
		"text of a uuid":    {[]Column{b}, only(pgtype.UUIDOID), `CAST("b" AS text)`},
		"text of an inet":   {[]Column{b}, only(pgtype.InetOID), `CASE WHEN "b" IS NOT NULL THEN concat("b") END`},
		"text of bytes":     {[]Column{b}, only(bytes), "USING"},
		"a uuid of text":    {only(pgtype.UUIDOID), []Column{b}, "USING"},
		"another JSON":      {only(pgtype.JSONBOID), only(pgtype.JSONOID), `CAST("b" AS jsonb)`},
		"the former JSON":   {only(pgtype.JSONOID), only(pgtype.JSONBOID), `CAST("b" AS json)`},
		"bytes of the text": {only(bytes), []Column{b}, `TYPE newtype, with the USING`},
	} {
		now := Table{Schema: "public", Name: "outbox", Columns: s.now}
		sql, err := now.ColumnOf(Table{Schema: "public", Name: "p", Columns: s.was}, "b")
		if f := outbox.FaultOf(err); f != nil {
			sql = f.Message + ": " + f.Hint
			if f.Code != CodePartitionColumns || !strings.Contains(sql, s.want) {
				t.Errorf("%s: %s, want %s", name, sql, s.want)
			}
		} else if err != nil || sql != s.want {
			t.Errorf("%s: %s, %v, want %s", name, sql, err, s.want)
		}
	}
}
