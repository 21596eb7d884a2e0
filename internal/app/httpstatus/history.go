package httpstatus

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/outflowhq/outflow/pipeline"
)

// The page shows the last span, a sample each interval.
const (
	interval = 5 * time.Second
	span     = 15 * time.Minute
	samples  = int(span / interval)
)

// sample is what the page draws of a moment. NaN: not known, or nothing to measure.
type sample struct {
	at             time.Time
	ready          bool    // it published, or stood by
	rate           float64 // events acknowledged a second, since the sample before
	half, most     float64 // of these, 50 and 99 of 100 took so many seconds at most
	lag            float64 // seconds
	retained, safe float64 // bytes; safe: NaN if there is no limit
}

// history is a ring of the newest samples.
type history struct {
	mu   sync.Mutex
	ring [samples]sample
	n    int // samples taken so far

	buckets []*dto.Bucket // of the sample before, cumulative
	count   uint64
	last    time.Time
}

// run takes samples until ctx ends.
func (h *history) run(ctx context.Context, s *Source) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		h.take(s, time.Now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (h *history) take(s *Source, now time.Time) {
	status, r := s.Status(), s.Reading()
	latency := latencies(s.Metrics)
	h.mu.Lock()
	defer h.mu.Unlock()
	v := sample{at: now, ready: status.Ready(), rate: math.NaN(), half: math.NaN(), most: math.NaN(),
		lag: math.NaN(), retained: math.NaN(), safe: math.NaN()}
	publishes := status.State != pipeline.StateStandby // the other one does
	if publishes && !status.CaughtUp.IsZero() {
		v.lag = status.Lag(now).Seconds()
	}
	if publishes && !h.last.IsZero() && latency != nil {
		since := deltas(h.buckets, latency.GetBucket())
		v.rate = float64(latency.GetSampleCount()-h.count) / now.Sub(h.last).Seconds()
		v.half, v.most = quantile(since, 0.5), quantile(since, 0.99)
	}
	if latency != nil {
		h.buckets, h.count, h.last = latency.GetBucket(), latency.GetSampleCount(), now
	}
	if !r.Slot.At.IsZero() && now.Sub(r.Slot.At) < 3*interval && r.Slot.Exists {
		v.retained = float64(r.Slot.Retained)
		if r.Slot.Safe != nil {
			v.safe = float64(max(*r.Slot.Safe, 0))
		}
	}
	h.ring[h.n%samples] = v
	h.n++
}

// all returns the samples within span, oldest first.
func (h *history) all(now time.Time) []sample {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []sample
	for i := max(h.n-samples, 0); i < h.n; i++ {
		if v := h.ring[i%samples]; now.Sub(v.at) <= span {
			all = append(all, v)
		}
	}
	return all
}

// latencies returns the histogram from commit to acknowledgement, nil if there is none.
func latencies(from prometheus.Gatherer) *dto.Histogram {
	families, err := from.Gather()
	if err != nil {
		return nil
	}
	for _, f := range families {
		if f.GetName() == "outflow_commit_to_ack_seconds" && len(f.GetMetric()) > 0 {
			return f.GetMetric()[0].GetHistogram()
		}
	}
	return nil
}

// bucket holds the events that took at most so many seconds, and more than the one before.
type bucket struct {
	upTo float64
	n    uint64
}

func deltas(old, now []*dto.Bucket) []bucket {
	all := make([]bucket, len(now))
	below := uint64(0)
	for i, b := range now {
		n := b.GetCumulativeCount()
		if i < len(old) {
			n -= old[i].GetCumulativeCount()
		}
		all[i] = bucket{b.GetUpperBound(), n - below}
		below = n
	}
	return all
}

// quantile is the value that a share of what is in the buckets does not exceed, as Prometheus estimates it:
// evenly spread within a bucket. NaN if they are empty.
func quantile(in []bucket, share float64) float64 {
	total := uint64(0)
	for _, b := range in {
		total += b.n
	}
	if total == 0 {
		return math.NaN()
	}
	rank, from := share*float64(total), 0.0
	for _, b := range in {
		if float64(b.n) >= rank {
			if math.IsInf(b.upTo, 1) {
				return from
			}
			return from + (b.upTo-from)*rank/float64(b.n)
		}
		rank -= float64(b.n)
		from = b.upTo
	}
	return from
}
