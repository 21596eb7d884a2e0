package pipeline

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// metrics counts what happens. What is rather than happens is in [Status], and becomes gauges in package
// internal/app/metrics, which also adds the prefix "outflow_".
type metrics struct {
	published, sentBytes    prometheus.Counter
	late                    prometheus.Counter
	gapsGivenUp             *prometheus.CounterVec
	repeats, resets         prometheus.Counter
	ticks, tickErrors       prometheus.Counter
	malformed, otherChanges prometheus.Counter
	attempts                prometheus.Counter
	sessions, resumptions   prometheus.Counter
	failures, ignored       *prometheus.CounterVec
	claims, yields, left    prometheus.Counter
	windowEvents            prometheus.Histogram
	commitToAck             prometheus.Histogram

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
	m := &metrics{
		published: counter("events_published_total", "Events acknowledged by JetStream."),
		sentBytes: counter("sent_bytes_total", "Payload bytes of the messages sent to JetStream."),
		late: counter("late_events_total",
			"Events whose sequence had already had a higher seq_key in an earlier window (at least). "+
				"Gap mode: whose counter was not above what their sequence had reached."),
		ticks: counter("ticks_total", "Ticks written into the WAL."),
		tickErrors: counter("tick_errors_total",
			"Ticks, changes of settings and watermarks that could not be written."),
		malformed: counter("malformed_settings_total", "Changes of ordering settings and watermarks in the "+
			"WAL that are malformed or of an unknown version and have no effect."),
		otherChanges: counter("foreign_settings_total", "Changes of ordering settings in the WAL to "+
			"other ones than the configured: in force until this Outflow has changed them back."),
		attempts: counter("connect_attempts_total",
			"Attempts to connect to both servers and to take the slot. A standby that waits makes one only."),
		sessions: counter("sessions_total", "Sessions that held the slot: one begins with each takeover of "+
			"the slot, and after each failure that ended the last one."),
		resumptions: counter("resumptions_total",
			"Times that NATS failed and came back in time: the session went on, nothing was read again."),
		gapsGivenUp: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gaps_given_up_total", Help: "Gap mode: missing counters that were waited for no longer, " +
				"by reason: reorder.bound has passed (bound), reorder.cold has, as the sequence was not " +
				"remembered (cold), the buffer was full (size), the settings changed (settings), or " +
				"another cluster went on with the stream (cut)."},
			[]string{"reason"}),
		repeats: counter("gap_repeats_total", "Gap mode: late events whose counter was not one that had "+
			"been given up lately (at least): it was used twice."),
		resets: counter("gap_resets_total", "Gap mode: the same of first counters: a sequence seems to "+
			"begin anew."),
		claims: counter("cluster_claims_total", "cluster.mode islands, at a reader: claims by which this "+
			"cluster publishes events of the home. How many: outflow_events_published_total of its slot."),
		yields: counter("cluster_yields_total", "cluster.mode islands, at a home: times that it has left "+
			"its events to others because NATS could not be reached or took no message, or one of them did "+
			"not answer it. What it says once more, because that failed or a cluster may not know it, "+
			"counts again."),
		left: counter("cluster_left_events_total", "cluster.mode islands, at a home: its own events that "+
			"it has passed over because others have claimed them. After a restart the same may count "+
			"again."),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "failures_total", Help: "Failures by stage, class and code. Stages: connect (a " +
				"server was not reached), start (of a session, both servers being reached), standby, " +
				"publish (a running session, also if it went on when NATS was back). Classes: transient " +
				"(tried again), fatal, gap and poison (a person is needed). Codes are those of " +
				"docs/troubleshooting.md, or other. The handover between two instances is no failure."},
			[]string{"stage", "class", "code"}),
		ignored: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ignored_events_total", Help: "What was read from the WAL, may have been meant as an " +
				"event, and is not published: message events " +
				"where source is table (message), or that were not transactional (not_transactional), rows " +
				"of the table where source is message (row). After a restart the same may count again."},
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
	r.MustRegister(m.failures, m.ignored, m.windowEvents, m.commitToAck, m.gapsGivenUp)
	m.addGaps(reorder.GapCounts{})
	for _, what := range []decoder.Ignored{decoder.IgnoredMessage, decoder.IgnoredOutside,
		decoder.IgnoredRow} {
		m.ignored.WithLabelValues(what.String())
	}
	for _, usual := range [][3]string{{stageConnect, "transient", "postgres_connect"},
		{stageConnect, "transient", "nats_connect"}, {stagePublish, "transient", "nats_lost"}} {
		m.failures.WithLabelValues(usual[:]...)
	}
	return m
}

// The stages of a session, as failures name them.
const (
	stageConnect = "connect"
	stageStart   = "start"
	stageStandby = "standby"
	stagePublish = "publish"
)

// failed counts a failure.
func (m *metrics) failed(stage string, err error) {
	code := "other"
	if f := outbox.FaultOf(err); f != nil && f.Code != "" {
		code = f.Code
	}
	m.failures.WithLabelValues(stage, outbox.ClassOf(err).String(), code).Inc()
}

func (m *metrics) window(w *reorder.Window) {
	m.windowEvents.Observe(float64(w.Of))
}

func (m *metrics) sent(bytes int) { m.bytesSent += uint64(bytes) }

// add adds what the loop has counted since the last report; late is of the session.
func (m *metrics) add(late uint64) {
	m.sentBytes.Add(float64(m.bytesSent))
	m.bytesSent = 0
	m.late.Add(float64(late - m.lateSeen))
	m.lateSeen = late
}

func (m *metrics) addGaps(n reorder.GapCounts) {
	add := func(why reorder.Reason, now, seen uint64) {
		m.gapsGivenUp.WithLabelValues(why.String()).Add(float64(now - seen))
	}
	add(reorder.ByBound, n.Bound, m.gapsSeen.Bound)
	add(reorder.ByCold, n.Cold, m.gapsSeen.Cold)
	add(reorder.BySize, n.Size, m.gapsSeen.Size)
	add(reorder.BySettings, n.Settings, m.gapsSeen.Settings)
	add(reorder.ByCut, n.Cut, m.gapsSeen.Cut)
	m.repeats.Add(float64(n.Repeats - m.gapsSeen.Repeats))
	m.resets.Add(float64(n.Resets - m.gapsSeen.Resets))
	m.gapsSeen = n
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
