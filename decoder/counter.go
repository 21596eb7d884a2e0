package decoder

import (
	"encoding/binary"
	"math"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// counter sets the event's place in its sequence. What gap mode can't use does not make the row bad here: in
// horizon mode a counter may be any text, and which mode is in force is not the decoder's to know.
func (d *Decoder) counter(msg []byte, e *relay.Event) {
	p := d.plan
	if p.counter == none {
		e.Counter.First = p.noCounter
		return
	}
	if d.cells[p.counter].kind == kindNull {
		return
	}
	first, ok := d.integer(msg, p.counter)
	if !ok {
		e.Counter.First = relay.CounterNoInteger
		return
	}
	span := int64(1)
	if p.span != none && d.cells[p.span].kind != kindNull {
		span, _ = d.integer(msg, p.span)
	}
	e.Counter = counterOf(first, span)
}

// counterOf is the place of an event that takes span counters from first on.
func counterOf(first, span int64) (c outbox.Counter) {
	switch {
	case span < 1 || span > math.MaxUint32:
		c.First = relay.BadSpan
	case first > math.MaxInt64-span+1:
		c.First = relay.CounterTooLarge
	default:
		c.First, c.Span = first, uint32(span)
	}
	return c
}

// integer reads column i of the plan, not NULL, as an integer. It is one in the text form and in the binary
// form, or in neither.
func (d *Decoder) integer(msg []byte, i int) (n int64, ok bool) {
	c := &d.cells[i]
	raw, typ := msg[c.start:c.end], d.plan.columns[i].typ
	switch {
	case typ == oidBytea:
		return 0, false
	case c.kind == kindText:
		return parseInteger(raw)
	case typ == oidInt8 && len(raw) == 8:
		return int64(binary.BigEndian.Uint64(raw)), true
	}
	b, bad := binaryText(typ, raw, &d.scratch)
	if bad != "" {
		return 0, false
	}
	return parseInteger(b)
}

// parseInteger reads decimal digits, after a minus sign or none. Unlike strconv it allocates nothing where
// there is no integer: in horizon mode that may be so in each row.
func parseInteger(b []byte) (n int64, ok bool) {
	digits := b
	if len(b) > 0 && b[0] == '-' {
		digits = b[1:]
	}
	for _, c := range digits {
		digit := int64(c) - '0'
		if digit < 0 || digit > 9 || n < math.MinInt64/10 || n*10 < math.MinInt64+digit {
			return 0, false
		}
		n = n*10 - digit // below 0, where there is one number more
	}
	if len(digits) < len(b) {
		return n, len(digits) > 0
	}
	return -n, len(digits) > 0 && n != math.MinInt64
}
