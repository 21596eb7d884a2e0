// Package partition is `outflow partition`: it says, or does, what keeps the outbox table small. What may go
// is decided in internal/lifecycle/partition; this package tells it what the checkpoint record and the stream
// say.
package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// Options say what to do.
type Options struct {
	Apply             bool  // do it; otherwise only say what would be done
	AcceptUnpublished int64 // partitions with exactly so many rows that were never published may go
	PlainStays        bool  // a table that is not partitioned is no error: nothing of it goes

	Known *archive.Known // what is known of the archive from the run before; may be nil

	Turn time.Duration   // how long rows are let go at most; 0: until all have gone
	Pass *partition.Pass // how far the run before has come with a plain table

	Step func(partition.Step) // called after each step
	Hit  func(point string)   // called at points where tests kill the process; may be nil
}

// Report says what was done and where each partition stands, or what would be done. The JSON names are
// stable.
type Report struct {
	Table   string           `json:"table"`
	Applied bool             `json:"applied"`
	Steps   []partition.Step `json:"steps"`
	Notes   []string         `json:"notes,omitempty"`
}

// command is one run.
type command struct {
	cfg config.Config
	l   *backfill.Conns

	store   archive.Store // nil: there is no archive
	known   *archive.Known
	archive *archive.Archive // that of the stream as it was last seen; nil: not read yet
}

// Run plans or applies. The report is nil only where nothing could be found out.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (*Report, error) {
	if !cfg.Source.Rows() {
		return nil, &outbox.Fault{Class: outbox.Usage,
			Message: "source is message: there is no outbox table", Hint: "There is nothing to keep small"}
	}
	l, err := backfill.Open(ctx, cfg, log)
	if err != nil {
		return ahead(ctx, cfg, log, o, err)
	}
	defer l.Close()
	there, err := l.Session.Server(ctx)
	if err != nil {
		return nil, err
	}
	c := &command{cfg: cfg, l: l, known: cmp.Or(o.Known, &archive.Known{})}
	if cfg.Archive.URL != "" {
		if c.store, err = archive.Open(ctx, cfg.Archive.URL); err != nil {
			return ahead(ctx, cfg, log, o, err)
		}
		defer func() { _ = c.store.Close() }()
	}
	m, err := partition.Open(ctx, conns.Owner(cfg, there), c.config(), partition.Options{
		Outside: c.outside, Published: c.published, Step: o.Step, Hit: o.Hit,
		AcceptUnpublished: o.AcceptUnpublished, Turn: o.Turn, Pass: o.Pass,
	})
	if err != nil {
		return nil, err
	}
	defer m.Close()
	rep := &Report{Table: l.Layout.Mapping.Table, Applied: o.Apply}
	if o.PlainStays && !m.Partitioned() && cfg.Retain.Table.Method != config.RetainDelete {
		rep.Notes = append(rep.Notes, "the table is not partitioned, and retain.table.method is partition: "+
			"its rows stay")
		return rep, nil
	}
	if l.Layout.ID == "" {
		rep.Notes = append(rep.Notes, "there is no id column: rows can't be compared with the stream, and "+
			"only the fence shows that they are published")
	}
	if !cfg.Shard.Whole() {
		note := "they are not compared, and only the fence shows that they are published"
		switch {
		case cfg.Retain.Table.Method == config.RetainDelete:
			note = "they stay for the runs of their own shards"
		case c.store != nil:
			note += "; retain.table.keep counts, because their archives are others"
		}
		rep.Notes = append(rep.Notes, fmt.Sprintf("rows of other shards than %v are in other streams: %s",
			cfg.Shard, note))
	}
	run, byRows := m.Plan, cfg.Retain.Table.Method == config.RetainDelete
	switch {
	case byRows && o.Apply:
		run = m.Delete
	case byRows:
		run = m.PlanDelete
	case o.Apply:
		run = m.Apply
	}
	if rep.Steps, err = run(ctx); err != nil {
		return rep, err
	}
	if !o.Apply {
		err := m.CheckRights(ctx, byRows)
		if f := outbox.FaultOf(err); f != nil {
			rep.Notes = append(rep.Notes, fmt.Sprintf("apply is refused (%s): %v", f.Code, f))
		} else if err != nil {
			return rep, err
		}
	}
	if !byRows {
		return rep, nil
	}
	set, err := m.Autovacuum(ctx)
	if set != "" {
		rep.Notes = append(rep.Notes, "rows are deleted all the time, and the table's autovacuum is that "+
			"of the server: "+set)
	}
	return rep, err
}

// ahead makes the partitions that have to lie ahead although nothing may go, because of cause: NATS, the
// stream or the archive is away.
func ahead(ctx context.Context, cfg config.Config, log *slog.Logger, o Options, cause error) (*Report,
	error) {
	if !o.Apply || cfg.Retain.Table.Method == config.RetainDelete {
		return nil, cause
	}
	var there relay.ServerState // unknown where postgres.url is away: to make a partition removes nothing
	if s, err := wiring.Inspect(ctx, cfg, log); err == nil {
		there, _ = s.Server(ctx)
		s.Close()
	}
	m, err := partition.Open(ctx, conns.Owner(cfg, there), partition.Config{Table: cfg.Table,
		Slot: cfg.Slot, Every: cfg.Retain.Table.Every, Ahead: cfg.Retain.Table.Ahead}, partition.Options{
		Step: o.Step, Hit: o.Hit,
		Outside: func(context.Context) (p partition.Outside, err error) { return p, cause }})
	if f := outbox.FaultOf(err); f != nil && f.Code == "retain_url" {
		return nil, err
	}
	if err != nil {
		return nil, cause
	}
	defer m.Close()
	if !m.Partitioned() {
		return nil, cause
	}
	rep := &Report{Table: cfg.Table, Applied: true}
	if rep.Steps, err = m.Apply(ctx); !errors.Is(err, cause) { // it has not come so far as to ask
		err = errors.Join(cause, err)
	}
	return rep, err
}

