package decoder

import (
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
)

// maxColumns is PostgreSQL's limit for a table (MaxHeapAttributeNumber).
const maxColumns = 1600

// none is the index of what there is not.
const none = -1

// plan says how to read the rows that follow a Relation message.
type plan struct {
	columns []column // those that are read
	slots   []int16  // by the column's place in the tuple: its index in columns, or none

	doc, actor, counter, span, key, id, payload int // indexes in columns, or none
	extra                                       []int
	computed                                    bool // the key is made from actor and counter

	noCounter int64 // why counter is none: see [relay.NoCounter]

	absent relay.Nulls // the roles whose columns the table has not
	bad    string      // which columns of those that a row can't be published without; empty: none
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

// relation reads a description of a table, sent before its first row and again after whatever may have
// changed it. With publish_via_partition_root the partitions are described too, although no row refers to
// them.
func (d *Decoder) relation(m *reader, r *Result) error {
	oid := m.u32()
	schema, table := m.text(), m.text()
	m.u8() // replica identity
	n := int(m.u16())
	if n > maxColumns {
		return d.protocol(m, "%d columns", n)
	}
	if oid == d.cfg.Control && oid != 0 {
		return d.controlRelation(m, n)
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
	d.plan, r.Missing = d.compile(attributes, n)
	d.cells = make([]cell, len(d.plan.columns))
	return nil
}

func attributeOf(m *reader) (name []byte, typ uint32) {
	m.u8() // part of the key
	name = m.text()
	typ = m.u32()
	m.u32() // type modifier
	return name, typ
}

// compile makes the plan for a table with these columns, n of them. missing says that it has not all columns
// that are mapped: they were renamed or dropped when its rows were written. What becomes of the rows must
// follow from the WAL, so it must not depend on what the table had before in this session, or has now: what
// is missing is taken for NULL, and a row that can't be published so is marked.
func (d *Decoder) compile(attributes map[string]attribute, n int) (p *plan, missing bool) {
	p = &plan{slots: make([]int16, n), key: none}
	for i := range p.slots {
		p.slots[i] = none
	}
	// find adds a column to those that are read, if the table has it, and gives its index.
	find := func(name string) int {
		a, ok := attributes[name]
		if !ok {
			return none
		}
		if i := p.slots[a.place]; i != none {
			return int(i)
		}
		i := len(p.columns)
		p.columns = append(p.columns, column{name, a.typ, BinaryReadable(a.typ)})
		p.slots[a.place] = int16(i)
		return i
	}
	var lacking []string
	// read finds a column that rows must have if the mapping has it.
	read := func(name string, role relay.Nulls) int {
		i := find(name)
		if name != "" && i == none {
			p.absent |= role
			if missing = true; role != relay.NullID {
				lacking = append(lacking, strconv.Quote(name))
			}
		}
		return i
	}
	t := d.cfg.Mapping
	p.doc, p.actor = read(t.Doc, relay.NullDoc), read(t.Actor, relay.NullActor)
	both := t.Actor != "" && t.Counter != ""
	switch _, has := attributes[t.Key]; {
	case t.Key != "" && (has || !both):
		p.key = read(t.Key, relay.NullKey)
	case both: // a generated key is in the WAL only where it is published
		p.computed = true
		read(t.Counter, relay.NullKey)
		// only the catalog knows whether it is one of those, or was taken away
		missing = missing || t.Key != ""
	}
	if p.counter, p.span = find(t.Counter), find(t.Span); p.counter == none && t.Counter != "" {
		p.noCounter = relay.CounterMissing
	}
	p.payload, p.id = read(t.Payload, relay.NullPayload), read(d.cfg.ID, relay.NullID)
	for _, name := range d.cfg.Extra {
		p.extra = append(p.extra, read(name, 0))
	}
	switch len(lacking) {
	case 0:
	case 1:
		p.bad = "column " + lacking[0] + " was not in the table, or not published, when it was written"
	default:
		p.bad = "columns " + strings.Join(lacking, ", ") +
			" were not in the table, or not published, when it was written"
	}
	return p, missing
}
