package consumer

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
)

func suffix(s string) func([]byte) ([]byte, error) {
	return func(data []byte) ([]byte, error) { return append(data, s...), nil }
}

func ofData(data string) *Event {
	return &Event{Data: []byte(data), Header: nats.Header{}}
}

func poison(err error) bool { return adviceOf(err).how == parked }

func someSchema() *Schema {
	return &Schema{
		Current: "3", From: HeaderVersion("schema_version"), Missing: "1",
		Up: map[string]Up{"1": {"2", suffix("+2")}, "2": {"3", suffix("+3")}},
	}
}

func TestUpcastersAreCalledOneAfterTheOther(t *testing.T) {
	t.Parallel()
	s := someSchema()
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	for version, want := range map[string]string{"1": "x+2+3", "2": "x+3", "3": "x", "": "x+2+3"} {
		e := ofData("x")
		if version != "" {
			e.Header["schema_version"] = []string{version}
		}
		if err := s.upcast(e); err != nil || string(e.Data) != want || e.Schema != "3" {
			t.Errorf("version %q: %s, schema %q, %v; want %s", version, e.Data, e.Schema, err, want)
		}
	}
	// it writes to what it gets
	s.Up["1"] = Up{"2", func(data []byte) ([]byte, error) { data[0]++; return data, nil }}
	e, read := ofData("x"), ""
	h := s.before(func(_ context.Context, _ pgx.Tx, e *Event) error {
		read += string(e.Data) + " "
		return nil
	})
	err := errors.Join(h(t.Context(), nil, e), h(t.Context(), nil, e)) // as middleware may
	if err != nil || read != "y+3 y+3 " || string(e.Data) != "x" {
		t.Errorf("the handler read %sof %s, %v", read, e.Data, err)
	}
	dead := &Event{Data: []byte("x"), DeadLetter: "too_large"}
	if err := s.upcast(dead); err != nil || string(dead.Data) != "x" || dead.Schema != "" {
		t.Errorf("a dead letter became %s, %v", dead.Data, err)
	}
	if err := (*Schema)(nil).upcast(dead); err != nil {
		t.Error(err)
	}
}

// What no attempt would change is poison at once.
func TestWhatNoUpcastCouldChangeIsPoison(t *testing.T) {
	t.Parallel()
	refuse := errors.New("refused")
	s := someSchema()
	s.Up["0"] = Up{"1", func([]byte) ([]byte, error) { return nil, refuse }}
	s.Up["00"] = Up{"1", func(b []byte) ([]byte, error) { return b[:cap(b)+1], nil }}
	for version, want := range map[string]string{
		"4":  `unknown version of the payload: "4". Known are 0, 00, 1, 2, 3; add an upcaster`,
		"0":  `upcaster from version "0" to "1": refused`,
		"00": `upcaster from version "00" to "1": panic: runtime error: slice bounds`,
	} {
		e := ofData("x")
		e.Header["schema_version"] = []string{version}
		err := s.upcast(e)
		if !poison(err) || !strings.Contains(err.Error(), want) || string(e.Data) != "x" {
			t.Errorf("version %s: poison %v, data %s: %v", version, poison(err), e.Data, err)
		}
		if version == "4" && !errors.Is(err, ErrUnknownVersion) || version == "0" && !errors.Is(err, refuse) {
			t.Errorf("version %s: %v hides its cause", version, err)
		}
	}
	s.Missing = ""
	err := s.upcast(&Event{})
	if !poison(err) || !errors.Is(err, ErrUnknownVersion) || !strings.Contains(err.Error(), "Missing") {
		t.Errorf("no version: %v", err)
	}
	s.From = func(nats.Header, []byte) (string, error) { panic("from") }
	if err := s.upcast(&Event{}); !poison(err) ||
		!strings.Contains(err.Error(), "panic: from") {
		t.Errorf("a panic of From: %v", err)
	}
}

func TestFieldVersionReadsAMember(t *testing.T) {
	t.Parallel()
	from := FieldVersion("v")
	for data, want := range map[string]string{
		`{"v":"2"}`: "2", `{"v":2}`: "2", `{"v": 1.10 }`: "1.10", `{"v":null}`: "", `{}`: "", `{"V":1}`: "",
		`{"a":{"v":1}}`: "",
		`{"v":"é"}`:     "é",
	} {
		if got, err := from(nil, []byte(data)); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", data, got, err, want)
		}
	}
	for _, data := range []string{``, `[]`, `{"v":true}`, `{"v":[1]}`, `{"v":{}}`, `{"v":1`, `7`} {
		if got, err := from(nil, []byte(data)); err == nil {
			t.Errorf("%s: version %q", data, got)
		}
	}
}

func TestImpossibleSchemasAreRefused(t *testing.T) {
	t.Parallel()
	do := suffix("")
	for want, change := range map[string]func(*Schema){
		"Current is empty":              func(s *Schema) { s.Current = "" },
		"From is nil":                   func(s *Schema) { s.From = nil },
		`Missing is "9"`:                func(s *Schema) { s.Missing = "9" },
		`version "3", which is Current`: func(s *Schema) { s.Up["3"] = Up{"4", do} },
		`version "0" leads to "7"`:      func(s *Schema) { s.Up["0"] = Up{"7", do} },
		`version "0 to 00" leads back to "0"`: func(s *Schema) {
			s.Up["0"], s.Up["00"] = Up{"00", do}, Up{"0", do}
		},
		`version "0" leads back to "0"`:             func(s *Schema) { s.Up["0"] = Up{"0", do} },
		`version "0" has no function Do`:            func(s *Schema) { s.Up["0"] = Up{To: "1"} },
		`version "0" leads to "", which is neither`: func(s *Schema) { s.Up["0"] = Up{"", do} },
	} {
		s := someSchema()
		change(s)
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func FuzzFieldVersion(f *testing.F) {
	f.Add([]byte(`{"v":"2"}`))
	f.Add([]byte(`{"v":2,"v":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := someSchema()
		s.From = FieldVersion("v")
		if err := s.upcast(&Event{Data: data}); err != nil && !poison(err) {
			t.Error(err)
		}
	})
}
