package sqlapi

import (
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/outbox"
)

// The limits of a message beside its payload: see docs/format.md.
const (
	protocol     = 128
	maxHeaders   = 16 << 10
	longestValue = 200 // of an id or a key in the Outflow header
	uuidLength   = 36
	maxNested    = 999 // of a payload within a message's content
	maxNames     = 256 // of a message's headers
	keyLength    = 21  // what a key has beside the actor
)

// refuse is an IF that raises an error. value is an SQL expression that may be NULL.
func refuse(condition, field, value, problem, hint string) string {
	return fmt.Sprintf("  IF %s THEN\n    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',\n"+
		"      MESSAGE = format('outflow.enqueue: %s %%s: %%s', coalesce(quote_literal(left(%s, 60)), "+
		"'NULL'), %s), HINT = %s;\n  END IF;\n",
		condition, field, value, problem, literal(hint))
}

// checks are the same as those of package producer, as far as PostgreSQL does not make them itself: a payload
// of JSON is one already.
func (w *writer) checks() string {
	s := refuse("enqueue.doc_id IS NULL OR enqueue.doc_id = ''", "doc_id", "enqueue.doc_id", "'it is empty'",
		"Give each event the document that it belongs to.")
	s += refuse("enqueue.counter < 0", "counter", "enqueue.counter::text", "'it is below 0'",
		"Count from 0 or 1 upwards, or give NULL for the next counter.")
	s += refuse("enqueue.payload IS NULL", "payload", "NULL::text", "'it is missing'",
		"Give the event's content.")
	return s + refuse("jsonb_typeof(enqueue.columns) <> 'object'", "columns", "enqueue.columns::text",
		"'it is no JSON object'",
		"Give an object of column names and values, or NULL.")
}

// size checks what the message may count. idLength is an expression for an id that columns does not name.
func (w *writer) size(idLength string, keyed bool) string {
	payload := "octet_length(enqueue.payload::text)"
	if w.payload == "bytea" {
		payload = "octet_length(enqueue.payload)"
	}
	key := "0"
	if keyed {
		key = fmt.Sprintf("least(%d, coalesce(3 * octet_length(enqueue.columns->>%s), 3 * "+
			"octet_length(coalesce(enqueue.actor_id, '')) + %d))",
			longestValue, literal(w.keyName()), keyLength)
	}
	mapped := "0"
	for _, h := range w.cfg.Headers {
		mapped += fmt.Sprintf(" + coalesce(octet_length(%s) + %d, 0)", w.known(h.Column), len(h.Name)+4)
	}
	id := fmt.Sprintf("coalesce(least(%d, 3 * octet_length(enqueue.columns->>%s)), %s)", longestValue,
		literal(w.idName()), idLength)
	over := fmt.Sprintf("format('with its headers it takes up to %%s bytes, more than sink.max_payload, "+
		"%d', size)", w.cfg.Sink.MaxPayload)
	return "  mapped := " + mapped + ";\n" +
		fmt.Sprintf("  size := %s::bigint + %d + %s + %s + mapped;\n", payload, outbox.MaxHeaderLine(0, 0)+
			protocol, id, key) +
		refuse(fmt.Sprintf("mapped > %d", maxHeaders), "columns", "enqueue.columns::text",
			fmt.Sprintf("format('the mapped headers take %%s bytes, more than %d', mapped)", maxHeaders),
			"Map fewer or shorter columns to headers.") +
		refuse(fmt.Sprintf("size > %d", w.cfg.Sink.MaxPayload), "payload", "enqueue.payload::text", over,
			"Make it smaller, or raise sink.max_payload and run outflow init --sql-api again.")
}

// known is what a mapped header has, as far as the call says it.
func (w *writer) known(column string) string {
	switch column {
	case "doc_id", w.m.Doc:
		return "enqueue.doc_id"
	case "actor_id", w.m.Actor:
		return "enqueue.actor_id"
	case "counter", w.m.Counter:
		return "enqueue.counter::text"
	}
	return "enqueue.columns->>" + literal(column)
}

func (w *writer) keyName() string {
	if w.m.Key != "" {
		return w.m.Key
	}
	return "seq_key"
}

