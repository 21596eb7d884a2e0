// Package overview says how an installation is: what is wrong and what to do about it, in a line; and each
// part of the chain from PostgreSQL to the consumers with its figures. The status page and outflow status
// show the same.
package overview

import (
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/pipeline"
)

// Info is what does not change while a process runs.
type Info struct {
	Version string    `json:"version"`
	Go      string    `json:"go_version"`
	Host    string    `json:"host"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	Source  string    `json:"source"`          // table, message or both
	Table   string    `json:"table"`           // "" if there is none
	Shard   string    `json:"shard,omitempty"` // for example "0/2"

	Slot   string `json:"-"` // the names; they stand beside what was read
	Stream string `json:"-"`

	Cluster config.Cluster `json:"-"`

	Where  wiring.Where    `json:"-"`
	Repeat finding.Options `json:"-"`
	// messages in flight at most
	InFlightLimit int `json:"in_flight_limit"`
}

// Report is everything that is known at a moment. Its JSON is /status.json, and most of outflow status
// --json.
type Report struct {
	Verdict  Verdict          `json:"verdict"`
	Where    wiring.Where     `json:"where"`
	Outflow  *Info            `json:"outflow,omitempty"`  // nil: not of a process that runs
	Pipeline *pipeline.Status `json:"pipeline,omitempty"` // likewise
	Postgres watch.Postgres   `json:"postgres"`
	Slot     Slot             `json:"slot"`
	// processes that are connected for the slot
	Instances []watch.Instance `json:"instances"`
	// of several active databases: which one this is, and what it knows of the others
	Cluster *Cluster   `json:"cluster,omitempty"`
	NATS    watch.NATS `json:"nats"`
	Stream  Stream     `json:"stream"`
	// durable ones of the stream, sorted by name
	Consumers []watch.Consumer `json:"consumers"`
	// how fresh that list is: it is read less often, and with a right that is optional
	ConsumerList     watch.Read `json:"consumer_list"`
	ConsumersLeftOut int        `json:"consumers_left_out,omitempty"`

	Partitions  watch.Partitions  `json:"partitions"`
	Maintenance watch.Maintenance `json:"maintenance"`

	now    time.Time
	repeat finding.Options // in commands that the verdict suggests
}

// Slot is the replication slot and its name.
type Slot struct {
	Name string `json:"name"`
	watch.Slot
}

// Stream is the stream and its name.
type Stream struct {
	Name string `json:"name"`
	watch.Stream
}

// New reports on a process that runs.
func New(info *Info, s *pipeline.Status, r *watch.Reading, now time.Time) *Report {
	rep := of(info.Slot, info.Stream, r, now)
	rep.Outflow, rep.Pipeline, rep.Where, rep.repeat = info, s, info.Where, info.Repeat
	rep.Cluster = ClusterOf(info.Cluster, r)
	rep.Cluster.Owns(s.Owner, s.Epoch)
	rep.Cluster.Stands(s.Agreed)
	rep.Cluster.Knows(s.Said, s.Tally, s.Kept)
	rep.say(rep.ofPipeline())
	return rep
}

// Of reports on what was read of both servers of an installation. The verdict is the caller's.
func Of(cfg config.Config, r *watch.Reading, now time.Time) *Report {
	rep := of(cfg.Slot, cfg.Stream, r, now)
	rep.Where, rep.repeat = wiring.WhereIs(cfg), cfg.Repeat
	rep.Cluster = ClusterOf(cfg.Cluster, r)
	return rep
}

func of(slot, stream string, r *watch.Reading, now time.Time) *Report {
	return &Report{
		Postgres: r.Postgres, Slot: Slot{slot, r.Slot}, NATS: r.NATS, Stream: Stream{stream, r.Stream},
		Instances: append([]watch.Instance{}, r.Instances...),
		Consumers: append([]watch.Consumer{}, r.Consumers...), ConsumerList: r.ConsumerList,
		ConsumersLeftOut: r.ConsumersLeftOut, Partitions: r.Partitions, Maintenance: r.Maintenance, now: now,
	}
}

// Level is how well something is.
type Level string

// The levels, each with a shape of its own, so that nobody needs to see colours.
const (
	Good    Level = "good"
	Idle    Level = "idle" // nothing to do, or not in use
	Unknown Level = "unknown"
	Warning Level = "warning" // goes on by itself, or is a risk
	Bad     Level = "bad"
)

// Shape is a character that shows the level.
func (l Level) Shape() string {
	switch l {
	case Good:
		return "✔"
	case Warning:
		return "▲"
	case Bad:
		return "✖"
	case Unknown:
		return "?"
	}
	return "○"
}
