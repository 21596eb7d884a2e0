// Package units prints figures for people: sizes, counts, durations and rates.
package units

import (
	"fmt"
	"math"
	"strconv"
	"time"
)

// Size prints bytes with a binary unit.
func Size(n uint64) string {
	const units = "KMGTPE"
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	v, u := float64(n)/1024, 0
	for v >= 999.5 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	if v >= 100 {
		return fmt.Sprintf("%.0f %ciB", v, units[u])
	}
	return fmt.Sprintf("%.1f %ciB", v, units[u])
}

// Count prints a number with a comma between thousands.
func Count[N int | int64 | uint64](n N) string {
	s := strconv.FormatUint(uint64(max(n, 0)), 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Of prints a number of things: "1 row", "2 rows".
func Of[N int | int64 | uint64](n N, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// Agree returns the verb of so many things: "is" of one, "are" of several.
func Agree[N int | int64 | uint64](n N, one, several string) string {
	if n == 1 {
		return one
	}
	return several
}

// Duration prints a duration in the two largest units that say something.
func Duration(d time.Duration) string {
	const day = 24 * time.Hour
	two := func(n, small time.Duration, large, unit string) string {
		if small == 0 {
			return fmt.Sprintf("%d %s", n, large)
		}
		return fmt.Sprintf("%d %s %d %s", n, large, small, unit)
	}
	switch d = max(d, 0); {
	case d < time.Second:
		return Latency(d)
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return two(d/time.Minute, d%time.Minute/time.Second, "min", "s")
	case d < day:
		return two(d/time.Hour, d%time.Hour/time.Minute, "h", "min")
	}
	return two(d/day, d%day/time.Hour, "d", "h")
}

// Latency prints a short duration to two or three digits.
func Latency(d time.Duration) string {
	switch {
	case d <= 0:
		return "0 s"
	case d < time.Millisecond:
		return fmt.Sprintf("%.2f ms", d.Seconds()*1e3)
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", d.Seconds()*1e3)
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1e3)
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// Rate prints how many a second.
func Rate(n float64) string {
	switch {
	case n <= 0 || math.IsNaN(n):
		return "0"
	case n < 10:
		return strconv.FormatFloat(n, 'f', 1, 64)
	}
	return Count(int64(math.Round(n)))
}
