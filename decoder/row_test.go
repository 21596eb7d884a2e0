package decoder

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
)

// decodeRow gives the event of one row.
func decodeRow(t *testing.T, cfg Config, cols []col, vals ...val) relay.Event {
	t.Helper()
	results, err := decodeAll(cfg, begin(0x100), relation(tableOID, cols...), insert(tableOID, vals...),
		commit(0x100, 0x130, 0))
	must.Succeed(t, err)
	return events(results)[0]
}

var payloadOnly = Config{TableOID: tableOID, Mapping: relay.Mapping{Payload: "payload"},
	Extra: []string{"payload"}}

// Each value, as text and as binary, gives the same bytes, as payload and as string.
func TestTextAndBinaryValuesGiveTheSameBytes(t *testing.T) {
	t.Parallel()
	i8 := func(v int64) string { return string(be.AppendUint64(nil, uint64(v))) }
	i4 := func(v int32) string { return string(be.AppendUint32(nil, uint32(v))) }
	for _, c := range []struct {
		typ       uint32
		text, bin string
		want      string
	}{
		{typ: oidBool, text: "t", bin: "\x01"},
		{typ: oidBool, text: "f", bin: "\x00"},
		{typ: oidInt2, text: "-32768", bin: "\x80\x00"},
		{typ: oidInt4, text: "-5", bin: i4(-5)},
		{typ: oidInt8, text: "-9223372036854775808", bin: i8(-1 << 63)},
		{typ: oidInt8, text: "9223372036854775807", bin: i8(1<<63 - 1)},
		{typ: oidOID, text: "4294967295", bin: i4(-1)},
		{typ: oidText, text: "naïve \n\t", bin: "naïve \n\t"},
		{typ: oidText, text: "", bin: ""},
		{typ: oidVarchar, text: "x", bin: "x"},
		{typ: oidBpchar, text: "x  ", bin: "x  "},
		{typ: oidName, text: "pg_class", bin: "pg_class"},
		{typ: oidJSON, text: `{"b":1, "b":2}`, bin: `{"b":1, "b":2}`},
		{typ: oidJSONB, text: `{"b": 1.0}`, bin: "\x01" + `{"b": 1.0}`},
		{typ: oidUUID, text: "0f0c6b1e-0c39-4f1e-9a53-1d5c2b8e4a1f",
			bin: "\x0f\x0c\x6b\x1e\x0c\x39\x4f\x1e\x9a\x53\x1d\x5c\x2b\x8e\x4a\x1f"},
		{typ: oidBytea, text: `\x00ff5c`, bin: "\x00\xff\\", want: "\x00\xff\\"},
		{typ: oidBytea, text: `\x`, bin: ""},
		{typ: oidTimestamptz, text: "2000-01-01 00:00:00+00", bin: i8(0)},
		{typ: oidTimestamptz, text: "1999-12-31 23:59:59.999999+00", bin: i8(-1)},
		{typ: oidTimestamptz, text: "2000-01-01 00:00:00.1+00", bin: i8(100_000)},
		{typ: oidTimestamp, text: "2000-01-01 00:00:00.00001", bin: i8(10)},
		{typ: oidTimestamptz, text: "infinity", bin: i8(1<<63 - 1)},
		{typ: oidTimestamp, text: "-infinity", bin: i8(-1 << 63)},
		{typ: oidTimestamptz, text: "4714-11-24 00:00:00+00 BC", bin: i8(minTimestamp)},
		{typ: oidTimestamptz, text: "294276-12-31 23:59:59.999999+00", bin: i8(endTimestamp - 1)},
		{typ: oidDate, text: "2000-02-29", bin: i4(59)},
		{typ: oidDate, text: "infinity", bin: i4(1<<31 - 1)},
		{typ: oidDate, text: "-infinity", bin: i4(-1 << 31)},
		{typ: oidDate, text: "4714-11-24 BC", bin: i4(minDate)},
		{typ: oidDate, text: "5874897-12-31", bin: i4(endDate - 1)},
	} {
		want := c.text
		if c.typ == oidBytea {
			want = c.want
		}
		for _, v := range []val{txt(c.text), bin(c.bin)} {
			e := decodeRow(t, payloadOnly, []col{{"payload", c.typ}}, v)
			if string(e.Payload) != want || e.PayloadSize != len(want) || e.Extra[0] != want || e.Bad != "" ||
				e.Null != 0 || e.Payload == nil {
				t.Errorf("type %d, %q: %q, %q, size %d, bad %q", c.typ, v.data, e.Payload, e.Extra[0],
					e.PayloadSize, e.Bad)
			}
		}
		if !BinaryReadable(c.typ) {
			t.Errorf("type %d is read as binary but not BinaryReadable", c.typ)
		}
	}
}

