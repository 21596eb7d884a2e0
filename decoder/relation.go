package decoder

import (
	"fmt"

	"github.com/outflowhq/outflow/outbox"
)

// maxColumns is PostgreSQL's limit for a table (MaxHeapAttributeNumber).
const maxColumns = 1600

// none is the index of what there is not.
const none = -1

// plan says how to read the rows that follow a Relation message.
type plan struct {
	columns []column // those that are read
	slots   []int16  // by the column's place in the tuple: its index in columns, or none

	doc, actor, counter, key, id, payload int // indexes in columns, or none
	extra                                 []int
	computed                              bool // the key is made from actor and counter
}

type column struct {
	name   string
	typ    uint32 // OID
	binary bool   // a binary value can be read
}

// attribute is a column as the Relation message describes it.
type attribute struct {
	place int
	typ   uint32
}

// relation reads a description of a table, sent before its first row and again after whatever may have changed it. With
// publish_via_partition_root the partitions are described too, although no row refers to them.
func (d *Decoder) relation(m *reader) error {
	oid := m.u32()
	schema, table := m.text(), m.text()
	m.u8() // replica identity
	n := int(m.u16())
	if n > maxColumns {
		return d.protocol(m, "%d columns", n)
	}
	if oid != d.cfg.TableOID || !d.cfg.Mapping.Source.Rows() {
		if d.cfg.Unread != "" && string(schema)+"."+string(table) == d.cfg.Unread {
			d.unread = oid
		}
		for range n {
			attributeOf(m)
		}
		return nil
	}
	attributes := make(map[string]attribute, n)
	for i := range n {
		name, typ := attributeOf(m)
		attributes[string(name)] = attribute{i, typ}
	}
	if err := d.end(m); err != nil {
		return err
	}
	p, missing := d.compile(attributes, n)
	if missing != "" {
		return &outbox.Fault{
			Class: outbox.Fatal,
			Code:  "column_missing",
			What: fmt.Sprintf("table %s.%s has no column %q in the WAL at the transaction with commit LSN %v, but the mapping "+
				"of columns uses it", schema, table, missing, d.tx.final),
			Cure: "Give the table the column again (a generated column is in the WAL only from PostgreSQL 18 on, with " +
				"publish_generated_columns = stored; a column list of the publication must name it), or map another column " +
				"and run `outflow init`. Rows that are in the WAL without it can't be published: to get past them, start anew " +
				"(docs/operations.md).",
		}
	}
	d.plan, d.cells = p, make([]cell, len(p.columns))
	return nil
}

func attributeOf(m *reader) (name []byte, typ uint32) {
	m.u8() // part of the key
	name = m.text()
	typ = m.u32()
	m.u32() // type modifier
	return name, typ
}

// compile makes the plan for a table with these columns, n of them. missing names a column that the mapping needs and the table
// has not.
func (d *Decoder) compile(attributes map[string]attribute, n int) (_ *plan, missing string) {
	p := &plan{slots: make([]int16, n), key: none, counter: none}
	for i := range p.slots {
		p.slots[i] = none
	}
	// find reports whether a column that the mapping names is there.
	find := func(name string) bool {
		_, ok := attributes[name]
		if !ok && missing == "" {
			missing = name
		}
		return ok
	}
	// read adds a column to those that are read, if the mapping has it, and gives its index.
	read := func(name string) int {
		if name == "" || !find(name) {
			return none
		}
		a := attributes[name]
		if i := p.slots[a.place]; i != none {
			return int(i)
		}
		i := len(p.columns)
		p.columns = append(p.columns, column{name, a.typ, BinaryReadable(a.typ)})
		p.slots[a.place] = int16(i)
		return i
	}
	t := d.cfg.Mapping
	p.doc, p.actor = read(t.Doc), read(t.Actor)
	both := t.Actor != "" && t.Counter != ""
	_, has := attributes[t.Key]
	switch {
	case t.Key != "" && (has || d.keyed || !both):
		// A key that this session has seen was a column, or was published; that it has gone is a change of the table.
		p.key = read(t.Key)
		d.keyed = true
	case both:
		p.computed = true
	}
	if p.computed {
		p.counter = read(t.Counter)
	} else if t.Counter != "" {
		find(t.Counter) // not read, but it must not be taken away
	}
	p.payload, p.id = read(t.Payload), read(d.cfg.ID)
	for _, name := range d.cfg.Extra {
		p.extra = append(p.extra, read(name))
	}
	return p, missing
}
