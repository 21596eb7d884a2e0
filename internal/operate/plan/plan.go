// Package plan is `outflow plan`: it says how large things have to be, from what is measured, configured or
// assumed, beside what is set now. It changes nothing.
//
// [Measured] is what was read; [Derive] is a function of it and the settings alone.
package plan

import (
	"fmt"
	"math"
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/gclimit"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/relay"
)

// Where a figure comes from.
const (
	FromMeasured   = "measured"
	FromConfigured = "configured"
	FromAssumed    = "assumed"
)

// Figure is an answer. The JSON names are stable.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"` // bytes, bytes/s, events/s or count
	From  string  `json:"from"` // the weakest of what it is derived from
	How   string  `json:"how"`
	Now   string  `json:"now,omitempty"` // what is set or used now, and what that is enough for

	text string // the value for a person; "": by the unit
}

// Text is the value for a person.
func (f Figure) Text() string {
	switch {
	case f.text != "":
		return f.text
	case f.Unit == "bytes":
		return units.Size(bytes(f.Value))
	case f.Unit == "bytes/s":
		return units.Size(bytes(f.Value)) + "/s"
	case f.Unit == "events/s":
		return units.Rate(f.Value) + " events/s"
	}
	return fmt.Sprintf("%.0f", f.Value)
}

func bytes(v float64) uint64 {
	if v >= math.MaxInt64 {
		return math.MaxInt64
	}
	return uint64(max(v, 0))
}

// Options say what is planned for.
type Options struct {
	Measure time.Duration   // how long the rates are measured
	Outages []time.Duration // of NATS or of Outflow
	Days    int             // so long the stream keeps its messages

	Progress func(format string, args ...any)
}

// Measured is what was read.
type Measured struct {
	Seconds float64 // so long it was measured

	WALBytes   float64 // written meanwhile
	WALAverage float64 // bytes/s since WALSince ago
	WALSince   time.Duration
	Inserted   float64 // rows of the table meanwhile
	Published  float64 // messages of the stream meanwhile

	KeepSize              int64 // max_slot_wal_keep_size in bytes, -1: no limit
	MaxWAL                int64 // max_wal_size
	Senders, MaxSenders   int
	Slots, MaxSlots       int
	Connections, MaxConns int
	Own                   int  // connections of outflows of this slot
	SlotThere             bool // the slot is one of Slots

	TableBytes int64   // of the table with its indexes and partitions
	TableRows  float64 // as the planner estimates them; 0: not known
	Partitions int     // that it has; 0: it is not partitioned

	SampledRows int
	MeanRow     float64 // bytes, of the sample
	LargestRow  int64

	NATS           string // why NATS says nothing; "": it does
	Stream         bool
	Messages       uint64
	StreamBytes    uint64
	MaxBytes       int64 // of the stream; 0 or less: no limit
	Replicas       int
	Consumers      int
	StreamSeconds  float64 // between the first and the last message
	StreamMessages float64 // that were published in that time
	Bucket         uint64  // bytes of the record's bucket
}

// What is assumed.
const (
	walReserve    = 1.25 // how much more WAL there may be than was measured
	streamReserve = 1.2
	rowSize       = 1024 // of an event, where there is none to measure
	perRow        = 150  // a row's header, its other columns and what the index has beside them
	fewRows       = 1000 // below that the size of the table says little about a row
	perMessage    = 300  // the header, the subject and what the stream's file has beside them
	recordSize    = 64 * 16 << 10
	connections   = 4 // of a process that runs, one of them a WAL sender; a standby has fewer
	processes     = 2
)

// Derive answers.
func Derive(m Measured, cfg config.Config, o Options) []Figure {
	d := deriver{m: m, cfg: cfg, o: o}
	d.rates()
	d.retention()
	d.table()
	d.stream()
	d.process()
	d.servers()
	return d.all
}

type deriver struct {
	m   Measured
	cfg config.Config
	o   Options
	all []Figure

	wal    float64 // bytes/s
	events float64 // a second
	size   float64 // of an event in the stream
	from   string  // of size
}

func (d *deriver) add(f Figure) { d.all = append(d.all, f) }

