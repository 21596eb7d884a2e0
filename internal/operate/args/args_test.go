package args

import (
	"testing"
	"time"
)

func TestTimesAreAgesOrInstants(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Time{
		"90m": now.Add(-90 * time.Minute), "7d": now.Add(-7 * 24 * time.Hour),
		"2026-01-01T00:00:00Z": time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		if got, err := Time(text, now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "-1h", "d", "1.5d", "2026-01-01", "x"} {
		if got, err := Time(text, now); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}
