package decoder

import (
	"strings"
	"testing"
)

func TestAKeyIsComputedFromActorAndCounter(t *testing.T) {
	t.Parallel()
	var a arena
	for _, c := range []struct{ actor, counter, want string }{
		{"0", "1", "0:00000000000000000001"},
		{"0", "-5", "0:000000000000000000-5"},
		{"", "", ":00000000000000000000"},
		{"a:b", "9223372036854775807", "a:b:09223372036854775807"},
		{"a", "-9223372036854775808", "a:-9223372036854775808"},
		{"a", "12345678901234567890", "a:12345678901234567890"},
		{"a", "123456789012345678901", "a:12345678901234567890"},
		{"é", "ÿ2", "é:000000000000000000ÿ2"},
		{"a", strings.Repeat("é", 20), "a:" + strings.Repeat("é", 20)},
		{"a", strings.Repeat("é", 21), "a:" + strings.Repeat("é", 20)},
		{"a", strings.Repeat("😀", 19), "a:0" + strings.Repeat("😀", 19)},
	} {
		if got := a.key(c.actor, c.counter); got != c.want {
			t.Errorf("key(%q, %q) = %q, want %q", c.actor, c.counter, got, c.want)
		}
	}
}

// What PostgreSQL casts to text differently from how it prints it.
func TestAKeyIsComputedAsPostgreSQLCasts(t *testing.T) {
	t.Parallel()
	cfg := config
	cfg.ID = ""
	cols := func(actor, counter uint32) []col {
		return []col{{"doc_id", oidText}, {"payload", oidText}, {"actor_id", actor}, {"counter", counter}}
	}
	for _, c := range []struct {
		actor, counter uint32
		a, n           val
		want           string
	}{
		{oidBpchar, oidBpchar, txt("ab   "), txt("7 "), "ab:00000000000000000007"},
		{oidBpchar, oidInt8, bin("ab   "), bin("\x00\x00\x00\x00\x00\x00\x00\x07"),
			"ab:00000000000000000007"},
		{oidBool, oidBool, txt("t"), bin("\x00"), "true:000000000000000false"},
		{oidText, oidText, txt("ab "), txt("7 "), "ab :0000000000000000007 "},
	} {
		e := decodeRow(t, cfg, cols(c.actor, c.counter), txt("rustcode"), txt("{}"), c.a, c.n)
		if e.Key != c.want {
			t.Errorf("%q and %q: %q, want %q", c.a.data, c.n.data, e.Key, c.want)
		}
	}
}
