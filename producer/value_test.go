package producer

import (
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"math"
	"math/big"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

type (
	named  string
	tiny   int16
	digest []byte
	money  struct{ cents int64 } // a driver.Valuer
	chain  struct{}              // one whose value is another one
	level  int                   // an encoding.TextMarshaler that is a number otherwise
	broken struct{}              // one that can't
)

var errNoText = errors.New("it has none today")

func (m money) Value() (driver.Value, error) {
	if m.cents < 0 {
		return nil, errNoText
	}
	return float64(m.cents) / 100, nil
}

func (chain) Value() (driver.Value, error) { return money{1}, nil }

func (l level) MarshalText() ([]byte, error)  { return []byte(strings.Repeat("i", int(l))), nil }
func (broken) MarshalText() ([]byte, error)   { return []byte("half"), errNoText }
func to[T any](v T) *T                        { return &v }
func at(offset int, t time.Time) time.Time    { return t.In(time.FixedZone("LMT", offset)) }
func day(sec, nsec int) time.Time             { return time.Date(1930, 5, 1, 12, 0, sec, nsec, time.UTC) }
func columnOf(kind string) (name, sql string) { return strings.ReplaceAll(kind, " ", "_"), kind }

// TestValuesArePrintedAsPostgreSQLPrintsThem: what PostgreSQL has of each kind of Go value in a further
// column, as it prints it.
func TestValuesArePrintedAsPostgreSQLPrintsThem(t *testing.T) {
	t.Parallel()
	kinds := []string{"text", "bigint", "smallint", "numeric", "real", "double precision", "boolean", "bytea",
		"jsonb", "json", "inet", "timestamptz", "timestamp"}
	table := "CREATE TABLE outbox (doc_id text, payload text"
	for _, kind := range kinds {
		name, kind := columnOf(kind)
		table += ", " + name + " " + kind
	}
	d := newDatabase(t, table+")", "SET TimeZone = 'UTC'", "SET DateStyle = 'ISO'",
		"SET extra_float_digits = 1")
	const null = "<null>"
	var noString *string
	var noMoney *money
	for _, c := range []struct {
		kind  string
		value any
		want  string
	}{
		{"text", nil, null},
		{"text", "", ""},
		{"text", `a"b\c,{}'NULL`, `a"b\c,{}'NULL`},
		{"text", "NULL", "NULL"},
		{"text", named("n"), "n"},
		{"text", []byte("bytes"), "bytes"},
		{"text", []byte(nil), null},
		{"text", noString, null},
		{"text", to("p"), "p"},
		{"text", to(to("pp")), "pp"},
		{"text", to(noString), null},
		{"text", level(3), "iii"},
		{"text", to(level(2)), "ii"},
		{"text", int64(-5), "-5"},
		{"text", true, "true"},
		{"text", sql.NullString{String: "s", Valid: true}, "s"},
		{"text", sql.NullString{String: "s"}, null},
		{"text", &sql.NullString{String: "s", Valid: true}, "s"},
		{"bigint", math.MinInt64, "-9223372036854775808"},
		{"bigint", uint8(200), "200"},
		{"bigint", uint32(math.MaxUint32), "4294967295"},
		{"bigint", sql.NullInt64{Int64: 7, Valid: true}, "7"},
		{"bigint", float64(5), "5"},
		{"smallint", tiny(math.MinInt16), "-32768"},
		{"smallint", to(int16(math.MaxInt16)), "32767"},
		{"numeric", uint64(math.MaxUint64), "18446744073709551615"},
		{"numeric", new(big.Int).Lsh(big.NewInt(1), 100), "1267650600228229401496703205376"},
		{"numeric", money{1999}, "19.99"},
		{"numeric", &money{5}, "0.05"},
		{"numeric", noMoney, null},
		{"numeric", 1e21, "1000000000000000000000"},
		{"real", float32(0.1), "0.1"},
		{"double precision", float32(0.1), "0.1"},
		{"double precision", 0.1, "0.1"},
		{"double precision", math.Pi, "3.141592653589793"},
		{"double precision", math.MaxFloat64, "1.7976931348623157e+308"},
		{"double precision", math.SmallestNonzeroFloat64, "5e-324"},
		{"double precision", math.Copysign(0, -1), "-0"},
		{"double precision", math.Inf(1), "Infinity"},
		{"double precision", math.Inf(-1), "-Infinity"},
		{"double precision", math.NaN(), "NaN"},
		{"boolean", false, "false"},
		{"boolean", to(true), "true"},
		{"bytea", []byte{0, 0xFF, '\\'}, `\x00ff5c`},
		{"bytea", digest{1}, `\x01`},
		{"bytea", to(digest{2}), `\x02`},
		{"bytea", []byte{}, `\x`},
		{"bytea", digest(nil), null},
		{"bytea", []byte(nil), null},
		{"jsonb", json.RawMessage(`{"b":1, "a":1.10}`), `{"a": 1.10, "b": 1}`},
		{"jsonb", to(json.RawMessage(`[1]`)), `[1]`},
		{"jsonb", json.RawMessage(nil), null},
		{"jsonb", "null", "null"},
		{"json", json.RawMessage(`{"b":1, "a":1.10}`), `{"b":1, "a":1.10}`},
		{"json", []byte(`[ ]`), `[ ]`},
		{"inet", netip.MustParseAddr("10.0.0.1"), "10.0.0.1/32"},
		{"inet", to(netip.MustParsePrefix("fe80::/10")), "fe80::/10"},
		{"timestamptz", day(3, 4000), "1930-05-01 12:00:03.000004+00"},
		{"timestamptz", at(-5*3600, day(0, 0)), "1930-05-01 12:00:00+00"},
		// Amsterdam's, 19 minutes and 32 seconds
		{"timestamptz", at(1172, day(0, 0)), "1930-05-01 12:00:00+00"},
		{"timestamptz", to(at(1172, day(0, 0))), "1930-05-01 12:00:00+00"},
		{"timestamptz", to(to(at(1172, day(0, 0)))), "1930-05-01 12:00:00+00"},
		{"timestamptz", sql.NullTime{Time: at(-1172, day(0, 0)), Valid: true}, "1930-05-01 12:00:00+00"},
		{"timestamptz", time.Date(12026, 1, 1, 0, 0, 0, 0, time.UTC), "12026-01-01 00:00:00+00"},
		{"timestamptz", to(time.Date(12026, 1, 1, 0, 0, 0, 0, time.UTC)), "12026-01-01 00:00:00+00"},
		{"timestamptz", time.Time{}, "0001-01-01 00:00:00+00"},
		{"timestamptz", (*time.Time)(nil), null},
		{"timestamp", at(3600, day(0, 0)), "1930-05-01 13:00:00"}, // as a clock there shows it
	} {
		name, _ := columnOf(c.kind)
		o := outboxOf(t, Config{})
		if _, err := d.pgx(t.Context(), o,
			Event{Document: "d", Payload: []byte("p"), Columns: map[string]any{name: c.value}}); err != nil {
			t.Errorf("%s of %T(%v): %v", c.kind, c.value, c.value, err)
			continue
		}
		if got := d.texts("SELECT coalesce(" + name + "::text, '" + null + "') FROM outbox"); !slices.Equal(
			got, []string{c.want}) {
			t.Errorf("%s of %T(%v): the table has %q, want %q", c.kind, c.value, c.value, got, c.want)
		}
		d.exec("DELETE FROM outbox")
	}

	for _, c := range []struct {
		kind  string
		value any
		want  string // of the error
	}{
		{"text", struct{}{}, "a struct {} is no text"},
		{"text", []int{1}, "a []int is no text"},
		{"text", to(struct{}{}), "a struct {} is no text"},
		{"text", chain{}, "its Value method returns a producer.money"},
		{"text", broken{}, errNoText.Error()},
		{"numeric", money{-1}, errNoText.Error()},
		{"text", "a\x00b", "it has a byte 0, at 1"},
		{"text", "ab\xff", "not valid UTF-8 at byte 2"},
		{"text", []byte("\uFFFD\xc3("), "not valid UTF-8 at byte 3"},
		{"bytea", "text", "Give a []byte"},
		{"bigint", uint64(math.MaxUint64), "not a whole number of 64 bits"},
		{"bigint", 5.5, "not a whole number of 64 bits"},
		{"smallint", 40_000, "not a whole number of 16 bits"},
		{"jsonb", `{"a":`, "no value where one must be, at byte 5"},
	} {
		name, _ := columnOf(c.kind)
		_, err := d.pgx(t.Context(), outboxOf(t, Config{}),
			Event{Document: "d", Payload: []byte("p"), Columns: map[string]any{name: c.value}})
		var bad *Invalid
		if !errors.As(err, &bad) || bad.Field != `Columns["`+name+`"]` ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s of %T: %v, want %q", c.kind, c.value, err, c.want)
		}
	}
	if got := d.texts("SELECT doc_id FROM outbox"); len(got) > 0 {
		t.Errorf("%d rows were written", len(got))
	}
}
