package outbox

import (
	"math"
	"strings"
	"testing"
)

func TestCounterFollowsTheKeyInAHeader(t *testing.T) {
	t.Parallel()
	for text, c := range map[string]Counter{
		"":                                      {},
		" q=00000000000000ff c=41":              {Sequence: 255, First: 41, Span: 1},
		" q=ffffffffffffffff c=-3 span=7":       {Sequence: math.MaxUint64, First: -3, Span: 7},
		" q=0123456789abcdef c=0 late=1":        {Sequence: 0x123456789abcdef, Span: 1, Late: true},
		" q=0000000000000001 c=9 span=2 late=1": {Sequence: 1, First: 9, Span: 2, Late: true},
	} {
		h := someHeader()
		h.Counter, h.Sort = c, ByGap
		want := strings.Replace(headerText, "sort=s", "sort=g", 1) + text
		if got := h.String(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		if back, err := ParseHeader(want + " later=1"); err != nil || back != h {
			t.Errorf("%s is read as %+v, %v", want, back, err)
		}
		if HeaderKey(want) != HeaderKey(headerText) {
			t.Errorf("%s has another key", want)
		}
	}
}

func TestHeadersWithADamagedCounterAreRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		" q=ff c=1", " q=00000000000000FF c=1", " q=00000000000000ff", " q=00000000000000ff c=x",
		" q=00000000000000ff c=1 span=0", " q=00000000000000ff c=1 span=4294967296",
		" q=00000000000000ff c=9223372036854775807 span=2", " q=+0000000000000ff c=1",
	} {
		if h, err := ParseHeader(headerText + text); err == nil {
			t.Errorf("%s is taken as %+v", text, h)
		}
	}
}

// The names stand in streams and records that exist: they never change.
func TestSequenceNamesAreFixed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		doc, actor string
		want       uint64
	}{
		{"", "", 0xaf5570f5a1810b7a},
		{"doc", "a", 0x99fa8fe76191712c},
		{"do", "ca", 0x2956f71b822d8321},
		{strings.Repeat("d", 500), "actor", 0x6823b6f0f561ef89},
	} {
		if got := SequenceOf(c.doc, c.actor); got != c.want {
			t.Errorf("%.10q %q: %016x, want %016x", c.doc, c.actor, got, c.want)
		}
	}
}
