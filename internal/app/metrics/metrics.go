// Package metrics makes the registry of `outflow run`: what the pipeline counts, and gauges of what the
// pipeline and the watcher know at the moment of a scrape. docs/metrics.md is made from it.
package metrics

import (
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/tempfile"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/sink"
)

// Info is what is the same for the whole life of a process.
type Info struct {
	Version, Slot, Stream, Shard string
	MaxSpill                     int64 // bytes; 0: no limit
	Started                      time.Time
	Cluster                      config.Cluster
}

// New returns a registry of Go's and the process's metrics, and where Outflow's own are registered: there
// every name gets the prefix outflow_ and every series the label slot, which both instances of a pair share.
func New(info Info) (*prometheus.Registry, prometheus.Registerer) {
	r, own := registry(info.Slot)
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "build_info",
		Help: "1, with version, Go version, stream and shard as labels."},
		[]string{"version", "goversion", "stream", "shard"})
	build.WithLabelValues(info.Version, runtime.Version(), info.Stream, info.Shard).Set(1)
	own.MustRegister(build)
	return r, own
}

func registry(slot string) (*prometheus.Registry, prometheus.Registerer) {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r, prometheus.WrapRegistererWith(prometheus.Labels{"slot": slot},
		prometheus.WrapRegistererWithPrefix("outflow_", r))
}

// State is the collector of what is, rather than happens. It reads both at each scrape: nothing that has to
// be updated can stand still. A figure that is not known has no series.
func State(info Info, status func() pipeline.Status, reading func() watch.Reading) prometheus.Collector {
	return &state{info, status, reading}
}

type state struct {
	info    Info
	status  func() pipeline.Status
	reading func() watch.Reading
}

func (c *state) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range all {
		ch <- d
	}
}

func (c *state) Collect(ch chan<- prometheus.Metric) {
	s, r := c.status(), c.reading()
	g := gauges{ch}
	g.pipeline(&s, c.info)
	g.postgres(&r)
	g.nats(&r)
	g.cluster(overview.ClusterOf(c.info.Cluster, &r), &s)
	g.partitions(&r.Partitions)
	g.maintained(r.Maintenance.Maintained)
}

// all lists the descriptions.
var all []*prometheus.Desc

func describe(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(name, help, labels, nil)
	all = append(all, d)
	return d
}

// gauges sends gauges.
type gauges struct{ ch chan<- prometheus.Metric }