func (d *deriver) rates() {
	m := d.m
	took := units.Duration(time.Duration(m.Seconds * float64(time.Second)))
	now := m.WALBytes / m.Seconds
	d.wal = max(now, m.WALAverage)
	how := fmt.Sprintf("%s/s during %s", units.Size(bytes(now)), took)
	if m.WALSince > 0 {
		how += fmt.Sprintf(", %s/s on average since the counter was reset %s ago: the higher one counts",
			units.Size(bytes(m.WALAverage)), units.Duration(m.WALSince))
	}
	d.add(Figure{Name: "WAL of the whole server", Value: d.wal, Unit: "bytes/s", From: FromMeasured,
		How: how})

	// what is published may be a backlog; what is inserted may be another shard's
	switch {
	case d.cfg.Source == relay.FromTable && d.cfg.Shard.Whole():
		d.events = m.Inserted / m.Seconds
	case d.cfg.Source == relay.FromTable:
		d.events = m.Published / m.Seconds
	default:
		d.events = max(m.Inserted, m.Published) / m.Seconds
	}
	how = fmt.Sprintf(
		"%.0f rows inserted, %.0f messages published during %s",
		m.Inserted,
		m.Published,
		took,
	)
	if m.StreamSeconds > 0 {
		average := m.StreamMessages / m.StreamSeconds
		d.events = max(d.events, average)
		how += fmt.Sprintf("; %s/s on average over what the stream keeps (%s): the higher one counts",
			units.Rate(average), units.Duration(time.Duration(m.StreamSeconds*float64(time.Second))))
	}
	d.add(Figure{Name: "events", Value: d.events, Unit: "events/s", From: FromMeasured, How: how})

	d.from = FromMeasured
	switch {
	case m.Messages > 0:
		d.size = float64(m.StreamBytes) / float64(m.Messages)
		how = fmt.Sprintf("mean of the %s messages in the stream, header and subject included",
			units.Count(m.Messages))
	case m.SampledRows > 0:
		d.size = m.MeanRow + perMessage
		how = fmt.Sprintf(
			"mean of the newest %s, and %d B assumed for header and subject; the largest "+
				"payload has %s",
			things(m.SampledRows, "row"),
			perMessage,
			units.Size(uint64(m.LargestRow)),
		)
	default:
		d.size, d.from = rowSize+perMessage, FromAssumed
		how = "there is no message and no row to measure"
	}
	d.add(Figure{Name: "an event in the stream", Value: d.size, Unit: "bytes", From: d.from, How: how})
	if d.wal > 0 {
		share := min(100*d.events*d.size/d.wal, 100)
		d.add(Figure{Name: "share of the outbox in the WAL", Value: share, Unit: "percent", From: d.from,
			How:  "events times their size, of the WAL: the rest is decoded and dropped",
			text: fmt.Sprintf("about %.0f %%", share)})
	}
}

// retention is what PostgreSQL keeps while nothing is published.
func (d *deriver) retention() {
	for _, outage := range d.o.Outages {
		whole := outage + d.cfg.Sink.DurableAfter
		need := walReserve * d.wal * whole.Seconds()
		how := fmt.Sprintf("the WAL of %s and of sink.durable_after (%s), and a quarter more",
			units.Duration(outage), units.Duration(d.cfg.Sink.DurableAfter))
		d.add(
			Figure{Name: "max_slot_wal_keep_size for " + units.Duration(outage), Value: need, Unit: "bytes",
				From: FromMeasured, How: how, Now: d.keeps()},
		)
		d.add(
			Figure{Name: "disk of pg_wal for " + units.Duration(outage), Value: need + float64(d.m.MaxWAL),
				Unit: "bytes", From: FromMeasured, How: "that, and max_wal_size", Now: "max_wal_size is " +
					units.Size(bytes(float64(d.m.MaxWAL)))},
		)
	}
}

func (d *deriver) keeps() string {
	switch {
	case d.m.KeepSize < 0:
		return "no limit: nothing is lost, and a long outage fills the disk"
	case d.wal == 0:
		return units.Size(uint64(d.m.KeepSize))
	}
	return fmt.Sprintf("%s: holds %s at this rate", units.Size(uint64(d.m.KeepSize)),
		lasts(float64(d.m.KeepSize)/d.wal))
}

// lasts prints how long something lasts; what lasts longer than a century lasts.
func lasts(seconds float64) string {
	const century = 100 * 365 * 24 * time.Hour
	if seconds > century.Seconds() {
		return "more than 100 years"
	}
	return units.Duration(time.Duration(seconds * float64(time.Second)))
}

// table is what the rows take that stay for a repair.
func (d *deriver) table() {
	m, set := d.m, d.cfg.Retain.Table
	if !d.cfg.Source.Rows() {
		return
	}
	size, from, how := float64(rowSize+perRow), FromAssumed, "there is no row to measure"
	switch {
	case m.TableRows >= fewRows:
		size, from = float64(m.TableBytes)/m.TableRows, FromMeasured
		how = "the table's size by its rows, indexes included"
	case m.SampledRows > 0:
		size, from = m.MeanRow+perRow, FromMeasured
		how = fmt.Sprintf("mean of the newest %s, and %d B assumed for the other columns and the index",
			things(m.SampledRows, "row"), perRow)
	}
	stay, setting := set.Keep, "retain.table.keep"
	if set.Age > stay {
		stay, setting = set.Age, "retain.table.age"
	}
	table := Figure{
		Name: "disk of the table for " + units.Duration(stay),
		Value: streamReserve * d.events *
			size * stay.Seconds(),
		Unit: "bytes",
		From: from,
		Now:  units.Size(bytes(float64(m.TableBytes))) + " used",
		How: fmt.Sprintf(
			"events times %s (%s) for %s, and a fifth more, if `outflow partition apply` runs; "+
				"without it nothing goes",
			units.Size(bytes(size)),
			how,
			setting,
		),
	}
	if d.events == 0 {
		table.text = "not known"
	}
	d.add(table)
	if set.Method != config.RetainPartition || set.Every == 0 {
		return
	}
	count := math.Ceil(stay.Seconds()/set.Every.Seconds()) + float64(set.Ahead)
	d.add(Figure{Name: "partitions of the table", Value: count, Unit: "count", From: FromConfigured,
		How: fmt.Sprintf("%s in parts of retain.table.every (%s), and retain.table.ahead (%d)", setting,
			units.Duration(set.Every), set.Ahead), Now: fmt.Sprint(m.Partitions)})
}

