package consumer

import (
	"errors"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are those of one consumer. Several consumers of a process share the families of a registry, each
// with its name as a label. All methods may be called at any time from any goroutine.
type metrics struct {
	partitions []partitionMetrics     // by partition
	parkeds    *prometheus.CounterVec // cause
	release    *prometheus.CounterVec // how
	drops      *prometheus.CounterVec // reason

	sessions, gaps         prometheus.Counter
	lease, kept            prometheus.Gauge
	held, heldBytes        prometheus.Gauge
	readSeq, doneSeq, lag  prometheus.Gauge
	lagTime                prometheus.Gauge
	batch, commit, latency prometheus.Observer
}

// partitionMetrics are those of one partition.
type partitionMetrics struct {
	events, effects, passed, attempts, failures, panics, replayed, transactions prometheus.Counter
}

const namespace = "outflow_consumer"

// newMetrics makes the metrics of a consumer and registers them. A nil registerer is none.
func newMetrics(reg prometheus.Registerer, name string, partitions int) (*metrics, error) {
	f := families{reg: reg, consumer: prometheus.Labels{"consumer": name}}
	events := f.counters("events_total", "Events read from the stream.", "partition")
	effects := f.counters("effects_total", "Events whose effect is committed; released ones count as well.",
		"partition")
	passed := f.counters("passed_over_total", "Events passed over, since they had had their effect.",
		"partition")
	attempts := f.counters("attempts_total", "Calls of the handler.", "partition")
	failures := f.counters("failures_total", "Calls of the handler that failed; panics count as well.",
		"partition")
	panics := f.counters("panics_total", "Calls of the handler that panicked.", "partition")
	replayed := f.counters("replayed_total", "Effects of events that were replayed.", "partition")
	transactions := f.counters("transactions_total", "Transactions committed.", "partition")
	m := &metrics{
		parkeds: f.counters("parked_total",
			"Events parked: poison, or behind an event of their document that is.", "cause"),
		release: f.counters("released_total",
			"Events that left parking: retry with their effect, skip without.", "how"),
		drops: f.counters("sessions_dropped_total", "Sessions that ended with an error, by reason.",
			"reason"),
		sessions: f.counters("sessions_total",
			"Sessions begun as the active instance; each error ends one.").With(nil),
		gaps: f.counters("gap_messages_total",
			"Messages that were removed before they were read, as Config.AcceptGap allows.").With(nil),
		lease: f.gauge("lease_held",
			"1 while this instance is the active one, 0 while it stands by or connects."),
		kept: f.gauge("parked_documents",
			"Documents that are parked, as far as they are kept in memory: 262144 at most."),
		held:      f.gauge("in_flight_messages", "Messages read and not done."),
		heldBytes: f.gauge("in_flight_bytes", "Bytes of the messages read and not done."),
		readSeq:   f.gauge("read_sequence", "Sequence of the newest message read."),
		doneSeq:   f.gauge("done_sequence", "Sequence up to which all messages are done."),
		lag:       f.gauge("lag_messages", "Messages of the stream that are not done, as of the last look."),
		lagTime: f.gauge("lag_seconds",
			"Age of the oldest message that was read and is not done; 0 if there is none."),
		batch:  f.histogram("batch_events", "Events that shared a transaction.", 1, 14),
		commit: f.histogram("commit_seconds", "Time of a transaction's commit.", 0.00025, 18),
		latency: f.histogram("latency_seconds",
			"From when the stream stored an event to the commit of its effect.", 0.001, 20),
	}
	for p := range partitions {
		label := strconv.Itoa(p)
		m.partitions = append(m.partitions, partitionMetrics{
			events: events.WithLabelValues(label), effects: effects.WithLabelValues(label),
			passed:   passed.WithLabelValues(label),
			attempts: attempts.WithLabelValues(label), failures: failures.WithLabelValues(label),
			panics:   panics.WithLabelValues(label),
			replayed: replayed.WithLabelValues(label), transactions: transactions.WithLabelValues(label),
		})
	}
	for _, cause := range []string{causePoison, causeBehind} {
		m.parkeds.WithLabelValues(cause)
	}
	for _, how := range []string{releaseRetry, releaseSkip} {
		m.release.WithLabelValues(how)
	}
	return m, f.err
}

// got says that an event was read from the stream.
func (m *metrics) got(partition int) { m.partitions[partition].events.Inc() }

// attempted says that the handler was called.
func (m *metrics) attempted(partition int, err error) {
	worker := &m.partitions[partition]
	worker.attempts.Inc()
	if err == nil {
		return
	}
	worker.failures.Inc()
	var p *PanicError
	if errors.As(err, &p) {
		worker.panics.Inc()
	}
}

// transaction says that one with the effects of events is committed, and how long the commit took.
func (m *metrics) transaction(partition int, events []*Event, commit time.Duration) {
	worker := &m.partitions[partition]
	worker.transactions.Inc()
	worker.effects.Add(float64(len(events)))
	m.batch.Observe(float64(len(events)))
	m.commit.Observe(commit.Seconds())
	now := time.Now()
	for _, e := range events {
		m.latency.Observe(max(0, now.Sub(e.Time).Seconds()))
		if e.Replayed {
			worker.replayed.Inc()
		}
	}
}

// passed says that an event was passed over, since its effect is there.
func (m *metrics) passed(partition int) { m.partitions[partition].passed.Inc() }

// parked says that an event is parked.
func (m *metrics) parked(cause string) { m.parkeds.WithLabelValues(cause).Inc() }

// released says that a parked event left.
func (m *metrics) released(how string) { m.release.WithLabelValues(how).Inc() }

// documents says how many documents are parked.
func (m *metrics) documents(n int) { m.kept.Set(float64(n)) }

// session says that this instance is the active one from now on, or not any more.
func (m *metrics) session(active bool) {
	if active {
		m.sessions.Inc()
		m.lease.Set(1)
	} else {
		m.lease.Set(0)
	}
}

// dropped says why a session ended: moved, source, database, lease.
func (m *metrics) dropped(reason string) { m.drops.WithLabelValues(reason).Inc() }

// gap says that messages are gone, which was accepted.
func (m *metrics) gap(messages uint64) { m.gaps.Add(float64(messages)) }

// inFlight says what is read and not done.
func (m *metrics) inFlight(messages int, bytes int64) {
	m.held.Set(float64(messages))
	m.heldBytes.Set(float64(bytes))
}

// read says which message is the newest that was read.
func (m *metrics) read(seq uint64) { m.readSeq.Set(float64(seq)) }

// done says up to where all is done.
func (m *metrics) done(seq uint64) { m.doneSeq.Set(float64(seq)) }

// behind says where the stream ends, up to where all is done, and when the oldest message that was read and
// is not done was stored (zero: there is none). It is said every now and then, also while nothing moves.
func (m *metrics) behind(last, done uint64, oldest time.Time) {
	m.lag.Set(float64(last - min(done, last)))
	m.lagTime.Set(0)
	if !oldest.IsZero() {
		m.lagTime.Set(max(0, time.Since(oldest).Seconds()))
	}
}

// families makes metrics of one consumer, and takes those that another consumer of the process registered.
type families struct {
	reg      prometheus.Registerer
	consumer prometheus.Labels
	err      error // the first one
}

func (f *families) counters(name, help string, labels ...string) *prometheus.CounterVec {
	labels = append([]string{"consumer"}, labels...)
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help},
		labels)
	return registered(f, c).MustCurryWith(f.consumer)
}

func (f *families) gauge(name, help string) prometheus.Gauge {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help},
		[]string{"consumer"})
	return registered(f, g).With(f.consumer)
}

// histogram has buckets of twice the size of the one before each, the first one up to least.
func (f *families) histogram(name, help string, least float64, buckets int) prometheus.Observer {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(least, 2,
			buckets),
	}, []string{"consumer"})
	return registered(f, h).With(f.consumer)
}

func registered[C prometheus.Collector](f *families, c C) C {
	if f.reg == nil {
		return c
	}
	err := f.reg.Register(c)
	var there prometheus.AlreadyRegisteredError
	if errors.As(err, &there) {
		if same, ok := there.ExistingCollector.(C); ok {
			return same
		}
	}
	if err != nil && f.err == nil {
		f.err = err
	}
	return c
}
