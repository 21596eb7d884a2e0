package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/internal/app/watch"
)

// Maintaining is what a process of outflow maintain knows of itself.
type Maintaining struct {
	Active     bool // it works; otherwise it stands by, or waits for PostgreSQL
	Partitions watch.Partitions
	Maintained *watch.Maintained // nil: nothing was done yet
}

// NewMaintain returns the registry of a process of outflow maintain. It has no outflow_build_info: by that it
// is seen whether anybody publishes.
func NewMaintain(slot string, now func() Maintaining) *prometheus.Registry {
	r, own := registry(slot)
	own.MustRegister(maintain(now))
	return r
}

type maintain func() Maintaining

func (c maintain) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range maintenance {
		ch <- d
	}
}

func (c maintain) Collect(ch chan<- prometheus.Metric) {
	m, g := c(), gauges{ch}
	g.is(maintainActive, m.Active)
	if m.Active {
		g.partitions(&m.Partitions)
		g.maintained(m.Maintained)
	}
}

var (
	maintainActive = describe("maintain_active", "1 while this outflow maintain works, 0 while another one "+
		"does or PostgreSQL is away. From outflow maintain alone.")
	maintainReported = describe("maintain_reported_timestamp_seconds", "When outflow maintain last had "+
		"done, or tried, all of its parts. No series before the first time.")
	maintainInterval = describe("maintain_interval_seconds", "How often that is: maintain.every as in "+
		"force; of maintain --once the time between the last two. No series before the second one.")
	partSuccess = describe("maintain_part_success_timestamp_seconds", "When a part of outflow maintain "+
		"(archive, partition, stream) last ended without a fault.", "part")
	partFault = describe("maintain_part_fault", "1, while a part of outflow maintain fails, with the "+
		"fault's code: empty for what is not in the catalogue, such as a connection that was cut. No series "+
		"otherwise.", "part", "code")
	partFailing = describe("maintain_part_failing_since_timestamp_seconds", "Since when a part of outflow "+
		"maintain fails. No series while it does not.", "part")

	partitionsAhead = describe("partitions_ahead", "Partitions of the outbox that begin later than now "+
		"(than 14 hours from now, where Outflow makes those of a column without a time zone), up to the "+
		"first range that has none. No series where there is no table outflow_partitions.")
	partitionsEnd = describe("partitions_end_timestamp_seconds", "Where the last of the outbox's partitions "+
		"ends: a row of that time or later is refused, or goes to the default partition. No series where "+
		"there is no table outflow_partitions.")
	rowsBlocked = describe("rows_blocked_since_timestamp_seconds", "Since when old rows of the outbox wait "+
		"for a replication slot, by its name: it has not confirmed their fence. At most 10 slots. No series "+
		"for one that is waited for by none.", "by")

	archiveSequence = describe("archive_sequence", "Sequence of the stream up to which everything is "+
		"archived.")
	archiveWaiting = describe("archive_waiting_messages", "Messages that are confirmed and not archived.")
	archiveOldest  = describe("archive_oldest_waiting_timestamp_seconds", "When the oldest of them was "+
		"stored. No series while there is none.")
	archiveAge = describe("archive_segment_age_seconds", "archive.segment_age as in force: so old messages "+
		"get before a segment that is not full is written.")
	streamKept = describe("stream_kept_messages", "Messages of the stream that are beyond "+
		"retain.stream.age, size or messages and stay, with what needs the oldest of them: confirmed, "+
		"archive, memory, consumer and its name, and others as in outflow stream plan. No series where "+
		"none of the three is set.", "by")
)

// maintenance are those that outflow maintain has.
var maintenance = []*prometheus.Desc{maintainActive, maintainReported, maintainInterval, partSuccess,
	partFault, partFailing, partitionsAhead, partitionsEnd, rowsBlocked, archiveSequence, archiveWaiting,
	archiveOldest, archiveAge, streamKept}

func (g gauges) partitions(p *watch.Partitions) {
	if p.At.IsZero() || !p.Managed {
		return
	}
	if p.Ranges {
		g.set(partitionsAhead, float64(p.Ahead))
		g.time(partitionsEnd, p.Until)
	}
	for _, b := range p.Blocked {
		g.time(rowsBlocked, b.Since, b.Slot)
	}
}

func (g gauges) maintained(m *watch.Maintained) {
	if m == nil {
		return
	}
	g.time(maintainReported, m.At)
	g.some(maintainInterval, m.Interval.Seconds())
	for _, p := range m.Parts {
		g.time(partSuccess, p.Succeeded, p.Name)
		if !p.Failing.IsZero() {
			g.set(partFault, 1, p.Name, p.Code)
			g.time(partFailing, p.Failing, p.Name)
		}
	}
	if a := m.Archive; a != nil {
		g.set(archiveSequence, float64(a.Sequence))
		g.set(archiveWaiting, float64(a.Messages))
		g.time(archiveOldest, a.Oldest)
		g.set(archiveAge, a.SegmentAge.Seconds())
	}
	if k := m.Kept; k != nil {
		g.set(streamKept, float64(k.Messages), k.By)
	}
}
