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

	old := []offset{offsetAt(40, 400, 0), offsetAt(60, 600, 0)}
	for name, c := range map[string]struct {
		offsets []offset
		want    offset
	}{
		"from the oldest": {old, old[0]},
		"which is not by its header": {[]offset{offsetAt(40, 400, 0), offsetAt(60, 300, 0)},
			offset{Seq: 40}},
		"of which nothing is known":      {[]offset{{Seq: 40}, offsetAt(60, 600, 0)}, offset{Seq: 40}},
		"where another one is not known": {[]offset{offsetAt(40, 400, 0), {Seq: 60}}, offset{Seq: 40}},
		"where both are at the same event": {[]offset{offsetAt(40, 400, 0), offsetAt(40, 400, 0)},
			offsetAt(40, 400, 0)},
	} {
		fresh, g := repartition(live, c.offsets, 3)
		if !reflect.DeepEqual(fresh, []offset{c.want, c.want, c.want}) ||
			!reflect.DeepEqual(g, oldLayout{live, c.offsets}) {
			t.Errorf("%s: %v and %v", name, fresh, g)
		}
	}

	g := oldLayout{live, []offset{offsetAt(61, 610, 0), lost}}
	for name, c := range map[string]struct {
		offsets []offset
		want    bool
	}{
		"all beyond":                       {[]offset{offsetAt(141, 1010, 0), offsetAt(150, 1020, 0)}, true},
		"at the newest":                    {[]offset{offsetAt(100, 1000, 5)}, true},
		"one before it":                    {[]offset{offsetAt(141, 1010, 0), offsetAt(99, 1010, 0)}, false},
		"beyond, with what comes again":    {[]offset{offsetAt(105, 650, 0)}, false},
		"beyond, and nobody knows of what": {[]offset{{Seq: 141}}, false},
	} {
		if got := g.obsolete(c.offsets); got != c.want {
			t.Errorf("a generation that lost its end, marks %s: passed is %t", name, got)
		}
	}

	whole := oldLayout{live, old}
	if !whole.obsolete([]offset{offsetAt(61, 50, 0)}) { // of another database cluster
		t.Error("a generation of which nothing is lost is kept for what headers say")
	}
	if whole.obsolete([]offset{{Seq: 61}}) {
		t.Error("a generation is passed by a mark of which only the sequence is known")
	}

	s := &state{Offsets: map[string][]offset{live: old, replay: {offsetAt(1, 0, 0)}},
		OldLayouts: []oldLayout{g, {replay, []offset{offsetAt(2, 0, 0)}}}}
	var seqs []uint64
	for _, m := range s.all(live) {
		seqs = append(seqs, m.Seq)
	}
	if want := []uint64{40, 60, 61, 100}; !reflect.DeepEqual(seqs, want) {
		t.Errorf("the live marks are of %v, want %v", seqs, want)
	}
}
