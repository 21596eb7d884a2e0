package doctor

import (
	"math"
	"strconv"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/replication/postgres"
)

func seconds(n float64) time.Duration {
	if n >= float64(math.MaxInt64)/float64(time.Second) {
		return math.MaxInt64
	}
	return time.Duration(n * float64(time.Second))
}

func short(d time.Duration) time.Duration {
	if d > time.Second {
		return d.Round(10 * time.Millisecond)
	}
	return d.Round(10 * time.Microsecond)
}

// size prints bytes; what is below 0 is none.
func size(n int64) string { return units.Size(uint64(max(n, 0))) }

// number is a count that ends at a limit.
func number(n, limit int) string {
	if n >= limit {
		return strconv.Itoa(limit) + " or more"
	}
	return strconv.Itoa(n)
}

func numberOf(text string) int {
	n, _ := strconv.Atoi(text)
	return n
}

func quote(name string) string { return postgres.Quote(name) }

func quoted(value string) string {
	if value == "" {
		return "not set"
	}
	return value
}