func TestAValueThatCannotBeReadHasAReason(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		typ    uint32
		v      val
		reason string
	}{
		{oidBool, bin(""), badLength},
		{oidBool, bin("\x00\x00"), badLength},
		{oidBool, bin("\x02"), badBool},
		{oidInt2, bin("\x00"), badLength},
		{oidInt4, bin("\x00\x00\x00\x00\x00"), badLength},
		{oidInt8, bin("\x00\x00\x00\x00"), badLength},
		{oidOID, bin(""), badLength},
		{oidUUID, bin("\x00"), badLength},
		{oidDate, bin("\x00"), badLength},
		{oidDate, bin("\x80\x00\x00\x01"), badTimestamp},
		{oidTimestamp, bin("\x00"), badLength},
		{oidTimestamptz, bin("\x80\x00\x00\x00\x00\x00\x00\x01"), badTimestamp},
		{oidJSONB, bin(""), badJSONB},
		{oidJSONB, bin("\x02{}"), badJSONB},
		{oidBytea, txt(""), badHex},
		{oidBytea, txt(`\x1`), badHex},
		{oidBytea, txt(`\x1g`), badHex},
		{oidBytea, txt(`abc\000`), badHex},
	} {
		e := decodeRow(t, payloadOnly, []col{{"payload", c.typ}}, c.v)
		if want := "column payload: " + c.reason; e.Bad != want || e.Payload != nil || e.PayloadSize != 0 ||
			e.Extra[0] != "" {
			t.Errorf("type %d, %q: %+v, want %q", c.typ, c.v.data, e, want)
		}
	}
}

// A bad value spoils its own row only.
func TestBadRowGoesOn(t *testing.T) {
	t.Parallel()
	cols := []col{{"doc_id", oidText}, {"actor_id", oidText}, {"counter", oidInt8}, {"payload", oidJSONB},
		{"id", oidUUID}}
	good := []val{txt("rustcode"), txt("0"), txt("5"), txt("{}"), txt("1")}
	results, err := decodeAll(config, begin(0x100), relation(tableOID, cols...),
		insert(tableOID, txt("rustcode"), txt("0"), bin("?"), bin("\x07{}"), txt("1")),
		insert(tableOID, good...), commit(0x100, 0x130, 0))
	must.Succeed(t, err)
	got := events(results)
	if got[0].Bad != "column counter: "+badLength || got[0].Key != "" || got[0].Doc != "rustcode" ||
		got[0].ID != "1" {
		t.Errorf("%+v", got[0])
	}
	if got[1].Bad != "" || got[1].Key != "0:00000000000000000005" || got[1].Pos.Index != 1 {
		t.Errorf("%+v", got[1])
	}
}

func TestAValueThatOnlyTextCanGiveAsksForText(t *testing.T) {
	t.Parallel()
	const numeric, mood = 1700, 16400
	cols := []col{{"doc_id", oidText}, {"actor_id", oidText}, {"counter", numeric}, {"payload", oidJSON},
		{"feeling", mood}}
	vals := func(counter, feeling val) []byte {
		return insert(tableOID, txt("rustcode"), bin("0"), counter, bin("{}"), feeling)
	}
	cfg := config
	cfg.ID = ""
	try := func(cfg Config, cols []col, msg []byte) error {
		_, err := decodeAll(cfg, begin(0x100), relation(tableOID, cols...), msg)
		return err
	}
	if err := try(cfg, cols, vals(bin("\x00\x01"), txt("fine"))); !errors.Is(err, ErrNeedText) ||
		!strings.Contains(err.Error(), `"counter"`) {
		t.Errorf("computed from a binary numeric: %v", err)
	}
	if err := try(cfg, cols, vals(txt("1"), bin("fine"))); err != nil {
		t.Errorf("a column that is not read: %v", err)
	}
	keyed := append(cols[:5:5], col{"seq_key", oidText})
	msg := insert(tableOID, txt("rustcode"), bin("0"), bin("\x00\x01"), bin("{}"), null, bin("0:1"))
	if err := try(cfg, keyed, msg); !errors.Is(err, ErrNeedText) {
		t.Errorf("a counter beside a key: %v", err)
	}
	cfg.Extra = []string{"feeling"}
	if err := try(cfg, cols, vals(txt("1"), bin("fine"))); !errors.Is(err, ErrNeedText) {
		t.Errorf("a further column: %v", err)
	}
	if err := try(cfg, cols, vals(txt("1"), null)); err != nil {
		t.Errorf("NULL: %v", err)
	}
}

