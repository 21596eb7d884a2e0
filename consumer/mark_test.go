package consumer

import (
	"reflect"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

func markAt(seq uint64, due outbox.LSN, n uint32) mark {
	return mark{Seq: seq, Due: due, N: n, Pos: outbox.Position{LSN: due}}
}

// The rules of marks, one by one: what a mark says of a message, and what is left of marks when the number of partitions changes.
func TestMarks(t *testing.T) {
	t.Parallel()
	lost := markAt(100, 1000, 5)
	lost.Holed = true
	for name, c := range map[string]struct{ got, want any }{
		"nothing is known":        {mark{Seq: 5}.known(), false},
		"by its due":              {mark{Due: 1}.known(), true},
		"by its position":         {mark{Pos: outbox.Position{LSN: 1}}.known(), true},
		"up to it":                {markAt(100, 1000, 5).has(markAt(100, 1000, 5), false), true},
		"not beyond it":           {markAt(100, 1000, 5).has(markAt(101, 900, 0), true), false},
		"again, before it":        {lost.has(markAt(101, 1000, 4), true), true},
		"again, itself":           {lost.has(markAt(101, 1000, 5), true), true},
		"again, beyond it":        {lost.has(markAt(101, 1000, 6), true), false},
		"nothing comes again":     {lost.has(markAt(101, 900, 0), false), false},
		"in another window":       {markAt(1, 900, 9).order(markAt(2, 1000, 0)), -1},
		"in the same":             {markAt(1, 900, 9).order(markAt(2, 900, 8)), 1},
		"the newest":              {newest([]mark{markAt(3, 0, 0), markAt(9, 0, 0), markAt(5, 0, 0)}).Seq, uint64(9)},
		"the oldest":              {oldest([]mark{markAt(3, 0, 0), markAt(9, 0, 0), markAt(1, 0, 0)}).Seq, uint64(1)},
		"of no marks":             {newest(nil), mark{}},
		"a repair's event":        {markOf(7, &outbox.Header{Pos: outbox.Position{LSN: 90, Index: outbox.RepairedIndex + 2}, Due: 95}).N, uint32(outbox.RepairedIndex + 2)},
		"a window's event":        {markOf(7, &outbox.Header{Pos: outbox.Position{LSN: 90, Index: 3}, N: 4, Due: 95}).N, uint32(4)},
		"the mark of its message": {markOf(7, &outbox.Header{Pos: outbox.Position{LSN: 90, Index: 3}, N: 4, Due: 95}).Pos, outbox.Position{LSN: 90, Index: 3}},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}

	old := []mark{markAt(40, 400, 0), markAt(60, 600, 0)}
	for name, c := range map[string]struct {
		marks []mark
		want  mark
	}{
		"from the oldest":                  {old, old[0]},
		"which is not by its header":       {[]mark{markAt(40, 400, 0), markAt(60, 300, 0)}, mark{Seq: 40}},
		"of which nothing is known":        {[]mark{{Seq: 40}, markAt(60, 600, 0)}, mark{Seq: 40}},
		"where another one is not known":   {[]mark{markAt(40, 400, 0), {Seq: 60}}, mark{Seq: 40}},
		"where both are at the same event": {[]mark{markAt(40, 400, 0), markAt(40, 400, 0)}, markAt(40, 400, 0)},
	} {
		fresh, g := repartition(live, c.marks, 3)
		if !reflect.DeepEqual(fresh, []mark{c.want, c.want, c.want}) || !reflect.DeepEqual(g, generation{live, c.marks}) {
			t.Errorf("%s: %v and %v", name, fresh, g)
		}
	}

	g := generation{live, []mark{markAt(61, 610, 0), lost}}
	for name, c := range map[string]struct {
		marks []mark
		want  bool
	}{
		"all beyond":                       {[]mark{markAt(141, 1010, 0), markAt(150, 1020, 0)}, true},
		"at the newest":                    {[]mark{markAt(100, 1000, 5)}, true},
		"one before it":                    {[]mark{markAt(141, 1010, 0), markAt(99, 1010, 0)}, false},
		"beyond, with what comes again":    {[]mark{markAt(105, 650, 0)}, false},
		"beyond, and nobody knows of what": {[]mark{{Seq: 141}}, false},
	} {
		if got := g.passed(c.marks); got != c.want {
			t.Errorf("a generation that lost its end, marks %s: passed is %t", name, got)
		}
	}

	whole := generation{live, old}
	if !whole.passed([]mark{markAt(61, 50, 0)}) { // of another database cluster
		t.Error("a generation of which nothing is lost is kept for what headers say")
	}
	if whole.passed([]mark{{Seq: 61}}) {
		t.Error("a generation is passed by a mark of which only the sequence is known")
	}

	s := &state{Marks: map[string][]mark{live: old, replay: {markAt(1, 0, 0)}}, Before: []generation{g, {replay, []mark{markAt(2, 0, 0)}}}}
	var seqs []uint64
	for _, m := range s.all(live) {
		seqs = append(seqs, m.Seq)
	}
	if want := []uint64{40, 60, 61, 100}; !reflect.DeepEqual(seqs, want) {
		t.Errorf("the live marks are of %v, want %v", seqs, want)
	}
}
