package pipeline

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// metrics are the pipeline's. The prefix "outflow_" is added by whoever registers them.
type metrics struct {
	published, publishedBytes prometheus.Counter
	windows, late             prometheus.Counter
	gapsGivenUp               *prometheus.CounterVec
	gapsOpen, gapOldest       prometheus.Gauge
	ticks, tickErrors         prometheus.Counter
	malformed, otherChanges   prometheus.Counter
	sessions, resumptions     prometheus.Counter
	errors, ignored           *prometheus.CounterVec
	windowEvents              prometheus.Histogram
	commitToAck               prometheus.Histogram

	heldEvents, heldBytes     prometheus.Gauge
	inFlight, inFlightBytes   prometheus.Gauge
	receivedLSN, publishedLSN prometheus.Gauge
	confirmedLSN              prometheus.Gauge
	slotRetained, lagBytes    prometheus.Gauge
	registerer                prometheus.Registerer

	lateSeen, bytesSent uint64            // the loop's: what is in the counters already, what is not yet
	gapsSeen            reorder.GapCounts // likewise
}

func newMetrics(r prometheus.Registerer) *metrics {
	if r == nil {
		r = prometheus.NewRegistry()
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		r.MustRegister(c)
		return c
	}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		r.MustRegister(g)
		return g
	}
	m := &metrics{
		registerer:     r,
		published:      counter("events_published_total", "Events acknowledged by JetStream."),
		publishedBytes: counter("published_bytes_total", "Payload bytes of the messages sent."),
		windows:        counter("windows_total", "Windows closed."),
		late: counter("late_events_total",
			"Events whose sequence had already had a higher seq_key in an earlier window (at least). "+
				"Gap mode: whose counter was not above what their sequence had reached."),
		ticks: counter("ticks_total", "Ticks written into the WAL."),
		tickErrors: counter("tick_errors_total",
			"Ticks and changes of settings that could not be written."),
		malformed: counter("settings_malformed_total", "Changes of ordering settings in the WAL that "+
			"are malformed or of an unknown version and have no effect."),
		otherChanges: counter("settings_foreign_total", "Changes of ordering settings in the WAL to "+
			"other ones than the configured: in force until this Outflow has changed them back."),
		sessions: counter("sessions_total",
			"Sessions begun: one at the start, one more each time that one has ended."),
		resumptions: counter("resumptions_total",
			"Times that NATS failed and came back in time: the session went on, nothing was read again."),
		gapsGivenUp: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gaps_given_up_total", Help: "Gap mode: missing counters that were waited for no longer, " +
				"by reason: reorder.bound has passed (bound), reorder.cold has, as the sequence was not " +
				"remembered (cold), the buffer was full (size), or the settings changed (settings)."},
			[]string{"reason"}),
		gapsOpen: gauge("gaps_open",
			"Gap mode: sequences or documents that wait for a missing counter."),
		gapOldest:     gauge("gap_oldest_seconds", "Gap mode: how long the oldest of them has waited."),
		heldEvents:    gauge("held_events", "Events in the buffer."),
		heldBytes:     gauge("held_bytes", "Bytes in the buffer, as reorder.max_bytes counts them."),
		inFlight:      gauge("in_flight_messages", "Messages sent and not acknowledged yet."),
		inFlightBytes: gauge("in_flight_bytes", "Bytes sent and not acknowledged yet."),
		receivedLSN:   gauge("received_lsn", "Up to where the WAL has been read."),
		publishedLSN: gauge("published_lsn",
			"Newest LSN up to which everything is acknowledged by JetStream."),
		confirmedLSN: gauge("confirmed_lsn", "LSN confirmed to PostgreSQL."),
		slotRetained: gauge("slot_retained_bytes", "WAL that PostgreSQL keeps for the slot."),
		lagBytes:     gauge("lag_bytes", "WAL between the confirmed LSN and the server's end of WAL."),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "publish_errors_total", Help: "Sessions that ended with an error, and failures of NATS " +
				"that a session outlived, by class."}, []string{"class"}),
		ignored: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ignored_total", Help: "What was read from the WAL (again, after a restart), may have " +
				"been meant as an event, and is none: message events " +
				"where source is table (message), or that were not transactional (not_transactional), rows " +
				"of the table where source is message (row)."},
			[]string{"what"}),
		windowEvents: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "window_events", Help: "Events in a window.",
			Buckets: prometheus.ExponentialBuckets(1, 4, 10)}),
		commitToAck: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "commit_to_ack_seconds", Help: "From an event's commit timestamp (PostgreSQL's clock) to " +
				"JetStream's acknowledgement (this clock).",
			Buckets: []float64{.00025, .0005, .001, .002, .004, .008, .016, .032, .064, .128, .256, .512, 1,
				2, 4, 8, 16, 32, 64, 128, 256}}),
	}
	r.MustRegister(m.errors, m.ignored, m.windowEvents, m.commitToAck, m.gapsGivenUp)
	m.addGivenUp(reorder.GapCounts{})
	for _, what := range []decoder.Ignored{decoder.IgnoredMessage, decoder.IgnoredOutside,
		decoder.IgnoredRow} {
		m.ignored.WithLabelValues(what.String())
	}
	for _, class := range []string{"transient", "fatal", "gap", "poison"} {
		m.errors.WithLabelValues(class)
	}
	return m
}

