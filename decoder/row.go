package decoder

import (
	"encoding/hex"
	"fmt"
	"math"

	"github.com/outflowhq/outflow/internal/relay"
)

// cell is one value of the present row: offsets, so that the message is not kept alive.
type cell struct {
	kind       byte
	start, end int
}

// tuple walks over a row. Of the outbox's it notes where the values are that are read; slots is nil for all
// other rows.
func (d *Decoder) tuple(m *reader, slots []int16, insert bool) error {
	n := int(m.u16())
	switch {
	case m.short:
		return nil
	case n > maxColumns:
		return d.protocol(m, "%d columns", n)
	case slots != nil && n != len(slots):
		return d.protocol(m, "%d columns where the Relation message had %d", n, len(slots))
	}
	for i := range n {
		kind, start, size := m.u8(), m.off, uint32(0)
		switch kind {
		case kindText, kindBinary:
			size = m.u32()
			start = m.skip(size)
		case kindNull:
		case kindToast:
			if insert {
				return d.protocol(m, "column %d is left out as unchanged, in an insert", i+1)
			}
		default:
			if !m.short {
				return d.protocol(m, "column %d is of the unknown kind %q", i+1, kind)
			}
		}
		if m.short {
			return nil
		}
		if slots == nil || slots[i] == none {
			continue
		}
		c := &d.plan.columns[slots[i]]
		if kind == kindBinary && !c.binary {
			return fmt.Errorf("column %q, type OID %d: %w", c.name, c.typ, ErrNeedText)
		}
		d.cells[slots[i]] = cell{kind, start, m.off}
	}
	return nil
}

// change walks over an update or a delete; neither is an event.
func (d *Decoder) change(m *reader, kind byte) error {
	m.u32() // OID
	for {
		part := m.u8()
		switch {
		case m.short:
			return nil
		case part == 'K', part == 'O':
		case part == 'N' && kind == 'U':
		default:
			return d.protocol(m, "unknown part %q", part)
		}
		if err := d.tuple(m, nil, false); err != nil || m.short {
			return err
		}
		// The new row is an update's last part, the old one a delete's only part.
		if part == 'N' || kind == 'D' {
			return nil
		}
	}
}

// insert makes an event of a row of the outbox.
func (d *Decoder) insert(m *reader, r *Result) error {
	oid, part := m.u32(), m.u8()
	if part != 'N' && !m.short {
		return d.protocol(m, "unknown part %q", part)
	}
	if oid == d.cfg.Control && oid != 0 && (!d.tx.foreign || d.tx.cluster != 0) {
		return d.controlRow(m, r)
	}
	if oid != d.cfg.TableOID || !d.cfg.Mapping.Source.Rows() || d.tx.foreign {
		if oid == d.unread && oid != 0 && !d.tx.foreign {
			r.Ignored = IgnoredRow
		}
		return d.tuple(m, nil, true)
	}
	p := d.plan
	if p == nil {
		return d.protocol(m, "a row of the outbox before its Relation message")
	}
	if err := d.tuple(m, p.slots, true); err != nil {
		return err
	}
	if err := d.end(m); err != nil {
		return err
	}
	if d.tx.events == math.MaxUint32 {
		return errTooManyEvents
	}
	e := &r.Event
	e.Pos.Index = d.tx.events
	d.tx.events++
	r.Kind = Event

	e.Doc = d.text(m.b, p.doc, e, relay.NullDoc)
	e.Actor = d.text(m.b, p.actor, e, relay.NullActor)
	if p.computed {
		d.computeKey(m.b, e)
	} else {
		e.Key = d.text(m.b, p.key, e, relay.NullKey)
	}
	d.counter(m.b, e)
	d.payload(m.b, e)
	e.ID = d.text(m.b, p.id, e, relay.NullID)
	d.extra(m.b, e)
	e.Null |= p.absent
	if p.bad != "" {
		e.Bad = p.bad
	}
	return nil
}