func (c *command) config() partition.Config {
	r := c.cfg.Retain
	return partition.Config{
		Own: rowfilter.Condition(c.cfg.Shard, postgres.Quote(c.l.PGC.ShardBy)), ShardBy: c.l.PGC.ShardBy,
		Table: c.l.PGC.Table, Slot: c.cfg.Slot, ID: c.l.Layout.ID, Every: r.Table.Every, Ahead: r.Table.Ahead,
		Slack: r.Table.Slack, Keep: r.Table.Keep, Age: r.Table.Age, Size: r.Table.Size,
		Rows: int64(r.Table.Rows), OtherSlots: r.OtherSlots, Archive: c.cfg.Archive.URL != "",
		OwnOnly: c.l.Layout.Mapping.OwnOnly,
	}
}

// outside reads what a start of outflow run reads: where that finds a gap, nothing may go.
func (c *command) outside(ctx context.Context) (o partition.Outside, err error) {
	rd, err := c.l.Read(ctx)
	if err != nil {
		return o, err
	}
	if rd.Corrupt != nil {
		return o, rd.Corrupt
	}
	if rd.Record != nil {
		o.Repairing = unfinished(rd.Record.Repairing)
	}
	others, err := c.l.Others(ctx, rd)
	if err != nil {
		return o, err
	}
	o.Readers, o.Streams = c.l.Readers(rd, others), map[string]time.Time{}
	for _, other := range others {
		r := other.Record
		if r != nil && !r.LeftBehind() && other.Slot != c.cfg.Slot &&
			r.Created.After(o.Streams[other.Slot]) { // the slot may have had a stream of another name
			o.Streams[other.Slot] = r.Created
		}
		if r != nil && apart(r.Mapping, c.l.Layout.Mapping) {
			o.Apart = append(o.Apart, other.Slot)
		}
		if r != nil && r.Repairing != "" && o.Repairing == "" {
			o.Repairing = unfinished(r.Repairing) + " of slot " + other.Slot
			if r.Database != rd.Server.Database {
				o.Repairing += fmt.Sprintf(", whose record is of database %q, as this one may have been "+
					"called (uninstall that Outflow if nobody needs it),", r.Database)
			}
		}
	}
	if rd.Stream.Exists {
		o.Stream = partition.Stream{Created: rd.Stream.Created, LastSeq: rd.Stream.LastSeq}
		if c.store != nil {
			o.Archive = c.reach(ctx, rd)
		}
	}
	if o.Repairing != "" { // what a start says of it is no news
		return o, nil
	}
	_, err = checkpoint.Resolve(c.l.CC, rd.Readings)
	return o, err
}

// apart reports whether no row is in both of two shards: they are of one division.
func apart(a, b relay.Mapping) bool {
	return a.Doc == b.Doc && a.Shard.Of == b.Shard.Of && a.Shard.Index != b.Shard.Index
}

func unfinished(repairing string) string {
	switch repairing {
	case "":
		return ""
	case "snapshot":
		return "outflow init --snapshot"
	}
	return "outflow repair --accept " + repairing
}

// published reads the ids of the stream's events, or those of its archive where there is one.
func (c *command) published(ctx context.Context, in partition.Period, add func(id [16]byte) error) (
	seen partition.Seen, err error) {
	st, err := c.l.NATS.State(ctx)
	if err != nil {
		return seen, err
	}
	seen.Stream = partition.Stream{Created: st.Created, LastSeq: st.LastSeq}
	if c.store != nil {
		return seen, c.archived(ctx, st.Created, in, add)
	}
	js, err := c.l.NATS.API().JetStream()
	if err != nil {
		return seen, err
	}
	s, err := js.Stream(ctx, c.cfg.Stream)
	if err != nil {
		return seen, fmt.Errorf("stream %s: %w", c.cfg.Stream, err)
	}
	first := s.CachedInfo().State
	seen.Oldest, seen.Removed = first.FirstTime, first.FirstSeq > 1
	if first.Msgs == 0 {
		seen.Oldest, seen.Removed = time.Time{}, st.LastSeq > 0
	}
	if st.NewestSeq == 0 {
		return seen, nil
	}
	oc := jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy, HeadersOnly: true}
	if !in.Since.IsZero() && in.Since.Before(s.CachedInfo().State.LastTime) {
		oc.DeliverPolicy, oc.OptStartTime = jetstream.DeliverByStartTimePolicy, &in.Since
	}
	task := progress.Count(ctx, "reading the event ids of stream "+c.cfg.Stream, "messages", 0)
	defer task.End()
	err = jsapi.ReadStream(ctx, js, c.cfg.Stream, oc, st.NewestSeq, func(m jetstream.Msg,
		meta *jetstream.MsgMetadata) error {
		if !in.Until.IsZero() && meta.Timestamp.After(in.Until) {
			return jsapi.ErrStop
		}
		task.Add(1)
		header := m.Headers().Get(outbox.HeaderName)
		if outbox.HeaderID(header) == "" {
			return nil
		}
		return add(outbox.HeaderIDSum(header))
	})
	return seen, err
}
