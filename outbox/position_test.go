package outbox

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
)

func TestLSNsAreReadAndPrinted(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]LSN{
		"0/0": 0, "0/16B3748": 0x16B3748, "1/0": 1 << 32, "16/B374D848": 0x16_B374D848,
		"FFFFFFFF/FFFFFFFF": 1<<64 - 1,
	} {
		got, err := ParseLSN(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%s is read as %v (%d), %v", text, got, got, err)
		}
	}
	if got, err := ParseLSN("a/00ff"); err != nil || got.String() != "A/FF" {
		t.Errorf("got %v, %v", got, err)
	}
	for _, text := range []string{"", "/", "0/", "/0", "0", "0/0/0", "123456789/0", "0/123456789", "x/0",
		"0/-1", "+1/0", " 0/0", "0x1/0"} {
		if got, err := ParseLSN(text); err == nil {
			t.Errorf("%q is taken as %v", text, got)
		}
	}
}

func FuzzLSN(f *testing.F) {
	f.Add("16/B374D848")
	f.Fuzz(func(t *testing.T, text string) {
		l, err := ParseLSN(text)
		if err != nil {
			return
		}
		if back, err := ParseLSN(l.String()); err != nil || back != l {
			t.Fatalf("%q: %v became %v, %v", text, l, back, err)
		}
		if l.String() != fmt.Sprintf("%X/%X", uint32(l>>32), uint32(l)) {
			t.Fatalf("%q is printed as %v", text, l)
		}
	})
}

func TestPositionsAreOrderedByLSNThenIndex(t *testing.T) {
	t.Parallel()
	want := []Position{{}, {0, 1}, {1, 0}, {1, 1 << 31}, {1 << 40, 0}, {1<<64 - 1, 1<<32 - 1}}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, Position.Compare)
	if !slices.Equal(got, want) {
		t.Errorf("sorted to %v", got)
	}
}

func TestPositionsSurviveTheirText(t *testing.T) {
	t.Parallel()
	p := Position{0x16B3748, 1<<32 - 1}
	if p.String() != "0/16B3748-4294967295" {
		t.Errorf("got %v", p)
	}
	var back struct{ P Position }
	text, err := json.Marshal(struct{ P Position }{p})
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &back); err != nil || back.P != p {
		t.Errorf("%s became %v, %v", text, back.P, err)
	}
	for _, text := range []string{"", "0/1", "0/1-", "0/1-x", "0/1-4294967296", "1-1", "0/1-1-1", "0/1--1"} {
		if p.UnmarshalText([]byte(text)) == nil {
			t.Errorf("%q is taken as %v", text, p)
		}
	}
}

func FuzzPosition(f *testing.F) {
	f.Add("0/16B3748-3")
	f.Add("FFFFFFFF/FFFFFFFF-4294967295")
	f.Fuzz(func(t *testing.T, text string) {
		var p, back Position
		if p.UnmarshalText([]byte(text)) != nil {
			return
		}
		if err := back.UnmarshalText([]byte(p.String())); err != nil || back != p {
			t.Fatalf("%q: %v became %v, %v", text, p, back, err)
		}
	})
}
