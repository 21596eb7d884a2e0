package decoder

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// spanned is a configuration whose table has a span, and a key of its own.
var spanned = Config{TableOID: tableOID, Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id",
	Counter: "counter", Span: "span", Key: "seq_key", Payload: "payload"}}

const (
	oidNumeric = 1700
	maxSpan    = math.MaxUint32
)

func int8Of(v int64) val { return bin(string(be.AppendUint64(nil, uint64(v)))) }

// place is where an event is in its sequence, without its name.
func place(first int64, span uint32) outbox.Counter { return outbox.Counter{First: first, Span: span} }

// nowhere is that of an event that gap mode can't place.
func nowhere(why int64) outbox.Counter { return outbox.Counter{First: why} }

func TestAnIntegerIsReadFromEveryTypeAndForm(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		typ uint32
		v   val
		ok  bool
		n   int64
	}{
		{oidInt2, txt("-3"), true, -3},
		{oidInt2, bin("\xff\xfd"), true, -3},
		{oidInt4, txt("7"), true, 7},
		{oidInt4, bin("\x00\x00\x00\x07"), true, 7},
		{oidInt8, txt("9223372036854775807"), true, math.MaxInt64},
		{oidInt8, int8Of(math.MaxInt64), true, math.MaxInt64},
		{oidInt8, txt("-9223372036854775808"), true, math.MinInt64},
		{oidInt8, int8Of(math.MinInt64), true, math.MinInt64},
		{oidInt8, bin("\x00"), false, 0},
		{oidNumeric, txt("12"), true, 12},
		{oidNumeric, txt("9223372036854775808"), false, 0},
		{oidNumeric, txt("-9223372036854775809"), false, 0},
		{oidNumeric, txt("99999999999999999999999999"), false, 0},
		{oidNumeric, txt("1.5"), false, 0},
		{oidNumeric, txt("NaN"), false, 0},
		{oidText, txt("00012"), true, 12},
		{oidText, bin("00012"), true, 12},
		{oidText, txt("-0"), true, 0},
		{oidText, txt(""), false, 0},
		{oidText, txt("-"), false, 0},
		{oidText, txt("+1"), false, 0},
		{oidText, txt(" 1"), false, 0},
		{oidText, txt("seven"), false, 0},
		{oidBytea, txt(`\x37`), false, 0},
		{oidBytea, bin("7"), false, 0},
	} {
		e := decodeRow(t, spanned, []col{{"doc_id", oidText}, {"counter", c.typ}, {"seq_key", oidText},
			{"payload", oidText}}, txt("d"), c.v, txt("k"), txt("p"))
		want := place(c.n, 1)
		if !c.ok {
			want = nowhere(relay.CounterNoInteger)
		}
		if e.Counter != want || e.Bad != "" || (e.Unplaceable() == "") != c.ok {
			t.Errorf("type %d, %q: %+v, bad %q, unplaceable %q; want %+v", c.typ, c.v.data, e.Counter, e.Bad,
				e.Unplaceable(), want)
		}
	}
}

func TestARowTakesAsManyCountersAsItsSpan(t *testing.T) {
	t.Parallel()
	cols := []col{{"doc_id", oidText}, {"counter", oidInt8}, {"span", oidInt8}, {"seq_key", oidText},
		{"payload", oidText}}
	for _, c := range []struct {
		counter, span val
		want          outbox.Counter
	}{
		{txt("5"), txt("3"), place(5, 3)},
		{int8Of(5), int8Of(3), place(5, 3)},
		{txt("5"), null, place(5, 1)},
		{txt("5"), txt(fmt.Sprint(maxSpan)), place(5, maxSpan)},
		{txt("5"), txt(fmt.Sprint(maxSpan + 1)), nowhere(relay.BadSpan)},
		{txt("5"), txt("0"), nowhere(relay.BadSpan)},
		{txt("5"), txt("-1"), nowhere(relay.BadSpan)},
		{txt("5"), txt("-9223372036854775808"), nowhere(relay.BadSpan)},
		{txt("5"), txt("two"), nowhere(relay.BadSpan)},
		{txt("9223372036854775807"), txt("1"), place(math.MaxInt64, 1)},
		{txt("9223372036854775806"), txt("2"), place(math.MaxInt64-1, 2)},
		{txt("9223372036854775807"), txt("2"), nowhere(relay.CounterTooLarge)},
		{txt("-9223372036854775808"), txt(fmt.Sprint(maxSpan)), place(math.MinInt64, maxSpan)},
		{null, txt("3"), nowhere(relay.NoCounter)},
		{null, txt("0"), nowhere(relay.NoCounter)},
	} {
		e := decodeRow(t, spanned, cols, txt("d"), c.counter, c.span, txt("k"), txt("p"))
		if e.Counter != c.want || e.Bad != "" {
			t.Errorf("counter %q, span %q: %+v, bad %q, want %+v", c.counter.data, c.span.data, e.Counter,
				e.Bad, c.want)
		}
		if placed := c.want.Span > 0 || c.want.First == relay.NoCounter; placed != (e.Unplaceable() == "") {
			t.Errorf("counter %q, span %q: %q", c.counter.data, c.span.data, e.Unplaceable())
		}
	}
}

