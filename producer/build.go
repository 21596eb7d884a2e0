package producer

import (
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
)

// maxCall is how many bytes the parameters of one call may have together. PostgreSQL holds a value, and what
// it is made from, within 1 GB each.
const maxCall = 256 << 20

// statement is a call's one statement.
type statement struct {
	sql  string
	args []any
	ids  []string // those known already, else nil
	// whether it returns each event's counter beside its id
	returnsCounter bool
}

// rowBuilder collects a call's events column by column.
type rowBuilder struct {
	o       *Outbox
	l       *layout
	columns []*column // those that get a value
	lists   []*list   // their values
	named   []string  // the further columns among them, sorted

	counters map[sequence]int // those of this call; the value is the event's index
	bytes    int
}

// sequence is what no two events of a call may share.
type sequence struct {
	doc, actor string
	counter    int64
}

// build checks the events and makes the statement that inserts them.
func (o *Outbox) build(l *layout, events []Event) (statement, error) {
	b := &rowBuilder{o: o, l: l}
	if err := b.choose(&events[0]); err != nil {
		return statement{}, err
	}
	if len(events) > 1 && l.actor != nil && l.counter != nil && !o.cfg.NextCounter {
		b.counters = make(map[sequence]int, len(events))
	}
	for i := range events {
		if bad := b.add(i, &events[i]); bad != nil {
			bad.Index = i
			return statement{}, bad
		}
	}
	s := statement{sql: b.sql(), returnsCounter: o.cfg.NextCounter}
	for _, list := range b.lists {
		s.args = append(s.args, list.param())
	}
	return s, nil
}

// choose says which columns the statement writes: those that the first event has.
func (b *rowBuilder) choose(first *Event) error {
	l := b.l
	take := func(c *column) { b.columns, b.lists = append(b.columns, c), append(b.lists, &list{}) }
	take(l.doc)
	if l.actor != nil {
		take(l.actor)
	}
	if l.counter != nil && !b.o.cfg.NextCounter {
		take(l.counter)
	}
	if b.writesKey(first) {
		take(l.key)
	}
	take(l.payload)
	if first.ID != "" && l.id != nil {
		take(l.id)
	}
	b.named = slices.Sorted(maps.Keys(first.Columns))
	for _, name := range b.named {
		c := l.columns[name]
		if bad := b.further(name, c); bad != nil {
			return bad
		}
		take(c)
	}
	return nil
}

// further refuses a name in Columns that is no further column.
func (b *rowBuilder) further(name string, c *column) *Invalid {
	bad := func(problem, hint string) *Invalid {
		return &Invalid{Field: fmt.Sprintf("Columns[%q]", name), Value: "(column)", Problem: problem,
			Hint: hint, table: true}
	}
	if c == nil {
		return bad("table "+b.o.cfg.Table+" has no such column",
			"Take it out, or add the column to the table")
	}
	if field, ok := b.l.role(c); ok {
		return bad("the column has a field of its own", "Set "+field)
	}
	if c.generated || c.identity {
		return bad("PostgreSQL makes its values itself", "Take it out")
	}
	return nil
}

// writesKey reports whether the key column gets the event's Key: it is a plain one, and given.
func (b *rowBuilder) writesKey(e *Event) bool {
	return b.l.key != nil && !b.l.key.generated && e.Key != ""
}

// makesKey reports whether the statement makes the key from actor and counter.
func (b *rowBuilder) makesKey() bool {
	return b.l.key != nil && !b.l.key.generated && b.l.computesKey() && !slices.Contains(b.columns, b.l.key)
}

// add checks an event and appends its values.
func (b *rowBuilder) add(i int, e *Event) *Invalid {
	if bad := b.roles(e); bad != nil {
		return bad
	}
	if b.counters != nil {
		s := sequence{e.Document, e.Actor, e.Counter}
		if j, twice := b.counters[s]; twice {
			return takenInCall(e, j)
		}
		b.counters[s] = i
	}
	size := 0
	for k, c := range b.columns {
		before := len(b.lists[k].b)
		if bad := b.value(c, b.lists[k], e, &size); bad != nil {
			return bad
		}
		b.bytes += len(b.lists[k].b) - before
	}
	if b.bytes > maxCall {
		return callTooLarge(e)
	}
	return b.o.judgeSize(e, size, b.idSize(e), b.keySize(e), b.l.lookup)
}