// text gives the value of column i of the plan and marks it in e if it is NULL or bad.
func (d *Decoder) text(msg []byte, i int, e *relay.Event, null relay.Nulls) string {
	if i == none {
		return ""
	}
	c := &d.cells[i]
	if c.kind == kindNull {
		e.Null |= null
		return ""
	}
	var bad string
	b, digits := msg[c.start:c.end], false
	if c.kind != kindText || d.plan.columns[i].typ == oidBytea {
		if b, digits, bad = d.value(msg, i); bad != "" {
			d.spoil(e, i, bad)
			return ""
		}
	}
	if !digits {
		return asString(d.arena.copy(b))
	}
	if b, bad = d.keep(b, digits); bad != "" {
		d.spoil(e, i, bad)
		return ""
	}
	return asString(b)
}

// value gives the value of column i, not NULL, where it lies: in the message or in d.scratch. digits says
// that these are the hexadecimal digits of its bytes.
func (d *Decoder) value(msg []byte, i int) (b []byte, digits bool, bad string) {
	c := d.cells[i]
	raw, typ := msg[c.start:c.end], d.plan.columns[i].typ
	if c.kind == kindText {
		if typ != oidBytea {
			return raw, false, ""
		}
		b, bad = hexBytea(raw)
		return b, true, bad
	}
	b, bad = binaryText(typ, raw, &d.scratch)
	return b, false, bad
}

// keep copies a value into the arena.
func (d *Decoder) keep(b []byte, digits bool) (_ []byte, bad string) {
	if !digits {
		return d.arena.copy(b), ""
	}
	to := d.arena.take(len(b) / 2)
	to = to[:cap(to)]
	if _, err := hex.Decode(to, b); err != nil {
		return nil, badHex
	}
	return to, ""
}

// payload sets the payload and its size, and leaves out what is above the limit.
func (d *Decoder) payload(msg []byte, e *relay.Event) {
	i := d.plan.payload
	if i == none {
		return
	}
	if d.cells[i].kind == kindNull {
		e.Null |= relay.NullPayload
		return
	}
	b, digits, bad := d.value(msg, i)
	if bad != "" {
		d.spoil(e, i, bad)
		return
	}
	size := len(b)
	if digits {
		size /= 2
	}
	if d.cfg.MaxPayload == 0 || size <= d.cfg.MaxPayload {
		if b, bad = d.keep(b, digits); bad != "" {
			d.spoil(e, i, bad)
			return
		}
		e.Payload = b
	}
	e.PayloadSize = size
}

// computeKey makes the key that a generated column would hold: NULL if one of its parts is.
func (d *Decoder) computeKey(msg []byte, e *relay.Event) {
	p := d.plan
	if p.actor == none || p.counter == none || d.cells[p.actor].kind == kindNull ||
		d.cells[p.counter].kind == kindNull {
		e.Null |= relay.NullKey
		return
	}
	counter := d.text(msg, p.counter, e, 0)
	if e.Bad == "" {
		e.Key = d.arena.key(cast(p.columns[p.actor].typ, e.Actor), cast(p.columns[p.counter].typ, counter))
	}
}

// extra sets the further columns.
func (d *Decoder) extra(msg []byte, e *relay.Event) {
	p := d.plan
	large := false
	for _, i := range p.extra {
		large = large || i != none && d.cells[i].end-d.cells[i].start >= ownBlock
	}
	e.Extra = d.arena.strings(len(p.extra), large)
	for n, i := range p.extra {
		if i == none || d.cells[i].kind == kindNull {
			e.SetExtraNull(n)
			continue
		}
		e.Extra[n] = d.text(msg, i, e, 0)
	}
}

// spoil notes that column i can't be decoded. The first such column stands.
func (d *Decoder) spoil(e *relay.Event, i int, reason string) {
	if e.Bad == "" {
		e.Bad = "column " + d.plan.columns[i].name + ": " + reason
	}
}
