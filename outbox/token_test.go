package outbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
)

func TestATokenHoldsAnyValue(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"":                       "=",
		"=":                      "=3D",
		"6f9619ff-8b86_D0Z":      "6f9619ff-8b86_D0Z",
		"a.b c*>":                "a=2Eb=20c=2A=3E",
		"\x00\n\xff":             "=00=0A=FF",
		"né":                     "n=C3=A9",
		"/:@|%+":                 "=2F=3A=40=7C=25=2B",
		strings.Repeat("a", 200): strings.Repeat("a", 200),
		strings.Repeat("é", 33):  strings.Repeat("=C3=A9", 33), // 198 bytes
	} {
		if got := string(AppendToken([]byte("x."), value)); got != "x."+want {
			t.Errorf("%q becomes %q, want %q", value, got, want)
		}
	}
}

// A cut token keeps as many whole characters and escapes as fit in 128 bytes.
func TestALongTokenIsCutAtACharacter(t *testing.T) {
	t.Parallel()
	for value, kept := range map[string]string{
		strings.Repeat("a", 201):  strings.Repeat("a", 128),
		strings.Repeat("a", 5000): strings.Repeat("a", 128),
		// 126 bytes, the next would make 129
		strings.Repeat(".", 67):                            strings.Repeat("=2E", 42),
		strings.Repeat("a", 127) + strings.Repeat(".", 30): strings.Repeat("a", 127),
		strings.Repeat("a", 125) + strings.Repeat(".", 30): strings.Repeat("a", 125) + "=2E",
	} {
		sum := sha256.Sum256([]byte(value))
		want := kept + "=~" + hex.EncodeToString(sum[:])[:32]
		if got := string(AppendToken(nil, value)); got != want {
			t.Errorf("%d bytes become %q, want %q", len(value), got, want)
		}
	}
}

func TestDifferentValuesHaveDifferentTokens(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	long := strings.Repeat("x", 300)
	values := []string{"", "=", "=3D", "3D", "a", "A", "a.", "a=2E", long, long + "x", long[:299] + "y"}
	sum := sha256.Sum256([]byte(long))
	// the encoding of another, as a value
	values = append(values, long[:128]+"=~"+hex.EncodeToString(sum[:16]))
	for _, v := range values {
		token := string(AppendToken(nil, v))
		if other, ok := seen[token]; ok {
			t.Errorf("%q and %q both become %q", v, other, token)
		}
		seen[token] = v
	}
}

func FuzzToken(f *testing.F) {
	for _, s := range []string{"", "doc", "a.b", "=~", strings.Repeat("é", 100), "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		token := string(AppendToken(nil, value))
		if token == "" || len(token) > maxToken || strings.ContainsAny(token, ". *>\t\r\n") {
			t.Fatalf("%q becomes %q", value, token)
		}
		back, ok := unescape(token)
		switch {
		case value == "":
			if token != "=" {
				t.Fatalf("empty becomes %q", token)
			}
		case strings.Contains(token, "=~"):
			if ok || len(token) > cutToken+34 {
				t.Fatalf("cut one of %d bytes: %q", len(token), token)
			}
		case !ok || back != value:
			t.Fatalf("%q becomes %q and then %q", value, token, back)
		}
	})
}

func ExampleAppendToken() {
	fmt.Printf("%s\n", AppendToken([]byte("orders."), "eu/42"))
	// Output: orders.eu=2F42
}

// Other values make other tokens, all of them printable.
func FuzzTokensDiffer(f *testing.F) {
	f.Add("a.b", "a=2Eb")
	f.Add("", "=")
	f.Add(strings.Repeat("x", 201), strings.Repeat("x", 128)+"=~")
	f.Fuzz(func(t *testing.T, a, b string) {
		one, two := string(AppendToken(nil, a)), string(AppendToken(nil, b))
		if (one == two) != (a == b) {
			t.Fatalf("%q and %q become %q and %q", a, b, one, two)
		}
		for i := range len(one) {
			if one[i] <= ' ' || one[i] > '~' {
				t.Fatalf("%q becomes %q", a, one)
			}
		}
	})
}

func TestTokensAreReadBack(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", 127) + strings.Repeat(".", 30)
	for _, value := range []string{"", "=", "a b.*", "\x00\xff", "né", "=~", strings.Repeat("a", 200)} {
		if got, ok := ParseToken(string(AppendToken(nil, value))); !ok || got != value {
			t.Errorf("%q comes back as %q, %v", value, got, ok)
		}
	}
	for _, value := range []string{long, strings.Repeat(".", 67), strings.Repeat("x", 5000)} {
		token := string(AppendToken(nil, value))
		if got, ok := ParseToken(token); !ok || got != token {
			t.Errorf("the cut token %q comes back as %q, %v", token, got, ok)
		}
	}
	for _, token := range []string{
		"a.b", "a b", "=2e", "=2", "a=", "=41", "é", "=~", "a=~" + strings.Repeat("0", 32),
		strings.Repeat("a", 201), "",
		strings.Repeat("a", 128) + "=~" + strings.Repeat("0", 31), strings.Repeat("a", 128) + "=~" +
			strings.Repeat("G", 32),
	} {
		if got, ok := ParseToken(token); ok {
			t.Errorf("%q is the token of no value, and comes back as %q", token, got)
		}
	}
}

func FuzzParseToken(f *testing.F) {
	for _, seed := range []string{"", "=", "a=2Eb", "=~", strings.Repeat("a", 300)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		token := string(AppendToken(nil, s))
		if value, ok := ParseToken(token); !ok || value != s && value != token {
			t.Errorf("%q: %q, %v", s, value, ok)
		}
		if value, ok := ParseToken(s); ok && value != s && string(AppendToken(nil, value)) != s {
			t.Errorf("%q is read as %q, of which it is not the token", s, value)
		}
	})
}