func takenInCall(e *Event, before int) *Invalid {
	return &Invalid{
		Field: "Counter", Value: strconv.FormatInt(e.Counter, 10), taken: true,
		Problem: fmt.Sprintf("event %d of this call has it already, of document %s and actor %s", before,
			shown(e.Document), shown(e.Actor)),
		Hint: "Give each event of an actor a counter of its own, or let NextCounter count",
	}
}

func callTooLarge(e *Event) *Invalid {
	return &Invalid{
		Field: "Payload", Value: shown(string(e.Payload)),
		Problem: fmt.Sprintf("with it the call is over %d MiB", maxCall>>20),
		Hint:    "Enqueue the events in several calls of the same transaction",
	}
}

func invalid(field, value, problem, hint string) *Invalid {
	return &Invalid{Field: field, Value: value, Problem: problem, Hint: hint}
}

// judgeAlways checks what every event must have, whatever it goes into.
func (o *Outbox) judgeAlways(e *Event) *Invalid {
	counter := strconv.FormatInt(e.Counter, 10)
	switch {
	case e.Document == "":
		return invalid("Document", `""`, "it is empty", "Give each event the document that it belongs to")
	case e.Counter < 0:
		return invalid("Counter", counter, "it is below 0", "Count from 0 or 1 upwards")
	case e.Counter != 0 && o.cfg.NextCounter:
		return invalid("Counter", counter, "NextCounter takes the counter",
			"Leave it 0, or turn NextCounter off")
	case e.Payload == nil:
		return invalid("Payload", "nil", "it is missing",
			"Give the event's content; an empty one is []byte{}")
	}
	return nil
}

// roles checks that the event gives what the table has columns for, and nothing else.
func (b *rowBuilder) roles(e *Event) *Invalid {
	if bad := b.o.judgeAlways(e); bad != nil {
		return bad
	}
	l := b.l
	bad := func(field, value, problem, hint string) *Invalid {
		return &Invalid{Field: field, Value: value, Problem: problem, Hint: hint, table: true}
	}
	counter, none := strconv.FormatInt(e.Counter, 10), "table "+b.o.cfg.Table+" has no column for it"
	switch {
	case e.Counter != 0 && l.counter == nil:
		return bad("Counter", counter, none, "Leave it 0, or set Columns.Counter")
	case e.Actor != "" && l.actor == nil:
		return bad("Actor", shown(e.Actor), none, "Leave it empty, or set Columns.Actor")
	case e.Key != "" && l.key == nil:
		return bad("Key", shown(e.Key), none, "Leave it empty, or set Columns.Key")
	case e.Key != "" && l.key.generated:
		return bad("Key", shown(e.Key), fmt.Sprintf("PostgreSQL makes column %q itself", l.key.name),
			"Leave it empty")
	case e.ID != "" && l.id == nil:
		return bad("ID", shown(e.ID), none, "Leave it empty, or set Columns.ID")
	case e.ID != "" && (l.id.generated || l.id.identity):
		return bad("ID", shown(e.ID), fmt.Sprintf("PostgreSQL makes column %q itself", l.id.name),
			"Leave it empty")
	case e.ID == "" && l.id != nil && !l.id.byItself && !l.id.generated:
		return bad("ID", `""`, fmt.Sprintf("column %q has no default", l.id.name),
			"Give one, or give the column a default")
	case e.Key == "" && l.key != nil && !l.key.generated && !l.computesKey() && !l.key.byItself:
		return bad("Key", `""`, "there are no columns for actor and counter to make it from", "Give one")
	}
	return b.alike(e)
}

