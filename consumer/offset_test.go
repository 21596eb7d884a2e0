package consumer

import (
	"reflect"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

func offsetAt(seq uint64, due outbox.LSN, n uint32) offset {
	return offset{Seq: seq, Due: due, N: n, Pos: outbox.Position{LSN: due}}
}

// The rules of offsets, one by one: what an offset says of a message, and what is left of offsets when the
// number of partitions changes.
func TestOffsetsTellWhatHasHadItsEffect(t *testing.T) {
	t.Parallel()
	lost := offsetAt(100, 1000, 5)
	lost.Lost = true
	for name, c := range map[string]struct{ got, want any }{
		"nothing is known":    {offset{Seq: 5}.known(), false},
		"by its due":          {offset{Due: 1}.known(), true},
		"by its position":     {offset{Pos: outbox.Position{LSN: 1}}.known(), true},
		"up to it":            {offsetAt(100, 1000, 5).covers(offsetAt(100, 1000, 5), false), true},
		"not beyond it":       {offsetAt(100, 1000, 5).covers(offsetAt(101, 900, 0), true), false},
		"again, before it":    {lost.covers(offsetAt(101, 1000, 4), true), true},
		"again, itself":       {lost.covers(offsetAt(101, 1000, 5), true), true},
		"again, beyond it":    {lost.covers(offsetAt(101, 1000, 6), true), false},
		"nothing comes again": {lost.covers(offsetAt(101, 900, 0), false), false},
		"in another window":   {offsetAt(1, 900, 9).order(offsetAt(2, 1000, 0)), -1},
		"in the same":         {offsetAt(1, 900, 9).order(offsetAt(2, 900, 8)), 1},
		"the newest": {newest([]offset{offsetAt(3, 0, 0), offsetAt(9, 0, 0),
			offsetAt(5, 0, 0)}).Seq, uint64(9)},
		"the oldest": {oldest([]offset{offsetAt(3, 0, 0), offsetAt(9, 0, 0),
			offsetAt(1, 0, 0)}).Seq, uint64(1)},
		"of no marks": {newest(nil), offset{}},
		"a repair's event": {offsetOf(7,
			&outbox.Header{Pos: outbox.Position{LSN: 90, Index: outbox.RepairedIndex + 2}, Due: 95}).N,
			uint32(outbox.RepairedIndex + 2)},
		"a window's event": {offsetOf(7, &outbox.Header{Pos: outbox.Position{LSN: 90, Index: 3}, N: 4,
			Due: 95}).N, uint32(4)},
		"the mark of its message": {offsetOf(7, &outbox.Header{Pos: outbox.Position{LSN: 90, Index: 3}, N: 4,
			Due: 95}).Pos, outbox.Position{LSN: 90, Index: 3}},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}

}
