package oracle

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// Lines as test_decoding printed them.
func TestRowsAreReadAsTestDecodingPrintsThem(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("0123456789", 100_000)
	for line, want := range map[string]Row{
		` id[uuid]:'a71c19f4-7069-45fb-b1bd-6fdf92404e21' doc_id[text]:'note' counter[bigint]:-7 payload[jsonb]:'{"n": 1.10, "s": "it''s"}'`: {
			{"id", "uuid", "a71c19f4-7069-45fb-b1bd-6fdf92404e21", false}, {"doc_id", "text", "note", false},
			{"counter", "bigint", "-7", false}, {"payload", "jsonb", `{"n": 1.10, "s": "it's"}`, false},
		},
		` a[text]:'' b[text]:null c[boolean]:true d[boolean]:false e[bytea]:'\x00ff5c27' f[bytea]:'\x'`: {
			{"a", "text", "", false}, {"b", "text", "", true}, {"c", "boolean", "t", false},
			{"d", "boolean", "f", false}, {"e", "bytea", "\x00\xff\\'", false}, {"f", "bytea", "", false},
		},
		` a[text[]]:'{a,"b c",NULL}' "we""ird [x]:'y'"[character varying]:'null' "Type"["my]:""type"]:'' b[bit varying]:B'101' n[numeric]:NaN`: {
			{"a", "text[]", `{a,"b c",NULL}`, false}, {`we"ird [x]:'y'`, "character varying", "null", false},
			{"Type", `"my]:""type"`, "", false}, {"b", "bit varying", "101", false},
			{"n", "numeric", "NaN", false},
		},
		" a[text]:'two\nlines '' b[text]:''no'' ÷ \\ '''''": {{"a", "text",
			"two\nlines ' b[text]:'no' ÷ \\ ''", false}},
		" t[timestamp with time zone]:'infinity' l[text]:'" + long +
			"'": {{"t", "timestamp with time zone", "infinity", false}, {"l", "text", long, false}},
		"": nil,
	} {
		if got, err := parseRow(line); err != nil || !slices.Equal(got, want) {
			t.Errorf("%.200s\nread as %.300v, %v\nwant %.300v", line, got, err, want)
		}
	}
	for _, line := range []string{
		" (no-tuple-data)", "a[text]:'x'", " a", " a[text", " a[text]:", " a[text]:'x", " a[text]:'x''",
		" a[text]:'x'b[text]:'y'", ` "a[text]:'x'`,
		" a[text]:unchanged-toast-datum", ` a[bytea]:'abc'`, ` a[bytea]:'\xf'`, " a[text]: b[text]:'x'",
	} {
		if got, err := parseRow(line); err == nil {
			t.Errorf("%q is read as %v", line, got)
		}
	}
}

func TestLogicalMessagesAreReadAsPrinted(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]logical{
		"message: transactional: 1 prefix: outflow.tick, sz: 0 content:":   {true, "outflow.tick", ""},
		"message: transactional: 0 prefix: x, sz: 12 content:é\n content:": {false, "x", "é\n content:"},
		"message: transactional: 1 prefix: p, sz: 3 content:abcd, sz: 4 content:wxyz": {true,
			"p, sz: 3 content:abcd", "wxyz"},
		"message: transactional: 1 prefix: , sz: 1 content:\x00": {true, "", "\x00"},
		"message: transactional: 1 prefix: p, sz: 17 content:a, sz: 3 content:": {true, "p",
			"a, sz: 3 content:"},
		"message: transactional: 1 prefix: a prefix: b, sz: 2, sz: 1 content:1": {true,
			"a prefix: b, sz: 2", "1"},
		"message: transactional: 1 prefix: outflow.settings, sz: 14 content:v=1 slot=a b=": {true,
			"outflow.settings", "v=1 slot=a b="},
	} {
		got, err := parseLogical(line)
		if want.prefix == "outflow.settings" {
			if err == nil {
				t.Errorf("%q with a wrong size is read", line)
			}
			continue
		}
		if err != nil || got != want {
			t.Errorf("%q is read as %+v, %v", line, got, err)
		}
	}
}

func TestCommitTimesAreReadAsPrinted(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Time{
		"2026-11-21 17:40:26.944001+00": time.Date(2026, 11, 21, 17, 40, 26, 944001000, time.UTC),
		"2026-11-21 17:40:26.9+00":      time.Date(2026, 11, 21, 17, 40, 26, 900000000, time.UTC),
		"2026-11-21 17:40:26+00":        time.Date(2026, 11, 21, 17, 40, 26, 0, time.UTC),
	} {
		if got, err := commitTime("COMMIT (at " + text + ")"); err != nil || got != want.UnixMicro() {
			t.Errorf("%s: %d, %v", text, got, err)
		}
	}
	if _, err := commitTime("COMMIT 731"); err == nil {
		t.Error("a commit without a time is taken")
	}
}