// things are so many of a thing.
func things(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return units.Count(n) + " " + thing + "s"
}

func (d *deriver) stream() {
	m, rate := d.m, d.events*d.size
	need := streamReserve * rate * float64(d.o.Days) * 24 * 3600
	replicas := d.cfg.Init.Replicas
	now := fmt.Sprintf("not known: %s", m.NATS)
	switch {
	case m.NATS != "":
	case !m.Stream:
		now = "there is no stream"
	case m.MaxBytes <= 0:
		now = fmt.Sprintf("no limit, %s used", units.Size(m.StreamBytes))
	case rate == 0:
		now = units.Size(uint64(m.MaxBytes))
	default:
		now = fmt.Sprintf("%s: holds %s at this rate", units.Size(uint64(m.MaxBytes)),
			lasts(float64(m.MaxBytes)/rate))
	}
	if m.Stream {
		replicas = m.Replicas
	}
	unknown, how := "", "events times their size, and a fifth more; each replica takes that much disk"
	if rate == 0 { // 0 would be read as an answer, and by JetStream as no limit
		unknown, how = "not known", "no event came: measure while they come, with --measure 5m"
	}
	d.add(Figure{Name: "max_bytes of the stream for " + things(d.o.Days, "day"), Value: need,
		Unit: "bytes", From: d.from, Now: now, How: how, text: unknown})
	d.add(Figure{Name: "disk of NATS, all replicas", Value: need * float64(replicas), Unit: "bytes",
		From: d.from, How: "what max_bytes above is, for " + things(replicas, "replica"), text: unknown})
	out := rate * float64(m.Consumers+replicas-1)
	d.add(Figure{Name: "network of NATS", Value: rate + out, Unit: "bytes/s", From: d.from, text: unknown,
		How: fmt.Sprintf("in once, out to %s and %s; after an outage as much as "+
			"the network gives", things(replicas-1, "other replica"), things(m.Consumers, "consumer"))})
	bucket := Figure{Name: "bucket of the checkpoint record", Value: recordSize, Unit: "bytes",
		From: FromAssumed, How: "64 revisions of at most 16 KiB, in each replica"}
	if m.Bucket > 0 {
		bucket.Now = units.Size(m.Bucket)
	}
	d.add(bucket)
}

func (d *deriver) process() {
	r := d.cfg.Reorder
	limit := gclimit.Limit(r.Settings(), d.cfg.Sink.MaxPayload)
	d.add(Figure{Name: "memory of outflow run", Value: float64(limit), Unit: "bytes", From: FromConfigured,
		How: fmt.Sprintf("reorder.max_events %s, reorder.max_bytes %s, sink.max_payload %s; give the "+
			"container a quarter more", units.Count(r.MaxEvents), units.Size(uint64(r.MaxBytes)),
			units.Size(uint64(d.cfg.Sink.MaxPayload)))})
	spill := Figure{Name: "disk for large transactions", Value: float64(r.MaxSpill), Unit: "bytes",
		From: FromConfigured, How: "reorder.max_spill, in reorder.spill_dir"}
	if r.MaxSpill == 0 {
		spill.text = "no limit"
		spill.How = "as the largest transaction: reorder.max_spill is not set; in reorder.spill_dir"
	}
	d.add(spill)
}

func (d *deriver) servers() {
	m := d.m
	slots, one := m.Slots, 1
	if m.SlotThere {
		one = 0
	}
	d.add(Figure{Name: "max_replication_slots", Value: float64(slots + one), Unit: "count",
		From: FromMeasured, How: fmt.Sprintf("%d in use; this one is among them, or comes to them", slots),
		Now: fmt.Sprint(m.MaxSlots)})
	d.add(Figure{Name: "max_wal_senders", Value: float64(m.Senders + processes), Unit: "count",
		From: FromMeasured, How: fmt.Sprintf("%d in use, and %d for a take-over", m.Senders, processes),
		Now: fmt.Sprint(m.MaxSenders)})
	d.add(Figure{Name: "connections of two outflows", Value: processes * connections, Unit: "count",
		From: FromAssumed, How: fmt.Sprintf("%d for each that runs, one of them a WAL sender", connections),
		Now: fmt.Sprintf("%d for this slot, %d of all; max_connections is %d", m.Own, m.Connections,
			m.MaxConns)})
}