// alike makes sure that the event has the columns that the call's first one has: one statement writes them
// all.
func (b *rowBuilder) alike(e *Event) *Invalid {
	differs := func(field, value string) *Invalid {
		return invalid(field, value, "event 0 of the call differs in whether it is given",
			"Give it in all events of a call or in none")
	}
	switch {
	case (e.ID != "") != slices.Contains(b.columns, b.l.id):
		return differs("ID", shown(e.ID))
	case (e.Key != "") != slices.Contains(b.columns, b.l.key):
		return differs("Key", shown(e.Key))
	}
	for _, name := range b.named {
		if _, ok := e.Columns[name]; !ok {
			return differs(fmt.Sprintf("Columns[%q]", name), "(none)")
		}
	}
	if len(e.Columns) > len(b.named) {
		for name := range e.Columns {
			if !slices.Contains(b.named, name) {
				return differs(fmt.Sprintf("Columns[%q]", name), "(column)")
			}
		}
	}
	return nil
}

// value checks and appends what the event has in a column. size becomes that of the payload as it is
// published.
func (b *rowBuilder) value(c *column, to *list, e *Event, size *int) *Invalid {
	field, _ := b.l.role(c)
	text := ""
	switch c {
	case b.l.payload:
		return b.payload(c, to, e, size)
	case b.l.doc:
		text = e.Document
	case b.l.actor:
		text = e.Actor
	case b.l.counter:
		text = strconv.FormatInt(e.Counter, 10)
	case b.l.key:
		text = e.Key
	case b.l.id:
		text = e.ID
	default:
		if f := c.add(to, e.Columns[c.name]); f != nil {
			value := shown(fmt.Sprint(e.Columns[c.name]))
			return &Invalid{Field: fmt.Sprintf("Columns[%q]", c.name), Value: value, Problem: f.problem,
				Hint: f.hint, table: true}
		}
		return nil
	}
	if f := c.check(text); f != nil {
		return &Invalid{Field: field, Value: shown(text), Problem: f.problem, Hint: f.hint, table: true}
	}
	to.add(text)
	return nil
}

func (b *rowBuilder) payload(c *column, to *list, e *Event, size *int) *Invalid {
	*size = len(e.Payload)
	var f *finding
	switch {
	case c.kind == bytea:
		to.add(`\x` + hex.EncodeToString(e.Payload))
		return nil
	case c.kind.json():
		*size, f = c.checkJSON(e.Payload, b.o.cfg.MaxPayload/2)
	default:
		f = c.check(string(e.Payload))
	}
	if f != nil {
		return &Invalid{Field: "Payload", Value: shown(string(e.Payload)), Problem: f.problem, Hint: f.hint,
			table: true}
	}
	to.addBytes(e.Payload)
	return nil
}

// idSize is how long the id is in the header at most.
func (b *rowBuilder) idSize(e *Event) int {
	switch {
	case b.l.id == nil:
		return 0
	case e.ID != "":
		return headerValue(e.ID)
	}
	switch b.l.id.kind {
	case uuid:
		return 36
	case int2, int4, int8:
		return len(strconv.Itoa(math.MinInt))
	}
	return longestValue
}

// keySize is how long the key is in the header at most.
func (b *rowBuilder) keySize(e *Event) int {
	switch {
	case e.Key != "":
		return headerValue(e.Key)
	case b.l.computesKey():
		return headerValue(e.Actor + ":00000000000000000000")
	case b.l.key != nil:
		return longestValue
	}
	return 0
}

// lookup is the value that a mapped header has, as far as it is known here.
func (l *layout) lookup(name string, e *Event) (string, bool) {
	c := l.columns[name]
	if c == nil {
		c = map[string]*column{"doc_id": l.doc, "actor_id": l.actor, "counter": l.counter, "seq_key": l.key,
			"id": l.id}[name]
	}
	if c == nil {
		return "", false
	}
	if _, ok := l.role(c); ok {
		return l.text(c.name, e), true
	}
	v, given := e.Columns[c.name]
	val, _, err := plain(v)
	return val.text, given && err == nil && !val.null
}
