package bench

import (
	"math"
	"slices"
	"time"
)

// Figure is what several repetitions gave.
type Figure struct {
	Median float64   `json:"median"`
	Low    float64   `json:"low"`
	High   float64   `json:"high"`
	Values []float64 `json:"values"` // by repetition
}

// figure summarizes values, of which there must be one or more.
func figure(values []float64) Figure {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	median := sorted[n/2]
	if n%2 == 0 {
		median = (sorted[n/2-1] + sorted[n/2]) / 2
	}
	return Figure{Median: median, Low: sorted[0], High: sorted[n-1], Values: values}
}

// metric names a quantity, with its unit.
type metric string

const (
	eventRate   metric = "events_per_second"
	cpuPostgres metric = "cpu_postgresql_us_per_event"
	cpuNATS     metric = "cpu_nats_us_per_event"
	cpuItself   metric = "cpu_itself_us_per_event"
	peakMemory  metric = "peak_memory_mb"
	walBytes    metric = "wal_bytes_per_event" // that the run itself wrote
	streamP50   metric = "commit_to_stream_p50_ms"
	streamP99   metric = "commit_to_stream_p99_ms"
	streamP999  metric = "commit_to_stream_p99.9_ms"
	consumerP50 metric = "commit_to_consumer_p50_ms"
	consumerP99 metric = "commit_to_consumer_p99_ms"
	consumer999 metric = "commit_to_consumer_p99.9_ms"
	restartTime metric = "kill_to_first_message_ms"
)

// sample is what one run gave. What could not be measured is not in it.
type sample map[metric]float64

// turn is a repetition: the sample of each contender.
type turn map[string]sample

// summarize returns the figures of a contender.
func summarize(turns []turn, name string) map[metric]Figure {
	values := map[metric][]float64{}
	for _, t := range turns {
		for m, v := range t[name] {
			values[m] = append(values[m], v)
		}
	}
	all := map[metric]Figure{}
	for m, v := range values {
		all[m] = figure(v)
	}
	return all
}

// ratio compares two contenders by a metric, turn by turn: ok is false where there is nothing to compare.
func ratio(turns []turn, m metric, of, to string) (f Figure, ok bool) {
	var values []float64
	for _, t := range turns {
		a, hasA := t[of][m]
		b, hasB := t[to][m]
		if hasA && hasB && b > 0 {
			values = append(values, a/b)
		}
	}
	if len(values) == 0 {
		return Figure{}, false
	}
	return figure(values), true
}

// percentile returns the value that a share of the sorted ones does not exceed.
func percentile(sorted []time.Duration, share float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	at := int(math.Ceil(share*float64(len(sorted)))) - 1
	return sorted[min(max(at, 0), len(sorted)-1)]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
