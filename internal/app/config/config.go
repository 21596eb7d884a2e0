// Package config reads Outflow's settings: flags before environment before file before defaults.
//
// One table (settings.go) says of each setting its path, default, accepted values and meaning. Flags,
// environment names, keys of the file, docs/configuration.md and what `outflow config` prints all come from
// it.
package config

import (
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Config is the effective configuration. Its fields mirror the paths of the settings; [Load] has checked and
// completed all of them. It is read-only.
type Config struct {
	// Command is what works with the settings, as its connections say; "": outflow run. It is no setting.
	Command string

	Postgres    Postgres
	NATS        NATS
	Replication Replication
	Source      relay.Source
	Table       string // schema.name, without quotes; not used without rows
	Shard       relay.Shard
	Columns     Columns
	Headers     []Header // ascending by name
	Cluster     Cluster
	Slot        string
	Publication string
	Stream      string
	Subject     string // a template; its syntax is the sink's
	Reorder     Reorder
	Sink        Sink
	Init        Init
	Retain      Retain
	Archive     Archive
	Maintain    Maintain
	Listen      string // host:port; "": no listener
	ListenHosts string // further names that requests may name, separated by commas
	Log         Log
	OnFault     string
	StopTimeout time.Duration // for what is in flight at a clean stop

	Repeat finding.Options // what a suggested command repeats of the command line

	from map[string]origin // by path: where the value came from
}

// Postgres says how PostgreSQL is reached.
type Postgres struct {
	URL      string // "": libpq's PG* variables and defaults
	WriteURL string // for heartbeats and changes of settings; URL if it was not given
}

// Replication says what of the WAL is read.
type Replication struct {
	Origin   string
	Explicit bool // it was given; otherwise it follows the checkpoint record, if there is one
}

// The values of replication.origin.
const (
	OriginOwn = "own" // only transactions that were written on this server
	OriginAny = "any" // also those that were replicated from another one
)

// Cluster says which of several active databases this is, whose rows are replicated to one another.
type Cluster struct {
	ID           int // from 1 on; 0: there is one database
	Count        int // 0: not said
	Mode         string
	MaximumDelay time.Duration
	Control      string // a table's name; "": ticks and changes of settings are logical messages
	Subscription string // what it brings is published; "": what is written here
	// Subscriptions names, as number=name,…, the one that brings each other cluster's rows; see
	// [Cluster.Others].
	Subscriptions string
	Gone          string // their numbers, separated by commas; see [Cluster.GoneForGood]
}

// The values of cluster.mode.
const (
	ModeNone = "none" // no cluster publishes for another one
	// clusters share one NATS, in which each home's stream is, and another one goes on with the stream of a
	// home that is silent
	ModeShared = "shared"
	// clusters share nothing, and another one publishes for a home that is silent into a stream of its own
	ModeIslands = "islands"
)

// Shared reports whether clusters share the stream.
func (c Cluster) Shared() bool { return c.Mode == ModeShared }

// Islands reports whether clusters that share nothing publish for one another.
func (c Cluster) Islands() bool { return c.Mode == ModeIslands }

// Others are the subscriptions that bring the other clusters' rows, by their numbers; nil without the mode
// islands.
func (c Cluster) Others() map[int]string {
	if !c.Islands() {
		return nil
	}
	others, _ := parseSubscriptions(c.Subscriptions) // as it was read
	return others
}

// GoneForGood are the clusters whose answers a home does not wait for; nil without the mode islands.
func (c Cluster) GoneForGood() []int {
	if !c.Islands() {
		return nil
	}
	all, _ := parseNumbers(c.Gone) // as it was read
	return all
}

// Elsewhere reports whether the stream that clusters share is another one's, which is its home.
func (c Cluster) Elsewhere() bool { return c.Shared() && c.Subscription != "" }

// NATS says how NATS is reached. At most one way to authenticate is set.
type NATS struct {
	URL          string // one or more, separated by commas; "" where Context says it
	Context      string
	Creds        string // file
	NKey         string // file
	User         string
	Password     string
	PasswordFile string
	Token        string
	TokenFile    string
	TLS          TLS
}

// TLS names PEM files; "" for none.
type TLS struct {
	CA   string
	Cert string
	Key  string
}

// Columns names the table's columns by role. See [ResolveMapping].
type Columns struct {
	ID      Column
	Doc     Column
	Actor   Column
	Counter Column
	Span    Column
	Key     Column
	Payload Column
}

// Column is a column's name. Explicit tells a name that was given from a default, which need not exist. ""
// means that the table has no such column.
type Column struct {
	Name     string
	Explicit bool
}

// Header maps a column to a message header.
type Header struct {
	Name   string
	Column string
}

// Reorder holds the ordering settings.
type Reorder struct {
	Mode string

	// of horizon mode
	Horizon time.Duration // whole microseconds, 0 to 24h
	Sort    outbox.Sort   // not outbox.ByGap

	// of gap mode
	Bound        time.Duration // whole microseconds, more than 0, to 24h
	Cold         time.Duration // whole microseconds, 0 to Bound
	Memory       int           // at least 1
	FirstCounter int           // 0 or 1
	GapScope     relay.Scope

	MaxEvents int   // at least 1
	MaxBytes  int64 // at least 1
	Tick      string
	SpillDir  string // never ""
	MaxSpill  int64  // bytes; 0: no limit
}

// The values of reorder.mode.
const (
	ModeHorizon = "horizon"
	ModeGap     = "gap"
)

// The values of reorder.tick.
const (
	TickWAL = "wal" // outflow writes heartbeats
	TickOff = "off" // others do
)

// Settings returns the part that the WAL carries. What belongs to the other mode is left out of it: so each
// mode's settings may stay in a file while the other one is in force.
func (r Reorder) Settings() relay.Settings {
	if r.Mode == ModeGap {
		return relay.Settings{Sort: outbox.ByGap, MaxEvents: r.MaxEvents, MaxBytes: r.MaxBytes,
			Gap: relay.Gap{Bound: r.Bound, Cold: r.Cold, Memory: r.Memory, First: int64(r.FirstCounter),
				Scope: r.GapScope}}
	}
	return relay.Settings{Horizon: r.Horizon, Sort: r.Sort, MaxEvents: r.MaxEvents, MaxBytes: r.MaxBytes}
}

// Sink holds the settings of publishing and confirming.
type Sink struct {
	DurableAfter      time.Duration // 0 or more
	OnPoison          string
	DeadLetterSubject string
	MaxPayload        int // bytes, 1 KiB to 64 MiB
	MsgID             bool
}

// The values of sink.on_poison.
const (
	PoisonStop       = "stop"
	PoisonDeadLetter = "dead_letter"
)

// Init says how init makes the stream.
type Init struct {
	Replicas int    // 1 to 5
	Storage  string // file or memory
	MaxAge   time.Duration
	MaxBytes int64 // 0: no limit

	Partition InitPartition
}

// InitPartition says how init makes a table. By is "" for one that is not partitioned.
type InitPartition struct {
	By    string        // the column of the insert's time
	Every time.Duration // whole seconds, at least one
}

// Retain says what goes from the database and the stream, and when.
type Retain struct {
	PostgresURL string   // as the table's owner; postgres.url if it was not given
	OtherSlots  []string // that do not count
	Table       RetainTable
	Stream      RetainStream
}

// RetainStream says what goes from the stream. Age, Size and Messages choose how much, 0: no limit.
type RetainStream struct {
	Age             time.Duration
	Size            int64 // bytes
	Messages        int
	IgnoreConsumers []string // that are not waited for
}

// RetainTable says what goes from the table. Age, Size and Rows choose how much, 0: no limit.
type RetainTable struct {
	Method string
	Keep   time.Duration
	Age    time.Duration
	Size   int64 // bytes
	Rows   int
	Every  time.Duration // whole seconds; 0: as the newest partition
	Ahead  int           // 2 to 64
	Slack  time.Duration
}

// Archive says where the cold part of the stream is kept, and in what pieces.
type Archive struct {
	URL         string // "": there is none
	SegmentSize int64  // bytes, compressed
	SegmentAge  time.Duration
}

// Maintain says how outflow maintain works.
type Maintain struct {
	Every  time.Duration // from 1s on
	Listen string        // host:port; "": no listener
}

// The values of retain.table.method.
const (
	RetainPartition = "partition"
	RetainDelete    = "delete"
)

// The values of on_fault.
const (
	FaultExit = "exit"
	FaultHold = "hold"
)

// Log says what is logged, and how.
type Log struct {
	Format string // text or json
	Level  slog.Level
}
