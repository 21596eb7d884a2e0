// Package wiring turns the configuration into the parts' own configurations and opens a session's
// connections. It is the one place that knows all parts.
package wiring

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/gclimit"
	"github.com/outflowhq/outflow/internal/app/tempfile"
	"github.com/outflowhq/outflow/internal/app/tracing"
	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/sink"
)

// Replication is the configuration of a replication session.
func Replication(cfg config.Config, log *slog.Logger) replication.Config {
	return replication.Config{Config: Catalog(cfg), WriteURL: cfg.Postgres.WriteURL, Logger: log}
}

// Catalog names the outbox's parts in PostgreSQL.
func Catalog(cfg config.Config) catalog.Config {
	c := catalog.Config{URL: cfg.Postgres.URL, Slot: cfg.Slot, Command: cfg.Command,
		Publication: cfg.Publication}
	if cfg.Source.Rows() {
		c.Table, c.Shard, c.ShardBy = cfg.Table, cfg.Shard, cfg.Columns.Doc.Name
		c.Control, c.Subscription = cfg.Cluster.Control, cfg.Cluster.Subscription
		if cfg.Cluster.Islands() {
			c.Cluster, c.Clusters = cfg.Cluster.ID, cfg.Cluster.Others()
		}
	}
	return c
}

// Setup is the configuration for making objects in PostgreSQL, with the columns that a new table gets: those
// with a role, and those of mapped headers.
func Setup(cfg config.Config) catalog.SetupConfig {
	c := cfg.Columns
	known := []string{"id", "doc_id", "actor_id", "counter", "span", "seq_key", "payload", "created_at",
		c.ID.Name, c.Doc.Name, c.Actor.Name, c.Counter.Name, c.Span.Name, c.Key.Name, c.Payload.Name,
		cfg.Init.Partition.By}
	var further []string
	for _, h := range cfg.Headers {
		if !slices.Contains(known, h.Column) && !slices.Contains(further, h.Column) {
			further = append(further, h.Column)
		}
	}
	sc := catalog.SetupConfig{
		Config: Catalog(cfg), ID: c.ID.Name, Further: further,
		Mapping: relay.Mapping{Doc: c.Doc.Name, Actor: c.Actor.Name, Counter: c.Counter.Name,
			Span: c.Span.Name,
			Key:  c.Key.Name, Payload: c.Payload.Name},
	}
	if p := cfg.Init.Partition; p.By != "" {
		sc.CreatedAt, sc.PartitionEvery = p.By, p.Every
	}
	return sc
}

// Sink is the configuration of the JetStream side.
func Sink(cfg config.Config, l *Layout, log *slog.Logger) (sink.Config, error) {
	sc, err := base(cfg, log)
	if err != nil {
		return sink.Config{}, err
	}
	sc.Table, sc.Keyed, sc.Resolve = l.Mapping.Table, l.Mapping.Keyed(), l.field
	sc.Home = l.Cluster.Clusters[l.Cluster.Origin]
	return sc, sc.Validate()
}

// Broker is the configuration of the JetStream side for commands that make no messages: they need no table.
func Broker(cfg config.Config, log *slog.Logger) (sink.Config, error) {
	sc, err := base(cfg, log)
	if err != nil {
		return sink.Config{}, err
	}
	sc.Resolve = func(string) (sink.Field, bool) { return 0, true }
	return sc, sc.Validate()
}

func base(cfg config.Config, log *slog.Logger) (sink.Config, error) {
	password, token, err := cfg.NATS.Login()
	if err != nil {
		return sink.Config{}, err
	}
	sc := sink.Config{
		URL: cfg.NATS.URL, Context: cfg.NATS.Context, Creds: cfg.NATS.Creds, NKey: cfg.NATS.NKey,
		User: cfg.NATS.User, Password: password, Token: token,
		TLS:    sink.TLS{CA: cfg.NATS.TLS.CA, Cert: cfg.NATS.TLS.Cert, Key: cfg.NATS.TLS.Key},
		Name:   "outflow " + cfg.Slot,
		Stream: cfg.Stream, Subject: cfg.Subject,
		DeadLetter:        cfg.Sink.OnPoison == config.PoisonDeadLetter,
		DeadLetterSubject: cfg.Sink.DeadLetterSubject,
		MaxPayload:        cfg.Sink.MaxPayload, MsgID: cfg.Sink.MsgID, Logger: log,
	}
	if cfg.Sink.DurableAfter == 0 { // who says so says that the server syncs each write
		sc.Batches = new(sink.Batches)
	}
	sc.Fence = cfg.Cluster.Shared()
	for _, h := range cfg.Headers {
		sc.Headers = append(sc.Headers, sink.MappedHeader{Name: h.Name, Column: h.Column})
	}
	return sc, nil
}

