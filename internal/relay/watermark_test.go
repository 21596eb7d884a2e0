package relay

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

// TestAWatermarkIsReadAsItWasWritten, and what is none, or claims what can't be known yet, is refused.
func TestAWatermarkIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()
	want := Watermark{Confirmed: Confirmed{LSN: 0x1000, Timeline: 3}, Began: 0x800, At: 0x1200,
		Tally: Tally{Since: 0x100, Events: 1 << 63, Sum: 7}}
	const lsn = 0x2000
	text := want.Content()
	if got, err := ParseWatermark(text, lsn); err != nil || got != want {
		t.Errorf("%q: %+v, %v", text, got, err)
	}
	for old, new := range map[string]string{
		"v=1":              "v=2",
		"v=1 ":             "",
		"confirmed=":       "confirmd=",
		"timeline=3":       "timeline=0",
		"at=0/1200 ":       "",
		"at=0/1200":        "at=0/2000",
		"confirmed=0/1000": "confirmed=0/2001",
		"began=0/800":      "began=0/9000",
		"since=0/100":      "since=0/1201",
		"events=9":         "events=-9",
	} {
		bad := strings.Replace(text, old, new, 1)
		if w, err := ParseWatermark(bad, lsn); err == nil || w != (Watermark{}) || bad == text {
			t.Errorf("%q is read as %+v, %v", bad, w, err)
		}
	}
	if _, err := ParseWatermark(text+" x", lsn); err == nil {
		t.Error("what follows is passed over")
	}
}

// TestACommitsSumIsOfAllThatIsReplicated: of its position, its time and how many events it has.
func TestACommitsSumIsOfAllThatIsReplicated(t *testing.T) {
	t.Parallel()
	c := Commit{LSN: 5, Time: 6, Events: 7, Kind: Events}
	seen := map[uint64]bool{CommitSum(&c): true}
	for _, change := range []func(c *Commit){
		func(c *Commit) { c.LSN++ }, func(c *Commit) { c.Time++ }, func(c *Commit) { c.Events++ },
	} {
		d := c
		change(&d)
		seen[CommitSum(&d)] = true
	}
	if len(seen) != 4 {
		t.Errorf("%d sums", len(seen))
	}
	d := c
	d.Start, d.Read = 1, outbox.LSN(9) // where it is read
	if CommitSum(&d) != CommitSum(&c) {
		t.Error("it depends on where it is read")
	}
}
