package outbox

import (
	"strings"
	"testing"
)

// TestAMessageNamesItsHomeOnce, as it is written; everything else is not Outflow's.
func TestAMessageNamesItsHomeOnce(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]int{"1": 1, "9": 9, "64": 64} {
		if got, err := HomeOf(map[string][]string{HeaderOrigin: {value}}); got != want || err != nil {
			t.Errorf("%q: %d, %v", value, got, err)
		}
	}
	if got, err := HomeOf(map[string][]string{HeaderName: {"1"}}); got != 0 || err != nil {
		t.Errorf("without the header: %d, %v", got, err)
	}
	for _, value := range []string{"", "0", "65", "-1", "+1", "01", "1 ", "1 0/16B3748-3", "one",
		"18446744073709551617", strings.Repeat("1", 5000)} {
		if got, err := HomeOf(map[string][]string{HeaderOrigin: {value}}); err == nil || got != 0 {
			t.Errorf("%.40q: %d, %v", value, got, err)
		} else if len(err.Error()) > 400 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
	}
	if got, err := HomeOf(map[string][]string{HeaderOrigin: {"1", "1"}}); err == nil {
		t.Errorf("twice: %d", got)
	}
}

// TestAnOriginsIDTellsEventsApart: what differs in home, position or id has another one. No value of an id
// can make it the one of another event.
func TestAnOriginsIDTellsEventsApart(t *testing.T) {
	t.Parallel()
	at := Position{LSN: 0x16B3748, Index: 3}
	if got := string(AppendOriginID(nil, 1, at, "test")); got != "1-0/16B3748-3-9f86d081884c7d65" {
		t.Error(got)
	}
	seen := map[string]string{}
	for _, home := range []int{1, 11} {
		for _, p := range []Position{at, {LSN: at.LSN, Index: 33}, {LSN: 0x116B3748, Index: 3}} {
			for _, id := range []string{"", "a", "a-b", "-", " ", "\r\nX: y", strings.Repeat("a", 300),
				strings.Repeat("a", 301)} {
				got := string(AppendOriginID(nil, home, p, id))
				what := p.String() + " " + id
				if before, there := seen[got]; there {
					t.Errorf("%q is of %q and of %q", got, before, what)
				}
				if seen[got] = what; len(got) > 64 {
					t.Errorf("%q", got)
				}
			}
		}
	}
}