func (w *writer) idName() string {
	if w.l.ID != "" {
		return w.l.ID
	}
	return "id"
}

// idLength is how long an id that PostgreSQL makes is at most.
func (w *writer) idLength() int {
	c, ok := w.l.Table.Column(w.l.ID)
	switch {
	case !ok:
		return 0
	case c.TypeOID == pgtype.UUIDOID:
		return uuidLength
	case c.TypeOID == pgtype.Int8OID || c.TypeOID == pgtype.Int4OID || c.TypeOID == pgtype.Int2OID:
		return 20
	}
	return longestValue
}

// take takes the next counter into n, where the call gives none: see package producer. The row stays locked
// until the transaction ends.
func (w *writer) take(doc, actor string) string {
	return "  IF n IS NULL THEN\n" +
		"    INSERT INTO " + w.api.CounterTable + " AS k (doc_id, actor_id, counter) VALUES (" + doc +
		"::text, " + actor + ", 1)\n" +
		"    ON CONFLICT (doc_id, actor_id) DO UPDATE SET counter = k.counter + 1 RETURNING k.counter INTO " +
		"n;\n  END IF;\n"
}

// contentChecks are for what the content of a message can't hold. A text that is nested so deep has two
// brackets for each level.
func (w *writer) contentChecks() string {
	return refuse(fmt.Sprintf("octet_length(enqueue.payload::text) >= %d AND enqueue.payload @? '$.**{%d}'",
		2*maxNested, maxNested),
		"payload", "enqueue.payload::text", literal(fmt.Sprintf("it is nested deeper than %d", maxNested)),
		"Make it flatter.") +
		refuse(fmt.Sprintf("(SELECT count(*) FROM jsonb_object_keys(enqueue.columns)) > %d", maxNames),
			"columns", "enqueue.columns::text",
			literal(fmt.Sprintf("it has more than %d names", maxNames)), "Give fewer.")
}

// message writes the function that emits a logical message.
func (w *writer) message() {
	w.create("Enqueues an event for Outflow, in the transaction of the caller, as a logical message: there "+
		"is no table. "+
		"counter NULL: the next one of document and actor. columns: the event's headers, and id and "+
		"seq_key if it has them. "+
		"Returns the event's id.",
		"DECLARE\n  n bigint := enqueue.counter;\n  id text := coalesce(enqueue.columns->>'id', "+
			"gen_random_uuid()::text);\n"+
			"  mapped bigint;\n  size bigint;\n  content text;\nBEGIN\n"+
			w.checks()+w.contentChecks()+w.size(fmt.Sprint(uuidLength), true)+
			w.take("enqueue.doc_id", "coalesce(enqueue.actor_id, '')")+
			"  content := format('{\"doc_id\":%s,\"actor_id\":%s,\"counter\":%s,\"id\":%s', "+
			"to_json(enqueue.doc_id),\n"+
			"      to_json(coalesce(enqueue.actor_id, '')), n, to_json(id))\n"+
			"    || coalesce(',\"seq_key\":' || to_json(enqueue.columns->>'seq_key'), '')\n"+
			"    || coalesce(',\"headers\":' || (SELECT json_object_agg(h.key, h.value) FROM "+
			"jsonb_each_text(enqueue.columns) h\n"+
			"      WHERE h.value IS NOT NULL AND h.key NOT IN ('id', 'seq_key')), '')\n"+
			"    || ',\"payload\":' || enqueue.payload::text || '}';\n"+
			"  PERFORM pg_logical_emit_message(true, "+literal(outbox.EventPrefix)+
			", convert_to(content, 'UTF8'));\n"+
			"  RETURN id;\nEND ")
}