func TestANullIsNoEmptyString(t *testing.T) {
	t.Parallel()
	cfg := config
	cfg.Extra = []string{"doc_id", "created_at"}
	all := []val{txt("1"), txt("rustcode"), txt("0"), txt("3"), txt("{}"), txt("now")}
	for i, c := range []struct {
		want  relay.Nulls
		extra [2]bool
	}{
		{want: relay.NullID},
		{want: relay.NullDoc, extra: [2]bool{true, false}},
		{want: relay.NullActor | relay.NullKey},
		{want: relay.NullKey},
		{want: relay.NullPayload},
		{extra: [2]bool{false, true}},
	} {
		vals := append([]val(nil), all...)
		vals[i] = null
		e := decodeRow(t, cfg, columns, vals...)
		extra := [2]bool{e.ExtraNull(0), e.ExtraNull(1)}
		const ofExtra = 3 << (63 - relay.MaxExtra)
		if e.Null&^ofExtra != c.want || extra != c.extra || e.Bad != "" {
			t.Errorf("%s is NULL: %b, extra %v, bad %q", columns[i].name, e.Null, extra, e.Bad)
		}
	}
	unkeyed := Config{TableOID: tableOID, Mapping: relay.Mapping{Doc: "doc_id", Payload: "payload"}}
	if e := decodeRow(t, unkeyed, columns, all...); e.Null != 0 || e.Key != "" || e.Actor != "" ||
		e.ID != "" || e.Extra != nil {
		t.Errorf("columns that are not mapped: %+v", e)
	}
	keyed := append(columns[:6:6], col{"seq_key", oidText})
	if e := decodeRow(t, config, keyed, append(all[:6:6], null)...); e.Null != relay.NullKey || e.Key != "" {
		t.Errorf("a key column that is NULL: %+v", e)
	}
}

func TestAPayloadAboveTheLimitIsNotKept(t *testing.T) {
	t.Parallel()
	cut := payloadOnly
	cut.MaxPayload = 1
	if e := decodeRow(t, cut, []col{{"payload", oidBytea}}, txt(`\x00112`)); e.Bad != "column payload: "+
		badHex || e.PayloadSize != 0 {
		t.Errorf("half a byte, above the limit: %+v", e)
	}
	for _, limit := range []int{0, 5, 6, 7} {
		cfg := payloadOnly
		cfg.Extra, cfg.MaxPayload = nil, limit
		for name, c := range map[string]struct {
			typ uint32
			v   val
		}{
			"text":         {oidText, txt("abcdef")},
			"jsonb":        {oidJSONB, bin("\x01abcdef")},
			"bytea text":   {oidBytea, txt(`\x616263646566`)},
			"bytea binary": {oidBytea, bin("abcdef")},
			"number":       {oidInt4, bin("\x00\x01\xe2\x40")},
		} {
			e := decodeRow(t, cfg, []col{{"payload", c.typ}}, c.v)
			if e.PayloadSize != 6 || e.Bad != "" {
				t.Errorf("%s: size %d, bad %q", name, e.PayloadSize, e.Bad)
			}
			if left := limit == 5; (e.Payload == nil) != left {
				t.Errorf("%s, limit %d: payload %q", name, limit, e.Payload)
			}
		}
	}
}

// Values of all sizes round those at which memory is given out differently stay what they were while later
// rows are read.
func TestValuesStayWhatTheyWereWhileLaterRowsAreRead(t *testing.T) {
	t.Parallel()
	cfg := config
	cfg.Extra = []string{"created_at"}
	d := New(cfg)
	var r Result
	for _, msg := range [][]byte{begin(0x100), relation(tableOID, columns...)} {
		must.Succeed(t, d.Decode(msg, &r))
	}
	sizes := []int{0, 1, 200, ownBlock - 1, ownBlock, ownBlock + 1, blockSize - 1, blockSize, blockSize + 1,
		1_300_000}
	var kept []relay.Event
	var want []string
	for n := range 1000 {
		payload, long := strings.Repeat(fmt.Sprint(n%10), sizes[n%7]), fmt.Sprint("extra ", n)
		if n%100 == 0 {
			payload = strings.Repeat(fmt.Sprint(n/100), sizes[n/100])
			long += strings.Repeat("-", ownBlock)
		}
		msg := insert(tableOID, txt(fmt.Sprint("id ", n)), txt(fmt.Sprint("doc ", n)),
			txt(fmt.Sprint("actor ", n)), txt(fmt.Sprint(n)), txt(payload), txt(long))
		must.Succeed(t, d.Decode(msg, &r))
		clear(msg)
		if cap(r.Event.Payload) != len(r.Event.Payload) || cap(r.Event.Extra) != 1 {
			t.Fatalf("row %d: an append would write beside the payload (%d of %d) or Extra (%d)", n,
				len(r.Event.Payload), cap(r.Event.Payload), cap(r.Event.Extra))
		}
		kept = append(kept, r.Event)
		want = append(want, fmt.Sprintf("id %d|doc %d|actor %d|actor %d:%020d|%s|%s", n, n, n, n, n, payload,
			long))
	}
	for n, e := range kept {
		got := strings.Join([]string{e.ID, e.Doc, e.Actor, e.Key, string(e.Payload), e.Extra[0]}, "|")
		if got != want[n] {
			t.Fatalf("row %d has changed: %.100q", n, got)
		}
	}
}

func TestEachCallOverwritesTheResult(t *testing.T) {
	t.Parallel()
	d := New(config)
	var r Result
	for _, msg := range [][]byte{begin(0x100), relation(tableOID, columns...), row("1", "[]"),
		commit(0x100, 0x130, 3)} {
		must.Succeed(t, d.Decode(msg, &r))
	}
	if !reflect.DeepEqual(r.Event, relay.Event{}) {
		t.Errorf("beside the commit: %+v", r.Event)
	}
}
