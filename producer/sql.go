package producer

import (
	"fmt"
	"strings"
)

// source is the call's events as rows: one array for each column, read in step, numbered.
func source(n int) string {
	var arrays, names strings.Builder
	for i := range n {
		if i > 0 {
			arrays.WriteString(", ")
		}
		fmt.Fprintf(&arrays, "pg_catalog.unnest($%d::pg_catalog.text::pg_catalog.text[])", i+1)
		fmt.Fprintf(&names, "c%d, ", i)
	}
	return "ROWS FROM (" + arrays.String() + ") WITH ORDINALITY AS t(" + names.String() + "n)"
}

// sql is the statement. PostgreSQL inserts the rows in the order in which the SELECT gives them, one by one,
// and returns each as it is inserted: so the events' order is that of the call in the WAL, in the ids, and in
// what a sequence or a default gives them.
func (b *rowBuilder) sql() string {
	if b.o.cfg.NextCounter {
		return b.countingSQL()
	}
	var names, values []string
	cast := map[*column]string{}
	for i, c := range b.columns {
		cast[c] = fmt.Sprintf("t.c%d::%s", i, c.typ)
		names, values = append(names, quote(c.name)), append(values, cast[c])
	}
	if b.makesKey() {
		names, values = append(names, quote(b.l.key.name)), append(values,
			keySQL(cast[b.l.actor], cast[b.l.counter]))
	}
	return "INSERT INTO " + b.o.table.quoted() + " (" + strings.Join(names, ", ") + ")\nSELECT " +
		strings.Join(values, ", ") +
		"\nFROM " + source(len(b.columns)) + " ORDER BY t.n\nRETURNING " + b.returning()
}

// keySQL is the one rule of the key, as the generated column of the default table has it.
func keySQL(actor, counter string) string {
	return fmt.Sprintf("%s::pg_catalog.text || ':' || pg_catalog.lpad(%s::pg_catalog.text, 20, '0')", actor,
		counter)
}

func (b *rowBuilder) returning() string {
	id, counter := "''::pg_catalog.text", "''::pg_catalog.text"
	if b.l.id != nil {
		id = quote(b.l.id.name) + "::pg_catalog.text"
	}
	if b.o.cfg.NextCounter {
		counter = quote(b.l.counter.name) + "::pg_catalog.text"
	}
	return id + ", " + counter
}

// countingSQL takes the counters in the same statement. See [takeSQL].
func (b *rowBuilder) countingSQL() string {
	var typed, names, values []string
	at := map[*column]string{}
	for i, c := range b.columns {
		typed = append(typed, fmt.Sprintf("t.c%d::%s AS c%d", i, c.typ, i))
		at[c] = fmt.Sprintf("c%d", i)
		names, values = append(names, quote(c.name)), append(values, "r."+at[c])
	}
	counter := "r.counter::" + b.l.counter.typ
	names, values = append(names, quote(b.l.counter.name)), append(values, counter)
	if b.makesKey() {
		names, values = append(names, quote(b.l.key.name)), append(values,
			keySQL("r."+at[b.l.actor], counter))
	}
	actor := "''::pg_catalog.text"
	if b.l.actor != nil {
		actor = "e." + at[b.l.actor] + "::pg_catalog.text"
	}
	return "WITH e AS (SELECT t.n, " + strings.Join(typed, ", ") + " FROM " + source(len(b.columns)) +
		"),\n" +
		takeSQL(b.o.counter, "e."+at[b.l.doc]+"::pg_catalog.text", actor) +
		"INSERT INTO " + b.o.table.quoted() + " (" + strings.Join(names, ", ") + ")\nSELECT " +
		strings.Join(values, ", ") +
		"\nFROM r ORDER BY r.n\nRETURNING " + b.returning()
}

// takeSQL takes counters for the rows of e and gives them, beside their counters, as r.
//
// The row of a document and actor stays locked until the transaction ends. Who comes second waits, and then
// counts on from what was committed: so there is no gap and no repeat, and counters ascend in the order of
// the commits. A transaction that is rolled back gives its counters back, because the row is as it was. A
// call locks its rows in ascending order, so two calls never wait for each other; two transactions of several
// calls may, and then PostgreSQL ends one of them (40P01).
func takeSQL(counter name, doc, actor string) string {
	return "taken AS (\n  INSERT INTO " + counter.quoted() + " AS k (doc_id, actor_id, counter)\n" +
		"  SELECT " + doc + ", " + actor + ", pg_catalog.count(*) FROM e GROUP BY " + doc + ", " + actor +
		" ORDER BY " + doc + ` COLLATE "C", ` + actor + " COLLATE \"C\"\n" +
		"  ON CONFLICT (doc_id, actor_id) DO UPDATE SET counter = k.counter + excluded.counter\n" +
		"  RETURNING k.doc_id, k.actor_id, k.counter),\n" +
		"r AS (\n  SELECT e.*, k.counter - pg_catalog.count(*) OVER (PARTITION BY k.doc_id, k.actor_id)\n" +
		"      + pg_catalog.row_number() OVER (PARTITION BY k.doc_id, k.actor_id ORDER BY e.n) AS counter\n" +
		"  FROM e JOIN taken k ON k.doc_id = " + doc + " AND k.actor_id = " + actor + ")\n"
}