// insert writes the function that inserts a row. Its variables have the columns' own types, so that a text is
// read as the column reads it, and what is too long is refused rather than cut.
func (w *writer) insert() {
	var declare, names, values []string
	add := func(column, variable, value string) {
		declare = append(declare, fmt.Sprintf("  %s %s.%s%%TYPE := %s;\n", variable, w.table, quote(column),
			value))
		names, values = append(names, quote(column)), append(values, variable)
	}
	add(w.m.Doc, "d", "enqueue.doc_id")
	checks, none := w.checks(), literal("table "+w.m.Table+" has no column for it")
	actor, doc := "''", "d"
	if w.m.Actor != "" {
		add(w.m.Actor, "a", "coalesce(enqueue.actor_id, '')")
		actor = "a::text"
	} else {
		checks += refuse("enqueue.actor_id <> ''", "actor_id", "enqueue.actor_id", none, "Give NULL.")
	}
	take := ""
	if w.m.Counter != "" {
		add(w.m.Counter, "c", "NULL")
		take = w.take(doc, actor) + "  c := n;\n"
	} else {
		checks += refuse("enqueue.counter IS NOT NULL", "counter", "enqueue.counter::text", none,
			"Give NULL.")
	}
	add(w.m.Payload, "p", "enqueue.payload")
	if len(w.api.Needs) > 0 {
		var list []string
		for _, name := range w.api.Needs {
			list = append(list, literal(name))
		}
		needs := "ARRAY[" + strings.Join(list, ", ") + "]"
		checks += refuse("enqueue.columns IS NULL OR NOT enqueue.columns ?& "+needs, "columns",
			"enqueue.columns::text",
			literal("table "+w.m.Table+" has columns that must be given: "+strings.Join(w.api.Needs, ", ")),
			"Name them in columns.")
	}
	id := "NULL::text"
	if w.l.ID != "" {
		id = quote(w.l.ID) + "::text"
	}
	w.create(w.comment(),
		"DECLARE\n"+strings.Join(declare, "")+
			"  n bigint := enqueue.counter;\n  mapped bigint;\n  size bigint;\n  id text;\nBEGIN\n"+
			checks+w.size(fmt.Sprint(w.idLength()), w.m.Keyed())+take+w.rows(names, values, id)+
			"  RETURN id;\nEND ")
}

// rows writes the insert: one that is planned once for a call without further columns, another for one with
// some.
func (w *writer) rows(names, values []string, id string) string {
	key := ""
	if w.makesKey {
		key = "a::text || ':' || lpad(c::text, 20, '0')"
	}
	list, given := strings.Join(names, ", "), strings.Join(values, ", ")
	plainNames, plainValues := list, given
	if key != "" {
		plainNames, plainValues = list+", "+quote(w.key), given+", "+key
	}
	var numbered []string
	for i := range values {
		numbered = append(numbered, fmt.Sprintf("$%d", i+1))
	}
	record := fmt.Sprintf("$%d", len(values)+1)
	extra := "enqueue.columns"
	if key != "" {
		extra = "jsonb_build_object(" + literal(w.key) + ", " + key + ") || enqueue.columns"
	}
	return "  IF coalesce(enqueue.columns, '{}') = '{}' THEN\n" +
		"    INSERT INTO " + w.table + " (" + plainNames + ")\n    VALUES (" + plainValues + ") RETURNING " +
		id + " INTO id;\n" +
		"    RETURN id;\n  END IF;\n" +
		"  EXECUTE (SELECT " + strings.TrimSpace(literal("INSERT INTO "+w.table+" ("+list+", ")) + "\n" +
		"      || string_agg(quote_ident(k), ', ' ORDER BY k) || " +
		literal(") SELECT "+strings.Join(numbered, ", ")+", ") + "\n" +
		"      || string_agg('r.' || quote_ident(k), ', ' ORDER BY k) || " +
		literal(" FROM jsonb_populate_record(NULL::"+w.table+", "+record+") r RETURNING "+id) + "\n" +
		"    FROM jsonb_object_keys(" + extra + ") k)\n" +
		"    INTO id USING " + given + ", " + extra + ";\n"
}

func (w *writer) comment() string {
	s := "Enqueues an event for Outflow: inserts it into " + w.m.Table +
		", in the transaction of the caller. "
	switch {
	case w.m.Counter == "":
		s += "counter: NULL, the table has none. "
	default:
		s += "counter NULL: the next one of document and actor. "
	}
	if w.m.Actor == "" {
		s += "actor_id: NULL, the table has none. "
	}
	s += "columns: further columns and their values"
	if len(w.api.Needs) > 0 {
		s += ", at least " + strings.Join(w.api.Needs, ", ")
	}
	s += ". "
	if w.l.ID != "" {
		s += "Returns the event's id."
	}
	return strings.TrimSpace(s)
}
