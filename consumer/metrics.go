package consumer

import (
	"errors"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are one consumer's. Several consumers in a process share the metric families, labelled by their
// names. All methods may be called from any goroutine.
type metrics struct {
	partitions     []partitionMetrics // grows between sessions
	byPartition    []*prometheus.CounterVec
	parkedEvents   *prometheus.CounterVec // by cause
	releasedEvents *prometheus.CounterVec // by how
	drops          *prometheus.CounterVec // by reason

	sessions, gaps, conflicts  prometheus.Counter
	rebalances                 prometheus.Counter
	lease, assigned, hung      prometheus.Gauge
	batchSize, commit, latency prometheus.Observer

	// Of the active instance: one that isn't has none of them, as it knows nothing of these.
	parkedDocuments, flowMessages, flowBytes, readSeq, doneSeq, lagMessages, lagTime activeGauge
	heldPartitions, oldestParked                                                     activeGauge
	active                                                                           []*activeGauge

	begun bool // a session that has not ended
}

// activeGauge is a gauge that has no series while the instance is not active.
type activeGauge struct {
	prometheus.Gauge
	all      *prometheus.GaugeVec
	consumer prometheus.Labels
}

func (g *activeGauge) begin() {
	g.all.Delete(g.consumer)
	g.Gauge = g.all.With(g.consumer)
}

// end: what is still set afterwards is not shown. Another instance in this process may be active by now: the
// series is its own then.
func (g *activeGauge) end() {
	if g.all.With(g.consumer) == g.Gauge {
		g.all.Delete(g.consumer)
	}
}

type partitionMetrics struct {
	events, effects, passed, attempts, failures, panics, replayed, transactions prometheus.Counter
}

const namespace = "outflow_consumer"

// newMetrics makes the metrics of a consumer, and registers them unless reg is nil.
func newMetrics(reg prometheus.Registerer, name string, partitions int) (*metrics, error) {
	f := families{reg: reg, consumer: prometheus.Labels{"consumer": name}}
	m := &metrics{
		parkedEvents: f.counters("parked_total",
			"Events parked: poison, or behind an event of their document that is.", "cause"),
		releasedEvents: f.counters("released_total",
			"Events that left parking: retry with their effect, skip without.", "how"),
		drops: f.counters("sessions_dropped_total", "Sessions that ended with an error, by reason.",
			"reason"),
		sessions: f.counters("sessions_total",
			"Sessions begun as the active instance; each error ends one.").With(nil),
		gaps: f.counters("gap_messages_total",
			"Messages that were removed before they were read, as Config.AcceptGap allows.").With(nil),
		conflicts: f.counters(
			"conflicts_total",
			"Transactions that failed because of a concurrent one: deadlocks, serialization failures.",
		).With(nil),
		rebalances: f.counters("rebalances_total",
			"How often this instance had other partitions than before.").With(nil),
		lease: f.gauge("lease_held",
			"1 while this instance has partitions and works, 0 while it stands by or connects."),
		assigned: f.gauge("partitions_assigned", "Partitions that this instance has."),
		hung: f.gauge("hung_handlers",
			"Calls of the handler that have not returned although their context has ended."),
		parkedDocuments: f.activeGauge("parked_documents",
			"Documents of this instance's partitions that are parked, as far as they are kept in memory: "+
				"262144 at most."),
		oldestParked: f.activeGauge("oldest_parked_seconds",
			"How long the document of parked_documents that was parked first has been; 0 if there is none."),
		flowMessages: f.activeGauge("in_flight_messages", "Messages read and not done."),
		flowBytes:    f.activeGauge("in_flight_bytes", "Bytes of the messages read and not done."),
		readSeq:      f.activeGauge("read_sequence", "Sequence of the newest message read."),
		doneSeq:      f.activeGauge("done_sequence", "Sequence up to which all messages are done."),
		lagMessages: f.activeGauge("lag_messages",
			"Messages of the stream that are not done, as of the last look."),
		heldPartitions: f.activeGauge("held_partitions",
			"Partitions that wait at an event which fails and is not parked: Halt, or Config.ParkLimit."),
		lagTime: f.activeGauge("lag_seconds",
			"Age of the oldest message that was read and is not done; 0 if there is none. What waits "+
				"unread may be older: alert on lag_messages."),
		batchSize: f.histogram("batch_events", "Events that shared a transaction.", 1, 14),
		commit:    f.histogram("commit_seconds", "Time of a transaction's commit.", 0.00025, 18),
		latency: f.histogram("latency_seconds",
			"From when the stream stored an event to the commit of its effect.", 0.001, 20),
	}
	for _, c := range []struct{ name, help string }{
		{"events_total", "Events read from the stream."},
		{"effects_total", "Events whose effect is committed; released ones count as well."},
		{"passed_over_total", "Events passed over, since they had had their effect."},
		{"attempts_total", "Calls of the handler."},
		{"failures_total", "Calls of the handler that failed; panics count as well."},
		{"panics_total", "Calls of the handler that panicked."},
		{"replayed_total", "Effects of events that were replayed."},
		{"transactions_total", "Transactions committed."},
	} {
		m.byPartition = append(m.byPartition, f.counters(c.name, c.help, "partition"))
	}
	m.grow(partitions)
	m.active = []*activeGauge{&m.parkedDocuments, &m.flowMessages, &m.flowBytes, &m.readSeq, &m.doneSeq,
		&m.lagMessages, &m.lagTime, &m.heldPartitions, &m.oldestParked}
	for _, g := range m.active {
		g.Gauge = prometheus.NewGauge(prometheus.GaugeOpts{Name: "none"})
	}
	for _, cause := range []string{causePoison, causeBehind} {
		m.parkedEvents.WithLabelValues(cause)
	}
	for _, how := range []string{releaseRetry, releaseSkip} {
		m.releasedEvents.WithLabelValues(how)
	}
	return m, f.err
}

// grow makes the metrics of so many partitions. No session runs meanwhile.
func (m *metrics) grow(partitions int) {
	for p := len(m.partitions); p < partitions; p++ {
		c := make([]prometheus.Counter, len(m.byPartition))
		for i, vec := range m.byPartition {
			c[i] = vec.WithLabelValues(strconv.Itoa(p))
		}
		m.partitions = append(m.partitions, partitionMetrics{events: c[0], effects: c[1], passed: c[2],
			attempts: c[3], failures: c[4], panics: c[5], replayed: c[6], transactions: c[7]})
	}
}

// owned sets how many partitions this instance has.
func (m *metrics) owned(n int) { m.assigned.Set(float64(n)) }

// rebalanced counts that this instance has other partitions than before.
func (m *metrics) rebalanced() { m.rebalances.Inc() }

// hangs adds to how many calls of the handler hang.
func (m *metrics) hangs(more int) { m.hung.Add(float64(more)) }

// got counts an event that was read from the stream.
func (m *metrics) got(partition int) { m.partitions[partition].events.Inc() }

// attempted counts a call of the handler.
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

// transaction counts a committed transaction with the effects of events.
func (m *metrics) transaction(partition int, events []*Event, commit time.Duration) {
	worker := &m.partitions[partition]
	worker.transactions.Inc()
	worker.effects.Add(float64(len(events)))
	m.batchSize.Observe(float64(len(events)))
	m.commit.Observe(commit.Seconds())
	now := time.Now()
	for _, e := range events {
		m.latency.Observe(max(0, now.Sub(e.Time).Seconds()))
		if e.Replayed {
			worker.replayed.Inc()
		}
	}
}

// passed counts an event that was skipped because it was applied before.
func (m *metrics) passed(partition int) { m.partitions[partition].passed.Inc() }

func (m *metrics) parked(cause string) { m.parkedEvents.WithLabelValues(cause).Inc() }

func (m *metrics) released(how string) { m.releasedEvents.WithLabelValues(how).Inc() }

// documents sets the number of parked documents.
func (m *metrics) documents(n int) { m.parkedDocuments.Set(float64(n)) }

// parkedSince sets when the first of them was parked (zero: there is none). It is called regularly.
func (m *metrics) parkedSince(at time.Time) { m.oldestParked.Set(age(at)) }

// session sets whether this instance is active.
func (m *metrics) session(active bool) {
	if !active {
		if m.begun {
			m.lease.Set(0)
			for _, g := range m.active {
				g.end()
			}
		}
		m.begun = false
		return
	}
	m.begun = true
	m.sessions.Inc()
	m.lease.Set(1)
	for _, g := range m.active {
		g.begin()
	}
}

// dropped counts a session that ended with an error: moved, handler, source or database.
func (m *metrics) dropped(reason string) { m.drops.WithLabelValues(reason).Inc() }

// held sets how many partitions are held at an event.
func (m *metrics) held(n int) { m.heldPartitions.Set(float64(n)) }

// gap counts missing messages that were accepted.
func (m *metrics) gap(messages uint64) { m.gaps.Add(float64(messages)) }

// conflict counts a transaction that failed because of a concurrent one.
func (m *metrics) conflict() { m.conflicts.Inc() }

func (m *metrics) inFlight(messages int, bytes int64) {
	m.flowMessages.Set(float64(messages))
	m.flowBytes.Set(float64(bytes))
}

// read sets the sequence of the newest message read.
func (m *metrics) read(seq uint64) { m.readSeq.Set(float64(seq)) }

// done sets the sequence up to which all messages are done.
func (m *metrics) done(seq uint64) { m.doneSeq.Set(float64(seq)) }

// behind sets the lag, from the stream's last sequence, the one up to which all messages are done, and when
// the oldest message that was read but is not done was stored (zero: there is none). It is called regularly,
// even while nothing moves.
func (m *metrics) behind(last, done uint64, oldest time.Time) {
	m.lagMessages.Set(float64(last - min(done, last)))
	m.lagTime.Set(age(oldest))
}

// age is how long ago a time was, in seconds, and 0 of no time.
func age(at time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return max(0, time.Since(at).Seconds())
}

// families makes the metrics of one consumer, or reuses those that another consumer has registered.
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
	return f.gaugeVec(name, help).With(f.consumer)
}

func (f *families) activeGauge(name, help string) activeGauge {
	return activeGauge{all: f.gaugeVec(name, help), consumer: f.consumer}
}

func (f *families) gaugeVec(name, help string) *prometheus.GaugeVec {
	return registered(f, prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name,
		Help: help}, []string{"consumer"}))
}

// histogram makes a histogram whose first bucket goes up to least and each further one to twice as much.
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
	var registered prometheus.AlreadyRegisteredError
	if errors.As(err, &registered) {
		if existing, ok := registered.ExistingCollector.(C); ok {
			return existing
		}
	}
	if err != nil && f.err == nil {
		f.err = err
	}
	return c
}
