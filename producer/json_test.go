package producer

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

// opinion asks PostgreSQL itself what it makes of a text.
type opinion struct {
	d *database
}

// of returns how long a text is printed in the type, or PostgreSQL's refusal.
func (o opinion) of(typ string, text []byte) (size int, err error) {
	err = o.d.sql.QueryRowContext(context.Background(), "SELECT octet_length(($1::text::"+typ+")::text)",
		string(text)).Scan(&size)
	return size, err
}

// agree holds the check against PostgreSQL: it passes what PostgreSQL takes and nothing else, and says how
// long it is printed.
func (o opinion) agree(t *testing.T, text []byte) {
	t.Helper()
	for _, c := range []column{{kind: document, typ: "json"}, {kind: documentB, typ: "jsonb"}} {
		size, f := c.checkJSON(text, -1)
		if f == nil {
			f = c.check(string(text))
		}
		want, err := o.of(c.typ, text)
		switch {
		case f == nil && err != nil:
			t.Errorf("%s %q passed, PostgreSQL says %v", c.typ, text, err)
		case f != nil && err == nil && strings.Contains(f.problem, "a number is beyond") &&
			strings.Contains(string(text), fmt.Sprint(maxExponent+1)):
			// from PostgreSQL 16 on
		case f != nil && err == nil && !strings.Contains(f.problem, "too deep"):
			t.Errorf("%s %q was refused (%s), PostgreSQL takes it", c.typ, text, f.problem)
		case f == nil && size != want:
			t.Errorf("%s %q is %d bytes, PostgreSQL prints %d", c.typ, text, size, want)
		}
	}
}

// jsonTexts are what a careless hand would judge otherwise than PostgreSQL.
func jsonTexts() []string {
	all := []string{
		"", " ", "{}", "[]", " [ ] ", "null", "true", "false", `""`, "0", "-0", "-0.0", "0.10", "1.10",
		"9007199254740993", "-1.5e3", "1e-5", "12.5E+2",
		"1e30", "1E-30", "100e-2", "0.001e2", "0e5", "0.0e-3", "00", "01", "-", "+1", ".5", "1.", "1e", "1e+",
		"1a", "1.2.3", "[1-2]", "0x10", "NaN", "Infinity",
		"tru", "trueish", "True", "nul", "true false", "{} x", "[1,]", "[,1]", "[1 2]", "[", "]", "{", "}",
		`{"a"}`, `{"a":}`, `{"a":1,}`, `{a:1}`, `{1:2}`,
		`{"a":1 "b":2}`, `{"a":1,"a":2}`, `{"a":1,"\u0061":{"b":[],"b":[1,{"c":null}]},"aa":2,"a":"xyz"}`,
		`{"":{"":""}}`, `'a'`, `"a`, `"\"`, `"\x"`,
		`"\u12"`, `"\u12G4"`, `"\u0000"`, `{"\u0000":1}`, `"\u00e9\u20AC"`, `"\ud834\udd1e"`, `"\ud834"`,
		`"\udd1e"`, `"\ud834\ud834"`, `"\ud834x"`, `"\ud834\n"`,
		`"\ud834\u0041"`, `"\u0001\u001f\u007f"`, `"\b\f\n\r\t\/\\\""`, "\"\x01\"", "\"\n\"", "\"\x7f\"",
		"\"\x00\"", "\xff", "\"\xc3\"", "\"\xed\xa0\x80\"", "\"é☃𝄞\"",
		"\ufeff{}", "\v1", "\f1", "\u00a01", "1\x00", " \t\r\n1 \t\r\n", "[1,2 , 3]",
		`{"b":1,  "a" : [ {} , [] ]}`, "\"\u2028\"",
		strings.Repeat("[", 1000) + strings.Repeat("]", 1000), strings.Repeat("[", 1001) +
			strings.Repeat("]", 1001),
		strings.Repeat(`{"a":`, 1000) + "1" + strings.Repeat("}", 1000), strings.Repeat("[", 500),
		strings.Repeat("1", 131072), strings.Repeat("1", 131073), "0." + strings.Repeat("0", 16382) + "1",
		"0." + strings.Repeat("0", 16383) + "1",
		"1." + strings.Repeat("0", 16384), "0." + strings.Repeat("0", 16384),
	}
	for _, mantissa := range []string{"1", "0", "10", "0.1", "0.0001", "12.5", "-9", "-0", "123456"} {
		for _, e := range []int{
			131066, 131068, 131070, 131071, 131072, 131073, 131074, 131075, 131076, 200000, -16377, -16379,
			-16380, -16382, -16383, -16384, -20000,
			1<<30 - 3, 1<<30 - 2, 1<<30 - 1, 1 << 30, 1<<31 - 1, 1 << 31, 1 << 40, -(1<<30 - 2), -(1<<30 - 1),
		} {
			all = append(all, fmt.Sprintf("%se%d", mantissa, e))
		}
	}
	return append(all, "1e"+strings.Repeat("9", 30), "0e"+strings.Repeat("9", 30), "1e-"+
		strings.Repeat("9", 30), "1e"+strings.Repeat("0", 30)+"5")
}

// TestJSONIsJudgedAsByPostgreSQL holds the check of payloads against PostgreSQL's own opinion, in both types,
// with the printed size.
func TestJSONIsJudgedAsByPostgreSQL(t *testing.T) {
	t.Parallel()
	o := opinion{newDatabase(t)}
	for _, text := range jsonTexts() {
		o.agree(t, []byte(text))
	}
}

func FuzzJSONIsJudgedAsByPostgreSQL(f *testing.F) {
	for _, text := range jsonTexts() {
		f.Add([]byte(text))
	}
	o := opinion{newDatabase(f)}
	f.Fuzz(func(t *testing.T, text []byte) { o.agree(t, text) })
}
