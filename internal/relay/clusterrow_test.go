package relay

import (
	"strings"
	"testing"
)

// TestAClusterRowIsReadAsItWasWritten, and what is none, or has what its kind does not have, is refused.
func TestAClusterRowIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()
	for _, want := range []ClusterRow{
		{Kind: Published, By: 1}, // nothing yet: a sign of life
		{Kind: Published, By: 64, To: 0x1000},
		{Kind: Published, By: 64, Hello: 7, To: 0x1000},
		{Kind: Hello, By: 1, Hello: MaxHello},
		{Kind: Echo, By: 1, Home: 2, Hello: 3},
		{Kind: Yield, By: 3, Hello: 1},
		{Kind: Claim, By: 1, Home: 2, Hello: 3, To: 1},
		{Kind: Claim, By: 1, Home: 2, Hello: 3, From: 0x100, To: 0x1000},
	} {
		if got, err := ParseClusterRow(want.Content()); err != nil || got != want {
			t.Errorf("%q: %+v, %v", want.Content(), got, err)
		}
	}
	claim := ClusterRow{Kind: Claim, By: 1, Home: 2, Hello: 3, From: 0x100, To: 0x1000}
	text := claim.Content()
	for old, new := range map[string]string{
		"v=1":         "v=2",
		"v=1 ":        "",
		"claim":       "claims",
		"claim ":      " ",
		"by=1":        "by=0",
		" by=1":       " by=65",
		"by=":         "bye=",
		"home=2":      "home=1", // its own
		" home=2":     " home=0",
		"home=":       "home=0",
		"hello=3":     "hello=0",
		" hello=3":    "",
		"lo=3":        "lo=281474976710657", // MaxHello + 1
		"llo=3":       "llo=18446744073709551615",
		"from=0/100":  "from=0/1000",
		"from=0/":     "from=0/0",
		"to=0/1000":   "to=0/1000 ",
		" to=0/1000":  " to=0/1000 x=1",
		"claim by":    "hello by",
		" claim by":   " published by",
		" claim by=1": " echo by=1",
		"1 claim by":  "1 yield by",
	} {
		bad := strings.Replace(text, old, new, 1)
		if r, err := ParseClusterRow(bad); err == nil || r != (ClusterRow{}) || bad == text {
			t.Errorf("%q is read as %+v, %v", bad, r, err)
		}
	}
	if r, err := ParseClusterRow(""); err == nil {
		t.Errorf("nothing is read as %+v", r)
	}
}