func TestAChangeOfSettingsIsReadFromItsMessage(t *testing.T) {
	t.Parallel()
	const content = "v=1 slot=outflow horizon=20ms sort=seq_key max_events=65536 max_bytes=67108864"
	if c, ok := parseChange(content); !ok || c != (change{"outflow", DefaultSettings}) {
		t.Errorf("%+v %v", c, ok)
	}
	if c, ok := parseChange("v=1 slot=b horizon=0s sort=commit max_events=1 max_bytes=2"); !ok ||
		c != (change{"b", Settings{0, ByCommit, 1, 2, Gap{}}}) {
		t.Errorf("%+v %v", c, ok)
	}
	for _, text := range []string{
		"", "v=1", "v=0 slot=outflow", "v=x slot=outflow", "v=1 slot=", "v=2 slot=b anything", "v=2" +
			content[3:], content + " more", content + "\n", strings.Replace(content, "20ms", "20", 1),
		strings.Replace(content, "20ms", "-1s", 1), strings.Replace(content, "20ms", "1ns", 1),
		strings.Replace(content, "20ms", "25h", 1),
		strings.Replace(content, "seq_key", "key", 1), strings.Replace(content, "65536", "0", 1),
		strings.Replace(content, "67108864", "0", 1),
		strings.Replace(content, "65536", "4194305", 1), strings.Replace(content, "67108864", "1073741825",
			1),
		strings.Replace(content, " horizon", "  horizon", 1), "slot=outflow v=1",
	} {
		if c, ok := parseChange(text); ok {
			t.Errorf("%q is read as %+v", text, c)
		}
	}
}

// The examples of docs/format.md and of the rule for long values.
func TestTokensAreThoseOfTheFormatPage(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"a b.*": "a=20b=2E=2A", "": "=", "=": "=3D", "né_-Z9": "n=C3=A9_-Z9",
		strings.Repeat("a", 200): strings.Repeat("a", 200),
		strings.Repeat("a", 127) + strings.Repeat(".", 30): strings.Repeat("a", 127) +
			"=~0d7f6d2957c1847a62c38748dea8a21b",
	} {
		if got := Token(value); got != want {
			t.Errorf("%q becomes %q, want %q", value, got, want)
		}
	}
	if got := headerValue("a=b c\x7fé~!"); got != "a=3Db=20c=7F=C3=A9~!" || unescaped(got) != "a=b c\x7fé~!" {
		t.Errorf("in a header: %q", got)
	}
	if got := headerValue(strings.Repeat("é", 34)); !strings.HasPrefix(got, strings.Repeat("=C3=A9", 21)+
		"=~") || len(got) != 126+34 || unescaped(got) != got {
		t.Errorf("cut: %q", got)
	}
}

func TestAHeaderIsReadByTheJudgesOwnParser(t *testing.T) {
	t.Parallel()
	const value = "v=1 lsn=1/16B3748 i=3 n=4 of=12 due=0/16B3748 thru=0/16B37F0 pull=5 tl=2 sort=c " +
		"id=a=20b key=alice:42"
	want := Header{Pos: Position{1<<32 + 0x16B3748, 3}, N: 4, Of: 12, Due: 0x16B3748, Thru: 0x16B37F0,
		Pull: 5, Timeline: 2, Sort: ByCommit, ID: "a b", Key: "alice:42"}
	if h, err := ParseHeader(value + " later=1"); err != nil || h != want || h.String() != value {
		t.Errorf("read as %+v, %v", h, err)
	}
	const counted = " q=00000000000000ff c=-7 span=3 late=1"
	gap := want
	gap.Sort, gap.Sequence, gap.Counter, gap.Span, gap.Late = ByGap, 255, -7, 3, true
	text := strings.Replace(value, "sort=c", "sort=g", 1) + counted
	if h, err := ParseHeader(text); err != nil || h != gap || h.String() != text {
		t.Errorf("read as %+v, %v", h, err)
	}
	for _, wrong := range []string{
		"", "v=1", strings.Replace(value, "v=1", "v=2", 1), strings.Replace(value, "1/16B", "116B", 1),
		strings.Replace(value, "i=3", "i=x", 1),
		strings.Replace(value, "sort=c", "sort=x", 1), strings.Replace(value, " tl=2", "", 1),
		strings.Replace(value, "due=0/", "due=g/", 1),
	} {
		if h, err := ParseHeader(wrong); err == nil {
			t.Errorf("%q is read as %+v", wrong, h)
		}
	}
}

// The key that SQL would make: padded in characters, cut at the right.
func TestAKeyIsPaddedAndCutAsInSQL(t *testing.T) {
	t.Parallel()
	for counter, want := range map[string]string{
		"42": "ann:00000000000000000042", "-5": "ann:000000000000000000-5",
		"123456789012345678901": "ann:12345678901234567890",
		strings.Repeat("÷", 19): "ann:0" + strings.Repeat("÷", 19),
	} {
		row := Row{{"actor_id", "text", "ann", false}, {"counter", "numeric", counter, false}}
		if got, null := ruleKey(row, DefaultColumns); got != want || null {
			t.Errorf("%s: %q", counter, got)
		}
	}
	if _, null := ruleKey(Row{{"actor_id", "text", "", true}, {"counter", "bigint", "1", false}},
		DefaultColumns); !null {
		t.Error("a key of NULL is not NULL")
	}
}

func TestTimelinesAreReadFromTheHistoryFile(t *testing.T) {
	t.Parallel()
	at, err := timelines(3, "1\t0/3000000\tno recovery target specified\n\n2\t1/10\tx y\n")
	must.Succeed(t, err)
	for lsn, want := range map[LSN]uint32{1: 1, 0x3000000: 1, 0x3000001: 2, 1<<32 + 0x10: 2, 1<<32 +
		0x11: 3} {
		if got := at(lsn); got != want {
			t.Errorf("%v lies on %d, want %d", lsn, got, want)
		}
	}
	if _, err := timelines(2, "1 x"); err == nil {
		t.Error("a history that is none is read")
	}
}
