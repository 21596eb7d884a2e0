package units

import (
	"testing"
	"time"
)

func TestFiguresHaveFewDigitsAndAUnit(t *testing.T) {
	t.Parallel()
	for got, want := range map[string]string{
		Size(999): "999 B", Size(1000): "1.0 KiB", Size(1023 << 10): "1.0 MiB", Size(25 << 20): "25.0 MiB",
		Size(140 << 20): "140 MiB", Count(65536): "65,536", Count(0): "0",
		Count(uint64(1 << 40)):      "1,099,511,627,776",
		Duration(192 * time.Second): "3 min 12 s", Duration(20400 * time.Second): "5 h 40 min",
		Duration(147 * time.Hour): "6 d 3 h", Duration(60 * time.Second): "1 min",
		Latency(410 * time.Microsecond):  "0.41 ms",
		Latency(2500 * time.Microsecond): "2.5 ms", Rate(0.25): "0.2", Rate(1234.4): "1,234",
		Of(0, "row"): "0 rows", Of(uint64(1), "row"): "1 row", Of(int64(1200), "row"): "1200 rows",
		Agree(1, "is", "are"): "is", Agree(2, "was", "were"): "were",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
