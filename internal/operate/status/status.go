// Package status is `outflow status`: it reads slot, checkpoint record, stream and server, as a start would,
// without changing anything.
//
// It is internal to Outflow: its API may change at any time.
package status

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Report is what was read. The JSON names are stable.
type Report struct {
	Health  string `json:"health"` // ok, not running, or the code of what is wrong
	Problem string `json:"problem,omitempty"`

	Source     string            `json:"source"` // table, message or both
	Table      string            `json:"table"`  // "" if there is none
	Shard      string            `json:"shard,omitempty"`
	Slot       Slot              `json:"slot"`
	Stream     Stream            `json:"stream"`
	Checkpoint *relay.Checkpoint `json:"place,omitempty"` // the newest recorded one
	Recorded   *time.Time        `json:"recorded,omitempty"`

	WALEnd   outbox.LSN `json:"wal_end"`
	LagBytes uint64     `json:"lag_bytes"` // WAL between the newest recorded checkpoint and the end
}

// Slot is the slot's health.
type Slot struct {
	Name          string     `json:"name"`
	Exists        bool       `json:"exists"`
	Active        bool       `json:"active"`
	PID           int        `json:"pid,omitempty"`
	Confirmed     outbox.LSN `json:"confirmed"`
	RetainedBytes uint64     `json:"retained_bytes"`
	WALStatus     string     `json:"wal_status,omitempty"`
	// until the slot is in danger; absent: no limit
	SafeWALBytes *int64 `json:"safe_wal_bytes,omitempty"`
	Invalidation string `json:"invalidation,omitempty"`
}

// Stream is the stream's health.
type Stream struct {
	Name         string `json:"name"`
	Exists       bool   `json:"exists"`
	Messages     uint64 `json:"messages"`
	LastSequence uint64 `json:"last_sequence"`
	Replicated   bool   `json:"replicated"`

	Loss             string   `json:"loss,omitempty"`              // what shows that it lost messages
	DurablesAffected []string `json:"durables_affected,omitempty"` // durable consumers that may have had them
}

// Read reads everything. An error means that something could not be read; the report says if what was read is
// wrong.
func Read(ctx context.Context, cfg config.Config, log *slog.Logger) (*Report, error) {
	c, err := conns.Open(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	r, err := c.Reader().Read(ctx)
	if err != nil {
		return nil, err
	}
	var setup error
	if r.Slot.Exists || r.Record != nil {
		if r.Publication, setup = c.Session.Publication(ctx, c.Layout.Needed()); setup == nil {
			setup = c.NATS.CheckStream(ctx)
		}
	}
	return report(cfg, wiring.Checkpoint(cfg, c.Layout), &r, setup), nil
}

func report(cfg config.Config, cc checkpoint.Config, r *checkpoint.Readings, setup error) *Report {
	rep := &Report{
		Health: "ok", Source: cc.Mapping.Source.String(), Table: cc.Table, Shard: cc.Mapping.Shard.String(),
		WALEnd: r.Server.WALEnd,
		Slot: Slot{
			Name: cfg.Slot, Exists: r.Slot.Exists, Active: r.Slot.Active, PID: r.Slot.ActivePID,
			Confirmed:     r.Slot.Confirmed,
			RetainedBytes: outbox.Distance(r.Slot.Restart, r.Server.WALEnd), WALStatus: r.Slot.WALStatus,
			Invalidation: r.Slot.Invalidation,
		},
		Stream: Stream{
			Name: cfg.Stream, Exists: r.Stream.Exists, Messages: r.Stream.Messages,
			LastSequence: r.Stream.LastSeq, Replicated: r.Stream.Replicated,
		},
	}
	if r.Slot.Exists && r.Slot.SafeWALSize >= 0 {
		rep.Slot.SafeWALBytes = &r.Slot.SafeWALSize
	}
	if r.Record != nil && len(r.Record.Checkpoints) > 0 {
		newest := r.Record.Checkpoints[len(r.Record.Checkpoints)-1]
		rep.Checkpoint, rep.Recorded = &newest.Checkpoint, &newest.Since
		rep.LagBytes = outbox.Distance(newest.Due, r.Server.WALEnd)
	}
	if setup == nil {
		var start checkpoint.Start
		start, setup = checkpoint.Resolve(cc, *r)
		rep.Stream.Loss = start.Loss
	}
	fault := outbox.FaultOf(setup)
	if rep.Stream.Loss != "" || fault != nil && fault.Code == "stream_shortened" {
		rep.Stream.DurablesAffected = r.Stream.Durables
	}
	switch {
	case fault != nil:
		rep.Health, rep.Problem = fault.Code, fault.Error()
	case setup != nil:
		rep.Health, rep.Problem = "waiting", setup.Error()
	case !r.Slot.Active:
		rep.Health, rep.Problem = "not running", "no outflow holds the slot"
	}
	return rep
}

// Lines is the report for people: names and values.
func (r *Report) Lines() [][2]string {
	lines := [][2]string{{"health", r.Health}}
	add := func(name, format string, args ...any) {
		lines = append(lines, [2]string{name, fmt.Sprintf(format, args...)})
	}
	if r.Problem != "" {
		add("", "%s", r.Problem)
	}
	switch r.Source {
	case string(relay.FromMessage):
		add("source", "logical messages (%s)", outbox.EventPrefix)
	case string(relay.FromBoth):
		add("table", "%s", r.Table)
		add("", "and logical messages (%s)", outbox.EventPrefix)
	default:
		add("table", "%s", r.Table)
	}
	if r.Shard != "" {
		add("shard", "%s", r.Shard)
	}
	switch {
	case !r.Slot.Exists:
		add("slot", "%s: missing", r.Slot.Name)
	case r.Slot.Active:
		add("slot", "%s: held by pid %d, wal_status %s, %d bytes of WAL kept", r.Slot.Name, r.Slot.PID,
			r.Slot.WALStatus, r.Slot.RetainedBytes)
	default:
		add("slot", "%s: held by nobody, wal_status %s, %d bytes of WAL kept", r.Slot.Name, r.Slot.WALStatus,
			r.Slot.RetainedBytes)
	}
	if r.Slot.SafeWALBytes != nil {
		add("", "%d more bytes of WAL until it is in danger (max_slot_wal_keep_size)", *r.Slot.SafeWALBytes)
	}
	if r.Stream.Exists {
		add("stream", "%s: %d messages, last sequence %d", r.Stream.Name, r.Stream.Messages,
			r.Stream.LastSequence)
	} else {
		add("stream", "%s: missing", r.Stream.Name)
	}
	if r.Stream.Loss != "" {
		add("", "a loss: %s", r.Stream.Loss)
	}
	if len(r.Stream.DurablesAffected) > 0 {
		add("", "durable consumers that may have had more: %s", strings.Join(r.Stream.DurablesAffected, ", "))
	}
	add("end of WAL", "%v", r.WALEnd)
	if r.Checkpoint != nil {
		add("recorded", "%v = sequence %d, stored %v", r.Checkpoint.Due, r.Checkpoint.Seq,
			r.Recorded.Format(time.RFC3339))
		add("settings", "%v", r.Checkpoint.Settings)
		if n := len(r.Checkpoint.Holds); n > 0 {
			add("gaps", "%d sequences wait for missing counters; WAL is kept from %v on for them", n,
				r.Checkpoint.Start())
		}
		add("lag", "%d bytes of WAL behind the recorded place", r.LagBytes)
	}
	add("confirmed", "%v", r.Slot.Confirmed)
	return lines
}