// observe registers what is computed from the health when it is asked for.
func (m *metrics) observe(h *health) {
	m.registerer.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "outbox_unpublished_count",
			Help: "Events read from the WAL and not acknowledged by JetStream yet: held and in flight."},
			func() float64 { s := h.snapshot(); return float64(s.Held + s.InFlight) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "outbox_age_seconds",
			Help: "Age of the oldest event that was read from the WAL and is not acknowledged yet; 0 if " +
				"there is none."},
			func() float64 { s := h.snapshot(); return s.Age(time.Now()).Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "lag_seconds",
			Help: "Seconds since everything that the server had was last published."},
			func() float64 { s := h.snapshot(); return s.Lag(time.Now()).Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "ready", Help: "1 while a session holds the " +
			"slot, or this is a standby that waits for it."},
			func() float64 {
				if s := h.snapshot(); s.Ready() {
					return 1
				}
				return 0
			}),
	)
}

func (m *metrics) sessionEnded(err error) {
	if err != nil {
		m.errors.WithLabelValues(outbox.ClassOf(err).String()).Inc()
	}
}

func (m *metrics) resumed() {
	m.resumptions.Inc()
	m.errors.WithLabelValues(outbox.Transient.String()).Inc()
}

func (m *metrics) window(w *reorder.Window) {
	m.windows.Inc()
	m.windowEvents.Observe(float64(w.Of))
}

func (m *metrics) sent(bytes int)           { m.bytesSent += uint64(bytes) }
func (m *metrics) received(lsn outbox.LSN)  { m.receivedLSN.Set(float64(lsn)) }
func (m *metrics) confirmed(lsn outbox.LSN) { m.confirmedLSN.Set(float64(lsn)) }

// setGauges sets the gauges of the loop.
func (m *metrics) setGauges(g *gauges, late uint64) {
	m.publishedBytes.Add(float64(m.bytesSent))
	m.bytesSent = 0
	m.late.Add(float64(late - m.lateSeen))
	m.lateSeen = late
	m.heldEvents.Set(float64(g.held))
	m.heldBytes.Set(float64(g.heldBytes))
	m.inFlight.Set(float64(g.inFlight))
	m.inFlightBytes.Set(float64(g.inFlightBytes))
	m.publishedLSN.Set(float64(g.published))
}

// setGaps sets what gap mode has found.
func (m *metrics) setGaps(open int, oldest time.Duration, n reorder.GapCounts) {
	m.gapsOpen.Set(float64(open))
	m.gapOldest.Set(oldest.Seconds())
	m.addGivenUp(n)
}

func (m *metrics) addGivenUp(n reorder.GapCounts) {
	add := func(why reorder.Reason, now, seen uint64) {
		m.gapsGivenUp.WithLabelValues(why.String()).Add(float64(now - seen))
	}
	add(reorder.ByBound, n.Bound, m.gapsSeen.Bound)
	add(reorder.ByCold, n.Cold, m.gapsSeen.Cold)
	add(reorder.BySize, n.Size, m.gapsSeen.Size)
	add(reorder.BySettings, n.Settings, m.gapsSeen.Settings)
	m.gapsSeen = n
}

// server sets what was read from the server.
func (m *metrics) server(end outbox.LSN, slot relay.SlotState) {
	m.lagBytes.Set(float64(outbox.Distance(slot.Confirmed, end)))
	m.slotRetained.Set(float64(outbox.Distance(slot.Restart, end)))
}

// latencies remembers the commit times of what is in flight. The ring is as large as the most messages in
// flight.
type latencies struct {
	ring  [4096]int64 // commit time by sequence
	first uint64      // oldest unacknowledged sequence, if first <= last
	last  uint64
}

func (l *latencies) sent(seq uint64, commit int64) {
	if l.last == 0 {
		l.first = seq
	}
	l.last = seq
	l.ring[seq%uint64(len(l.ring))] = commit
}

// acked observes the latency of all up to seq.
func (l *latencies) acked(seq uint64, m *metrics) {
	if l.last == 0 || seq < l.first {
		return
	}
	now, from := time.Now(), l.first
	for ; l.first <= min(seq, l.last); l.first++ {
		m.commitToAck.Observe(now.Sub(relay.CommitTime(l.ring[l.first%uint64(len(l.ring))])).Seconds())
	}
	m.published.Add(float64(l.first - from))
}

// oldest returns the commit time of the oldest message in flight; zero if none is.
func (l *latencies) oldest() time.Time {
	if l.last == 0 || l.first > l.last {
		return time.Time{}
	}
	return relay.CommitTime(l.ring[l.first%uint64(len(l.ring))])
}