// The key decides in horizon mode, so a row without the counter's column is good there; gap mode must learn
// of it. A row from before there was a span takes one counter.
func TestARowWithoutTheColumnsOfItsPlaceIsGoodWhereItHasAKey(t *testing.T) {
	t.Parallel()
	rest := []col{{"doc_id", oidText}, {"seq_key", oidText}, {"payload", oidText}}
	for _, c := range []struct {
		before col
		vals   []val
		want   outbox.Counter
	}{
		{col{"counter", oidInt8}, []val{txt("4")}, place(4, 1)},
		{col{"span", oidInt8}, []val{txt("4")}, nowhere(relay.CounterMissing)},
		{col{"other", oidInt8}, []val{txt("4")}, nowhere(relay.CounterMissing)},
	} {
		msgs := [][]byte{begin(0x100), relation(tableOID, append([]col{c.before}, rest...)...),
			insert(tableOID, append(c.vals, txt("d"), txt("k"), txt("p"))...), commit(0x100, 0x130, 0)}
		results, err := decodeAll(spanned, msgs...)
		must.Succeed(t, err)
		if e := events(results)[0]; e.Counter != c.want || e.Bad != "" || results[0].Missing {
			t.Errorf("a table with %s alone: %+v, bad %q, missing %v, want %+v", c.before.name, e.Counter,
				e.Bad, results[0].Missing, c.want)
		}
	}
	unmapped := spanned
	unmapped.Mapping.Counter = ""
	if e := decodeRow(t, unmapped, rest, txt("d"), txt("k"), txt("p")); e.Counter != (outbox.Counter{}) {
		t.Errorf("no column is mapped: %+v", e.Counter)
	}
}

func TestAMessageNamesItsPlaceByTheRoles(t *testing.T) {
	t.Parallel()
	table := both
	table.Mapping.Counter, table.Mapping.Span, table.Extra = "n", "length", []string{"n", "length"}
	alone := messages
	alone.Mapping.Span, alone.Extra = "span", []string{"counter", "span"}
	for _, c := range []struct {
		members string
		want    outbox.Counter
		bad     string
		extra   string
	}{
		{`"counter":5`, place(5, 1), "", "5 "},
		{`"counter":5,"span":3`, place(5, 3), "", "5 3"},
		{`"counter":5,"span":null`, place(5, 1), "", "5 "},
		{`"span":3`, nowhere(relay.NoCounter), "", " 3"},
		{`"counter":5,"span":4294967295`, place(5, maxSpan), "", "5 4294967295"},
		{`"counter":9223372036854775807,"span":2`, nowhere(relay.CounterTooLarge), "",
			"9223372036854775807 2"},
		{`"counter":5,"span":4294967296`, place(5, 1), "span is not a whole number from 1", "5 "},
		{`"counter":5,"span":0`, place(5, 1), "span is not a whole number from 1", "5 "},
		{`"counter":5,"span":"3"`, place(5, 1), "span is not a whole number from 1", "5 "},
		{`"counter":5,"span":3,"span":3`, place(5, 3), "span twice", "5 3"},
	} {
		for _, cfg := range []Config{alone, table} {
			e, err := decodeContent(t, cfg, `{"doc_id":"d","payload":1,`+c.members+`}`)
			must.Succeed(t, err)
			if e.Counter != c.want || (c.bad == "") != (e.Bad == "") || !strings.Contains(e.Bad, c.bad) ||
				strings.Join(e.Extra, " ") != c.extra {
				t.Errorf("%v, %s: %+v, bad %q, extra %q", cfg.Mapping.Source, c.members, e.Counter, e.Bad,
					e.Extra)
			}
		}
	}
	alone.Mapping.Counter = ""
	e, err := decodeContent(t, alone, `{"doc_id":"d","payload":1,"counter":5,"span":3}`)
	must.Succeed(t, err)
	if e.Counter != (outbox.Counter{}) || e.Bad != "" {
		t.Errorf("no counter is mapped: %+v, bad %q", e.Counter, e.Bad)
	}
}
