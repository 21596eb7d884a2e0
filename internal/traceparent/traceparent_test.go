package traceparent

import (
	"strings"
	"testing"
)

const valid = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func TestWhatIsValidIsRead(t *testing.T) {
	t.Parallel()
	for text, sampled := range map[string]bool{
		valid:                                    true,
		strings.TrimSuffix(valid, "01") + "00":   false,
		strings.TrimSuffix(valid, "01") + "03":   true,  // with the random flag of level 2
		strings.TrimSuffix(valid, "01") + "fe":   false, // flags that nobody knows yet
		"cc" + valid[2:]:                         true,  // a later version
		"cc" + valid[2:] + "-what-comes-then...": true,
	} {
		c, ok := Parse(text)
		if !ok || c.Sampled() != sampled || c.TraceID[0] != 0x0A || c.TraceID[15] != 0x9C ||
			c.SpanID[0] != 0xB7 || c.SpanID[7] != 0x31 {
			t.Errorf("%s: %+v, %t", text, c, ok)
		}
	}
}

func TestWhatIsNotValidIsRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", "00", valid[:54], valid + "0", valid + "-", valid + "-00", " " + valid, valid + " ",
		strings.ToUpper(valid), "ff" + valid[2:], "0g" + valid[2:], "01" + valid[2:] + "x",
		strings.Replace(valid, "0af7651916cd43dd8448eb211c80319c", strings.Repeat("0", 32), 1),
		strings.Replace(valid, "b7ad6b7169203331", strings.Repeat("0", 16), 1),
		strings.Replace(valid, "b7ad", "B7ad", 1), strings.Replace(valid, "-", "_", 1),
		strings.Replace(valid, "-b7", "_b7", 1), strings.Replace(valid, "-01", "_01", 1),
		strings.Replace(valid, "-01", "-0x", 1), strings.Replace(valid, "0af7", "é0a", 1),
	} {
		if c, ok := Parse(text); ok || c != (Context{}) {
			t.Errorf("%q: %+v, %t", text, c, ok)
		}
	}
}

func TestReadingATraceparentAllocatesNothing(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() { Parse(valid) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