func (g gauges) set(d *prometheus.Desc, v float64, labels ...string) {
	g.ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (g gauges) is(d *prometheus.Desc, yes bool, labels ...string) {
	v := 0.
	if yes {
		v = 1
	}
	g.set(d, v, labels...)
}

// some leaves out what is zero, which stands for "not known" or "no limit".
func (g gauges) some(d *prometheus.Desc, v float64, labels ...string) {
	if v != 0 {
		g.set(d, v, labels...)
	}
}

func (g gauges) time(d *prometheus.Desc, t time.Time, labels ...string) {
	if !t.IsZero() {
		g.set(d, float64(t.UnixMilli())/1000, labels...)
	}
}

var (
	stateDesc = describe("state", "1 for the state that the process is in, 0 for each other: connecting, "+
		"standby (the other instance publishes), comparing (making again what is in the stream), "+
		"running, waiting_for_nats (the session is kept for 30 s), waiting_for_clusters (until the others "+
		"have answered; they may publish for this one), waiting (before the next attempt), "+
		"stopping, fault (a person is needed), stopped.", "state")
	slotHeld = describe("slot_held", "1 while this process holds the slot, else 0: 1 for one instance of a "+
		"pair.")
	started = describe("start_timestamp_seconds", "When the process started: changes() of it by slot counts "+
		"restarts.")
	fault = describe("fault", "1, while publishing has stopped until a person acts, with the fault's code. "+
		"No series otherwise.", "code")

	receivedLSN  = describe("received_lsn", "Up to where this process has read the WAL.")
	publishedLSN = describe("published_lsn", "LSN up to which everything is acknowledged by JetStream, at "+
		"least. Not on a standby.")
	unpublishedWAL = describe("unpublished_wal_bytes",
		"WAL up to its end that is not published yet: events, "+
			"and whatever else the cluster writes. True also while NATS is away. Not on a standby.")
	unpublished = describe("unpublished_events", "Events that were read from the WAL and are not "+
		"acknowledged by JetStream: held and in flight. Only while this process reads the WAL: while NATS "+
		"is away nobody knows how many events wait there.")
	oldest = describe("oldest_unpublished_timestamp_seconds", "When the oldest event that is not published "+
		"was committed. While no WAL is read: the last time at which nothing waited, which is earlier. No "+
		"series while nothing waits, nor on a standby.")
	caughtUp = describe("caught_up_timestamp_seconds", "The last time at which everything in the WAL was "+
		"published; after a restart, when the newest checkpoint was recorded. time() minus it is the lag. "+
		"Not on a standby.")
	sequence = describe("published_sequence", "The stream's sequence up to which everything is "+
		"acknowledged. Only while this process holds the slot.")

	heldEvents = describe("held_events", "Events in the buffer.")
	heldLimit  = describe("held_limit_events",
		"The most events that the buffer holds: reorder.max_events as "+
			"in force. One transaction may exceed it, on disk.")
	heldBytes      = describe("held_bytes", "Bytes in the buffer, as reorder.max_bytes counts them.")
	heldLimitBytes = describe("held_limit_bytes",
		"The most bytes that the buffer holds: reorder.max_bytes as "+
			"in force. One transaction may exceed it, on disk.")
	spilled = describe("spill_bytes",
		"Bytes of scratch files, in which a transaction larger than the buffer is put in order.")
	spillLimit = describe("spill_limit_bytes",
		"The most bytes of scratch files at a time: reorder.max_spill. "+
			"No series if there is no limit.")
	inFlight      = describe("in_flight_messages", "Messages sent and not acknowledged yet.")
	inFlightLimit = describe("in_flight_limit_messages", "The most messages in flight. At the limit all the "+
		"time, JetStream is what limits the rate.")
	inFlightBytes      = describe("in_flight_bytes", "Bytes sent and not acknowledged yet.")
	inFlightLimitBytes = describe("in_flight_limit_bytes", "The most bytes in flight.")
	gapsOpen           = describe("gaps_open",
		"Gap mode: sequences or documents that wait for a missing counter.")
	noCheckpoint = describe("no_checkpoint_since_timestamp_seconds", "Gap mode: since when more sequences "+
		"wait than a checkpoint can list, so that none is recorded and PostgreSQL keeps WAL. No series "+
		"otherwise.")
	gapOldest = describe("gap_oldest_timestamp_seconds",
		"Gap mode: commit time of the oldest event "+
			"that waits for a missing counter. No series while none waits.")
)

func (g gauges) pipeline(s *pipeline.Status, info Info) {
	for _, state := range pipeline.States {
		g.is(stateDesc, s.State == state, strings.ReplaceAll(strings.ToLower(string(state)), " ", "_"))
	}
	g.time(started, info.Started)
	g.is(slotHeld, s.Holds())
	if s.Fault != nil {
		g.set(fault, 1, s.Fault.Code)
	}
	g.some(receivedLSN, float64(s.Received))
	g.some(publishedLSN, float64(s.Published))
	if n, known := s.Unpublished(); known {
		g.set(unpublishedWAL, float64(n))
	}
	if s.Holds() {
		if s.State != pipeline.StateAway && s.State != pipeline.StateEchoes {
			g.set(unpublished, float64(s.Held+s.InFlight))
		}
		g.set(sequence, float64(s.Seq))
	}
	g.time(oldest, s.OldestUnpublished())
	g.time(caughtUp, s.CaughtUp)

	g.set(heldEvents, float64(s.Held))
	g.some(heldLimit, float64(s.HeldLimit))
	g.set(heldBytes, float64(s.HeldBytes))
	g.some(heldLimitBytes, float64(s.HeldLimitBytes))
	g.set(spilled, float64(tempfile.InUse()))
	g.some(spillLimit, float64(info.MaxSpill))
	g.set(inFlight, float64(s.InFlight))
	g.set(inFlightLimit, sink.MaxInFlight)
	g.set(inFlightBytes, float64(s.InFlightBytes))
	g.set(inFlightLimitBytes, sink.MaxInFlightBytes)
	g.set(gapsOpen, float64(s.OpenGaps))
	first := time.Time{}
	for _, gap := range s.Gaps {
		if first.IsZero() || gap.Since.Before(first) {
			first = gap.Since
		}
	}
	g.time(gapOldest, first)
	g.time(noCheckpoint, s.Unlisted)
}

var (
	postgresUp = describe("postgres_up",
		"1 if PostgreSQL answered when it was last asked, every 2 s (5 s on "+
			"a standby), over a connection of its own.")
	walEnd = describe("wal_end_lsn",
		"The end of the server's WAL. deriv() of it is the rate at which WAL is "+
			"written, by the whole cluster.")
	slotRead = describe("slot_read_timestamp_seconds", "When the figures of PostgreSQL and the slot were "+
		"last read. While PostgreSQL is away they stay what they were then.")
	slotActive   = describe("slot_active", "1 while any process holds the slot.")
	confirmedLSN = describe("confirmed_lsn", "LSN that is confirmed to PostgreSQL, which may remove the WAL "+
		"before it.")
	unconfirmedWAL = describe("unconfirmed_wal_bytes", "WAL from the confirmed LSN to its end. Never 0 for "+
		"long: what is published is confirmed after sink.durable_after.")
	retained = describe("slot_retained_bytes",
		"WAL that PostgreSQL keeps for the slot. True also while NATS "+
			"is away, and on a standby.")
	safe = describe("slot_safe_wal_bytes", "WAL that can still be written before the slot is in danger of "+
		"being lost. No series if max_slot_wal_keep_size sets no limit.")
	walStatus = describe("slot_wal_status", "1 for the slot's wal_status, 0 for each other: reserved, "+
		"extended (within the limit), unreserved (about to be lost), lost.", "status")
	slotExists = describe("slot_exists", "1 if the slot exists.")
)

func (g gauges) postgres(r *watch.Reading) {
	if r.Postgres.At.IsZero() && r.Postgres.FailingSince.IsZero() {
		return // not asked yet
	}
	g.is(postgresUp, r.Postgres.FailingSince.IsZero())
	g.certificates("postgres", r.Postgres.Certificates)
	if r.Postgres.At.IsZero() {
		return
	}
	slot := &r.Slot
	g.set(walEnd, float64(r.Postgres.WALEnd))
	g.time(slotRead, slot.At)
	g.is(slotExists, slot.Exists)
	if !slot.Exists {
		return
	}
	g.is(slotActive, slot.Active)
	g.set(confirmedLSN, float64(slot.Confirmed))
	if end := r.Postgres.WALEnd; end > slot.Confirmed {
		g.set(unconfirmedWAL, float64(end-slot.Confirmed))
	} else {
		g.set(unconfirmedWAL, 0)
	}
	g.set(retained, float64(slot.Retained))
	if slot.Safe != nil {
		g.set(safe, float64(*slot.Safe))
	}
	for _, status := range []string{"reserved", "extended", "unreserved", "lost"} {
		g.is(walStatus, slot.WALStatus == status, status)
	}
}

var (
	natsUp = describe("nats_up", "1 if NATS answered when it was last asked, every 2 s (5 s on a standby), "+
		"over a connection of its own.")
	storageUsed  = describe("jetstream_storage_used_bytes", "File storage that the account uses.")
	storageLimit = describe("jetstream_storage_limit_bytes",
		"The account's limit of file storage. No series "+
			"if it has none.")
	streamRead = describe("stream_read_timestamp_seconds", "When the figures of NATS and the stream were "+
		"last read. While NATS is away they stay what they were then.")
	streamExists   = describe("stream_exists", "1 if the stream exists.")
	streamMessages = describe("stream_messages", "Messages in the stream.")
	streamBytes    = describe("stream_bytes", "Bytes of the stream.")
	streamLimit    = describe("stream_limit_bytes",
		"The stream's max_bytes, beyond which the oldest messages "+
			"go. No series if it has none.")
	streamLast = describe("stream_last_sequence", "Sequence of the stream's last message.")
	replicaLag = describe("stream_replica_lag_operations", "Operations that a follower of the stream is "+
		"behind its leader.", "replica")
	replicaCurrent = describe("stream_replica_current", "1 if a follower of the stream is up to date and "+
		"online.", "replica")
	consumersRead = describe("stream_consumers_read_timestamp_seconds",
		"When the stream's durable consumers "+
			"were last read, every fifth time that the stream is. No series without the right to "+
			"CONSUMER.LIST.")
	consumersLeftOut = describe("stream_consumers_left_out",
		"Consumers that have no series: there are "+
			"at most 100, of those with the most pending messages.")
	pending = describe("stream_consumer_pending_messages",
		"Messages of the stream that the durable consumer "+
			"was not given yet; of package consumer, that the instance which is farthest behind has not "+
			"read.",
		"consumer")
	ackPending = describe("stream_consumer_ack_pending_messages", "Messages that the durable consumer was "+
		"given and has not acknowledged.", "consumer")
	redelivered = describe("stream_consumer_redelivered_messages", "Messages among them that it was given "+
		"more than once.", "consumer")
	ackFloor = describe("stream_consumer_ack_floor_sequence",
		"Sequence of the stream up to which the durable "+
			"consumer has acknowledged everything.", "consumer")
)

var certificate = describe("certificate_expiry_timestamp_seconds", "When a certificate expires that the "+
	"watcher's connection depends on: of the server (side server), or the client certificate that it is "+
	"shown (side client). No series without TLS.", "peer", "side")

func (g gauges) certificates(peer string, all []watch.Certificate) {
	for _, c := range all {
		g.time(certificate, c.Until, peer, c.Side)
	}
}

func (g gauges) nats(r *watch.Reading) {
	if r.NATS.At.IsZero() && r.NATS.FailingSince.IsZero() {
		return
	}
	g.is(natsUp, r.NATS.FailingSince.IsZero())
	g.certificates("nats", r.NATS.Certificates)
	if r.NATS.At.IsZero() {
		return
	}
	g.set(storageUsed, float64(r.NATS.Storage))
	g.some(storageLimit, float64(r.NATS.StorageLimit))
	st := &r.Stream
	g.time(streamRead, st.At)
	g.is(streamExists, st.Exists)
	if st.Exists {
		g.set(streamMessages, float64(st.Messages))
		g.set(streamBytes, float64(st.Bytes))
		g.some(streamLimit, float64(st.MaxBytes))
		g.set(streamLast, float64(st.LastSeq))
	}
	for _, replica := range st.Replicas {
		g.set(replicaLag, float64(replica.Lag), replica.Name)
		g.is(replicaCurrent, replica.Current && !replica.Offline, replica.Name)
	}
	if r.ConsumerList.At.IsZero() {
		return
	}
	g.time(consumersRead, r.ConsumerList.At)
	g.set(consumersLeftOut, float64(r.ConsumersLeftOut))
	for _, c := range r.Consumers {
		g.set(pending, float64(c.Pending), c.Name)
		g.set(ackPending, float64(c.AckPending), c.Name)
		g.set(redelivered, float64(c.Redelivered), c.Name)
		g.set(ackFloor, float64(c.AckFloor), c.Name)
	}
}