// Decoder is the decoder's configuration.
func Decoder(cfg config.Config, l *Layout) decoder.Config {
	dc := decoder.Config{
		TableOID: l.Table.OID, Mapping: l.Mapping, ID: l.ID, Extra: l.Extra, Slot: cfg.Slot,
		MaxPayload: cfg.Sink.MaxPayload, Control: l.Cluster.Control, Origin: l.Cluster.Origin,
		Clusters: l.Cluster.Clusters,
	}
	if !cfg.Source.Rows() {
		dc.Unread = cfg.Table
	}
	return dc
}

// Checkpoint is the configuration of the checkpoint.
func Checkpoint(cfg config.Config, l *Layout) checkpoint.Config {
	return checkpoint.Config{
		Slot: cfg.Slot, Stream: cfg.Stream, Publication: cfg.Publication, Table: l.Mapping.Table,
		Mapping:      l.Mapping,
		DurableAfter: cfg.Sink.DurableAfter, Cluster: sharedAs(cfg),
	}
}

// Store is the store of the record on a connection, and of what this installation keeps beside it. Where
// clusters share the stream that is what is this cluster's to work on: elsewhere what it keeps for itself, at
// home the stream's record, unless another cluster is the owner.
func Store(cfg config.Config, c *sink.Conn) *checkpoint.Store {
	return checkpoint.NewStore(c.API(), checkpoint.StoreConfig{Stream: cfg.Stream, Slot: cfg.Slot,
		Cluster: modeAs(cfg), Standby: cfg.Cluster.Elsewhere(), Owned: true})
}

// Pipeline is the whole streamer; decorate, last, may wrap what it is connected to. The function that it last
// returns closes what outlives sessions; call it after Run. reload gives connections that are opened from
// then on what [config.Config.Reload] takes over.
func Pipeline(cfg config.Config, log *slog.Logger, metrics prometheus.Registerer,
	decorate ...func(*pipeline.Config)) (p *pipeline.Pipeline, reload func(config.Config), closeAll func()) {
	o := &opener{cfg: cfg, log: log, check: (*Layout).CheckKey}
	p, closeAll = streamer(o, metrics, decorate)
	return p, func(cfg config.Config) { o.reloaded.Store(&cfg) }, closeAll
}

// Drainer is a streamer that publishes what was written so far whatever the type of the key: it is the way to
// another one.
func Drainer(cfg config.Config, log *slog.Logger, metrics prometheus.Registerer) (*pipeline.Pipeline,
	func()) {
	return streamer(&opener{cfg: cfg, log: log, check: func(*Layout) error { return nil }}, metrics, nil)
}

// signs is how many signs of life a home gives in cluster.maximum_delay.
const signs = 8

func streamer(o *opener, metrics prometheus.Registerer, decorate []func(*pipeline.Config)) (
	*pipeline.Pipeline, func()) {
	cfg, log := o.cfg, o.log
	writer := replication.NewWriter(Replication(cfg, log))
	o.writer = writer
	o.deadLetters = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dead_letters_total",
		Help: "Rows that can't be published, in whose place a dead letter went (sink.on_poison: " +
			"dead_letter), by reason."}, []string{"reason"})
	metrics.MustRegister(o.deadLetters)
	for _, reason := range sink.Reasons {
		o.deadLetters.WithLabelValues(string(reason))
	}
	o.tracer = tracing.Start(tracing.Config{Slot: cfg.Slot, Stream: cfg.Stream, Template: cfg.Subject,
		Registerer: metrics, Logger: log})
	inForce, stop := gclimit.Start(cfg.Reorder.Settings(), cfg.Sink.MaxPayload)
	pc := pipeline.Config{
		Open: o.open, Settings: cfg.Reorder.Settings(), Heartbeats: cfg.Reorder.Tick == config.TickWAL,
		Scratch: tempfile.Dir(cfg.Reorder.SpillDir), MaxSpill: cfg.Reorder.MaxSpill,
		InForce: inForce, StopTimeout: cfg.StopTimeout, Registerer: metrics, Logger: log,
	}
	if cfg.Cluster.Shared() {
		pc.MaximumDelay = cfg.Cluster.MaximumDelay
	}
	if l := cfg.Cluster; l.Islands() {
		pc.Islands = &claim.Config{Self: l.ID, Count: l.Count, Delay: l.MaximumDelay,
			Beat: l.MaximumDelay / signs, Gone: l.GoneForGood()}
	}
	for _, d := range decorate {
		d(&pc)
	}
	failed := pc.Failed
	pc.Failed = func(f *outbox.Fault, since time.Time) {
		writer.Disconnect() // nothing is open while a fault is held
		if failed != nil {
			failed(f, since)
		}
	}
	return pipeline.New(pc), func() {
		stop()
		writer.Close()
		o.tracer.Stop()
	}
}

// CheckLimits refuses a stream whose limits can remove what gap mode remembers; see
// [checkpoint.Config.CheckLimits].
func CheckLimits(ctx context.Context, conn *sink.Conn, cc checkpoint.Config, s relay.Settings) error {
	if !s.ByGap() {
		return nil
	}
	limits, err := conn.Limits(ctx)
	if err != nil {
		return err
	}
	return cc.CheckLimits(s.Gap.Memory, checkpoint.Limits(limits))
}
