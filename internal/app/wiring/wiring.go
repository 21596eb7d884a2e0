// Package wiring turns the configuration into the parts' own configurations and opens a session's
// connections. It is the one place that knows all parts. It is internal to Outflow: its API may change at any
// time.
package wiring

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/gclimit"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/tempfile"
	"github.com/outflowhq/outflow/internal/app/tracing"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// Layout is the configuration applied to the table as it is: which column is what.
type Layout struct {
	config.Resolved
	Table catalog.Table
	catalog.Cluster
	Binary bool // every type that is read has a binary reader
}

// Columns lists every column that is read.
func (l *Layout) Columns() []string {
	m := l.Mapping
	var all []string
	if !m.Source.Rows() {
		return nil
	}
	for _, name := range append([]string{l.ID, m.Doc, m.Actor, m.Counter, m.Span, m.Key, m.Payload},
		l.Extra...) {
		if name != "" {
			all = append(all, name)
		}
	}
	return all
}

// Needed lists the columns that rows can't be published without: all but a generated key that can be made of
// actor and counter, which is in the WAL only where the publication has it.
func (l *Layout) Needed() []string {
	m := l.Mapping
	return slices.DeleteFunc(l.Columns(), func(name string) bool {
		c, _ := l.Table.Column(name)
		return name == m.Key && c.Generated && m.Actor != "" && m.Counter != "" &&
			!slices.Contains(l.Extra, name)
	})
}

// Follow takes over from the checkpoint record what the configuration leaves to it. A set-up that is older
// than replication.origin goes on as it was; rec nil: there is no record.
func (l *Layout) Follow(cfg config.Config, rec *checkpoint.Record) {
	if rec != nil && !rec.Creating && !cfg.Replication.Explicit {
		l.Mapping.OwnOnly = rec.Mapping.OwnOnly
	}
}

// Where says which servers an installation is on, without secrets.
type Where struct {
	Postgres string `json:"postgres"` // user@host:port/database; "" if the setting can't be read
	NATS     string `json:"nats"`

	Consumers string `json:"-"` // the database of a consumer, like Postgres; "": none is asked
}

// WhereIs returns where the configuration leads.
func WhereIs(cfg config.Config) Where {
	return Where{Postgres: postgres.Target{URL: cfg.Postgres.URL}.String(), NATS: cfg.NATS.Server()}
}

func (w Where) String() string {
	s := "PostgreSQL " + w.Postgres + ", NATS " + w.NATS
	if w.Consumers != "" {
		s += ", consumers' database " + w.Consumers
	}
	return s
}

// ReadsTable reads a table's description.
type ReadsTable interface {
	Table(ctx context.Context) (catalog.Table, error)
	Cluster(ctx context.Context) (catalog.Cluster, error)
}

// Apply reads the table, if there is one, and applies the configuration to it.
func Apply(ctx context.Context, cfg config.Config, from ReadsTable) (*Layout, error) {
	if !cfg.Source.Rows() {
		return ApplyTo(cfg, catalog.Table{})
	}
	t, err := from.Table(ctx)
	if err != nil {
		return nil, err
	}
	l, err := ApplyTo(cfg, t)
	if err == nil {
		l.Cluster, err = from.Cluster(ctx)
	}
	return l, err
}

// NeedTable refuses what there has to be a table for.
func NeedTable(cfg config.Config, what string) error {
	if cfg.Source.Rows() {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "no_table",
		Message: fmt.Sprintf("source is message: there is no outbox table, and %s can only come from one",
			what),
		Hint: "What is in the stream can be read again from the stream. What is neither there nor in " +
			"the WAL any more is nowhere",
	}
}

// NeedHome refuses what reads the table where it has rows of several clusters: it does not tell whose a row
// is.
func NeedHome(cfg config.Config, what string) error {
	if cfg.Cluster.Subscription == "" {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "subscription",
		Message: fmt.Sprintf("%s is not for a stream of another cluster's rows (cluster.subscription is "+
			"%q): the table does not say whose a row is", what, cfg.Cluster.Subscription),
		Hint: "Run it at home, for the home's own stream",
	}
}

// ApplyTo applies the configuration to a table; without rows, to none.
func ApplyTo(cfg config.Config, t catalog.Table) (*Layout, error) {
	template, err := outbox.ParseSubjectTemplate(cfg.Subject)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(t.Columns))
	for i, c := range t.Columns {
		names[i] = c.Name
	}
	r, err := config.ResolveMapping(cfg, names, template.Columns())
	if err != nil {
		return nil, err
	}
	l := &Layout{Resolved: r, Table: t, Binary: true}
	l.Mapping.Subscription = cfg.Cluster.Subscription
	l.Mapping.OwnOnly = cfg.Replication.Origin == config.OriginOwn && !l.Mapping.Away()
	if !cfg.Source.Rows() {
		return l, nil
	}
	l.Mapping.Table = t.Schema + "." + t.Name
	if cfg.Cluster.Control != "" {
		schema, name, err := catalog.SplitTable(cfg.Cluster.Control)
		if err != nil {
			return nil, err
		}
		l.Mapping.Control = schema + "." + name
	}
	for _, name := range l.Columns() {
		if c, ok := t.Column(name); ok && !decoder.BinaryReadable(c.TypeOID) {
			l.Binary = false
		}
	}
	return l, nil
}

// CheckKey refuses an order key whose order is not that of its text: keys are compared as the bytes that
// PostgreSQL prints.
func (l *Layout) CheckKey() error {
	c, ok := l.Table.Column(l.Mapping.Key)
	if !ok || !c.PrintsUnordered() {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "key_type",
		Message: fmt.Sprintf("columns.seq_key is column %q of table %s, of type %s: keys are compared as "+
			"text, and in text 10 comes before 9",
			c.Name, l.Mapping.Table, c.TypeName),
		Hint: fmt.Sprintf("Set columns.actor_id to the column that says who counts, columns.counter to %s "+
			"and columns.seq_key to \"\": the key is made of both. "+
			"Or give the table a text column that the services fill with the number at one length, as "+
			"lpad(number::text, 20, '0') does, and set "+
			"columns.seq_key to that. Or set columns.seq_key to \"\" alone: events keep the order in which "+
			"their transactions commit", c.Name),
	}
}

// Replication is the configuration of a replication session.
func Replication(cfg config.Config, log *slog.Logger) replication.Config {
	return replication.Config{Config: Catalog(cfg), WriteURL: cfg.Postgres.WriteURL, Logger: log}
}

// Catalog names the outbox's parts in PostgreSQL.
func Catalog(cfg config.Config) catalog.Config {
	c := catalog.Config{URL: cfg.Postgres.URL, Slot: cfg.Slot, Publication: cfg.Publication}
	if cfg.Source.Rows() {
		c.Table, c.Shard, c.ShardBy = cfg.Table, cfg.Shard, cfg.Columns.Doc.Name
		c.Control, c.Subscription = cfg.Cluster.Control, cfg.Cluster.Subscription
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
	for _, h := range cfg.Headers {
		sc.Headers = append(sc.Headers, sink.MappedHeader{Name: h.Name, Column: h.Column})
	}
	return sc, nil
}

// Connect connects to NATS; its error says which setting says where.
func Connect(ctx context.Context, cfg config.Config, sc sink.Config) (*sink.Conn, error) {
	defer WaitNATS(ctx, cfg)()
	conn, err := sink.Connect(ctx, sc)
	if err != nil {
		return nil, at(cfg.NATS.Where(), err)
	}
	return conn, nil
}

// at says which setting an error is about; a fault says so itself, because run reports it without what it is
// wrapped in.
func at(setting string, err error) error {
	fault := outbox.FaultOf(err)
	switch {
	case fault == nil:
		return fmt.Errorf("%s: %w", setting, err)
	case strings.HasPrefix(fault.Message, setting):
		return err
	}
	named := *fault
	named.Message = setting + ": " + fault.Message
	return &named
}

// field says where the value of a column that subject or headers name is in an event.
func (l *Layout) field(column string) (sink.Field, bool) {
	use, ok := l.Uses[column]
	if !ok {
		return 0, false
	}
	switch use.Role {
	case config.InExtra:
		return sink.Field(use.Extra), true
	case config.InDoc:
		return sink.FieldDoc, true
	case config.InActor:
		return sink.FieldActor, true
	case config.InKey:
		return sink.FieldKey, true
	case config.InID:
		return sink.FieldID, true
	}
	return 0, false // the payload is no part of a subject or a header
}

// Decoder is the decoder's configuration.
func Decoder(cfg config.Config, l *Layout) decoder.Config {
	dc := decoder.Config{
		TableOID: l.Table.OID, Mapping: l.Mapping, ID: l.ID, Extra: l.Extra, Slot: cfg.Slot,
		MaxPayload: cfg.Sink.MaxPayload, Control: l.Cluster.Control, Origin: l.Cluster.Origin,
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
		DurableAfter: cfg.Sink.DurableAfter,
	}
}

// Store is the store of the record on a connection.
func Store(cfg config.Config, c *sink.Conn) *checkpoint.Store {
	return checkpoint.NewStore(c.API(), checkpoint.StoreConfig{Stream: cfg.Stream, Slot: cfg.Slot})
}

// tryTimeout is how long each connection of TryConnections may take.
const tryTimeout = 5 * time.Second

// TryConnections opens a connection to each server with what the credential files hold now, closes it, and
// returns why that failed.
func TryConnections(ctx context.Context, cfg config.Config) (failed []error) {
	try := func(setting string, open func(context.Context) error) {
		ctx, cancel := context.WithTimeout(ctx, tryTimeout)
		defer cancel()
		if err := open(ctx); err != nil {
			failed = append(failed, at(setting, err))
		}
	}
	reach := func(t postgres.Target) func(context.Context) error {
		return func(ctx context.Context) error {
			conn, err := t.Connect(ctx)
			if err == nil {
				postgres.Close(conn)
			}
			return err
		}
	}
	c := Catalog(cfg)
	target := c.Target()
	try("postgres.url", func(ctx context.Context) error {
		if err := reach(target)(ctx); err != nil {
			return err
		}
		// The slot is read over one of these, which takes a right and a place of its own (max_wal_senders).
		conn, err := target.ConnectReplication(ctx)
		if err == nil {
			postgres.Close(conn)
		}
		if postgres.SQLState(err) == postgres.StateTooManyConnections {
			return nil // the last place may be the one that is open, and that says nothing about credentials
		}
		return err
	})
	if write := cfg.Postgres.WriteURL; write != cfg.Postgres.URL {
		const setting = "postgres.write_url"
		try(setting, reach(postgres.Target{Setting: setting, URL: write, Slot: cfg.Slot, Pooled: true}))
	}
	try(cfg.NATS.Where(), func(ctx context.Context) error {
		sc, err := Broker(cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		conn, err := sink.Connect(ctx, sc)
		if err == nil {
			conn.Close()
		}
		return err
	})
	return failed
}

// WithStore opens a connection of its own to where the checkpoint record is.
func WithStore(ctx context.Context, cfg config.Config, do func(*checkpoint.Store) error) error {
	sc, err := Broker(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	conn, err := Connect(ctx, cfg, sc)
	if err != nil {
		return err
	}
	defer conn.Close()
	return do(Store(cfg, conn))
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

// opener opens sessions' connections.
type opener struct {
	cfg    config.Config
	log    *slog.Logger
	check  func(*Layout) error // of each session's layout
	writer *replication.Writer
	tracer *tracing.Tracer

	mu     sync.Mutex
	layout *Layout // as the last session had it

	followed sync.Once // the record, where the default would have been another

	batches *sink.Batches // for all sessions; nil: none

	reloaded atomic.Pointer[config.Config] // in place of cfg, for the side of NATS; nil: nothing was

	deadLetters *prometheus.CounterVec // by reason
}

// open opens NATS first: a session that has no NATS to begin with takes nothing from PostgreSQL.
func (o *opener) open(ctx context.Context) (_ *pipeline.Conns, err error) {
	layout, err := o.known(ctx)
	if err != nil {
		return nil, err
	}
	conn, store, err := o.openJetStream(ctx, layout)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	rec, _, err := store.Load(ctx)
	if err != nil {
		return nil, err
	}
	layout.Follow(o.cfg, rec)
	if !layout.Mapping.OwnOnly && !o.cfg.Replication.Explicit {
		o.followed.Do(func() {
			o.log.Info("what is replicated from other servers is published: the checkpoint record says so, " +
				"and replication.origin is not set")
		})
	}
	rc := Replication(o.cfg, o.log)
	rc.OwnOnly = layout.Mapping.OwnOnly
	session, err := openReplication(ctx, o.cfg, rc)
	if err != nil {
		return nil, at("postgres.url", err)
	}
	defer func() {
		if err != nil {
			session.Close()
		}
	}()
	now, err := Apply(ctx, o.cfg, session)
	if err != nil {
		return nil, err
	}
	now.Follow(o.cfg, rec)
	if !now.same(layout) {
		o.forget()
		return nil, fmt.Errorf("table %s was altered while the session was opened", now.Mapping.Table)
	}
	if err := o.check(now); err != nil {
		return nil, err
	}
	if err := o.checkWriter(ctx, session); err != nil {
		return nil, err
	}
	observer, err := o.observer(now)
	if err != nil {
		return nil, err
	}
	var writer pipeline.Writer = o.writer
	if now.Mapping.Away() {
		writer = nil // the home writes ticks and settings
	}
	publishing := new(publishing)
	return &pipeline.Conns{
		Observer:  observer,
		Source:    &source{session, now.Needed()},
		JetStream: o.jetStream(conn, publishing, now),
		Store:     store,
		Reopen: func(ctx context.Context) (pipeline.JetStream, pipeline.Store, error) {
			conn, store, err := o.openJetStream(ctx, now)
			if err != nil {
				return nil, nil, err
			}
			return o.jetStream(conn, publishing, now), store, nil
		},
		Writer:     writer,
		Checkpoint: Checkpoint(o.cfg, now),
		Decoder:    Decoder(o.cfg, now),
		Binary:     now.Binary,
	}, nil
}

// observer is what reports the session's spans; nil: none are.
func (o *opener) observer(l *Layout) (pipeline.Observer, error) {
	if o.tracer == nil {
		return nil, nil
	}
	sc, err := Sink(o.cfg, l, o.log)
	if err != nil {
		return nil, err
	}
	return o.tracer.Observer(sc)
}

// openJetStream opens the side of NATS.
func (o *opener) openJetStream(ctx context.Context, layout *Layout) (*sink.Conn, *checkpoint.Store, error) {
	cfg := o.cfg
	if reloaded := o.reloaded.Load(); reloaded != nil {
		cfg = *reloaded
	}
	sc, err := Sink(cfg, layout, o.log)
	if err != nil {
		return nil, nil, err
	}
	if o.batches == nil {
		o.batches = sc.Batches
	}
	sc.Batches = o.batches
	sc.DeadLettered = func(r sink.Reason) { o.deadLetters.WithLabelValues(string(r)).Inc() }
	conn, err := Connect(ctx, o.cfg, sc)
	if err != nil {
		return nil, nil, err
	}
	store := Store(o.cfg, conn)
	if err := store.CheckAlone(ctx); err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, store, nil
}

// checkWriter makes sure that heartbeats arrive in the WAL that is read, where they are written somewhere
// else. A server that does not answer is no reason not to read.
func (o *opener) checkWriter(ctx context.Context, session *replication.Session) error {
	if o.cfg.Postgres.WriteURL == o.cfg.Postgres.URL {
		return nil
	}
	server, err := session.Server(ctx)
	if err != nil {
		return err
	}
	if err := o.writer.Check(ctx, server); outbox.ClassOf(err) == outbox.Fatal {
		return err
	}
	return nil
}

// known returns the layout of the last session, or reads it over a connection of its own.
func (o *opener) known(ctx context.Context) (*Layout, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.layout != nil {
		return o.layout, nil
	}
	l, err := ReadLayout(ctx, o.cfg)
	if err != nil {
		return nil, err
	}
	if err := o.check(l); err != nil {
		return nil, err
	}
	o.layout = l
	return l, nil
}

func (o *opener) forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.layout = nil
}

// OpenSetup opens an ordinary connection to PostgreSQL.
func OpenSetup(ctx context.Context, cfg config.Config, c catalog.SetupConfig) (*catalog.Setup, error) {
	defer WaitPostgres(ctx, cfg)()
	return catalog.OpenSetup(ctx, c)
}

// OpenReplication opens a replication session.
func OpenReplication(ctx context.Context, cfg config.Config, log *slog.Logger) (*replication.Session, error) {
	return openReplication(ctx, cfg, Replication(cfg, log))
}

func openReplication(ctx context.Context, cfg config.Config, rc replication.Config) (*replication.Session,
	error) {
	defer WaitPostgres(ctx, cfg)()
	return replication.Open(ctx, rc)
}

// WaitPostgres shows that PostgreSQL is waited for until done is called, if that takes a while.
func WaitPostgres(ctx context.Context, cfg config.Config) (done func()) {
	return progress.Wait(ctx, "waiting for PostgreSQL at "+WhereIs(cfg).Postgres)
}

// WaitNATS shows that NATS is waited for until done is called, if that takes a while.
func WaitNATS(ctx context.Context, cfg config.Config) (done func()) {
	return progress.Wait(ctx, "waiting for NATS at "+WhereIs(cfg).NATS)
}

// ReadLayout reads the table over a connection of its own and applies the configuration to it.
func ReadLayout(ctx context.Context, cfg config.Config) (*Layout, error) {
	defer WaitPostgres(ctx, cfg)()
	pg, err := OpenSetup(ctx, cfg, catalog.SetupConfig{Config: Catalog(cfg)})
	if err != nil {
		return nil, at("postgres.url", err)
	}
	defer pg.Close()
	return Apply(ctx, cfg, pg)
}

// same reports whether two layouts read the same columns in the same way.
func (l *Layout) same(o *Layout) bool {
	return l.Table.OID == o.Table.OID && l.Cluster == o.Cluster && l.Mapping == o.Mapping && l.ID == o.ID &&
		slices.Equal(l.Extra, o.Extra) && maps.Equal(l.Uses, o.Uses)
}

// source is a replication session as the pipeline sees it.
type source struct {
	*replication.Session
	columns []string
}

func (s *source) Publication(ctx context.Context) (relay.PublicationIdentity, error) {
	return s.Session.Publication(ctx, s.columns)
}

// Start makes a slot in use the fault that the pipeline looks for.
func (s *source) Start(ctx context.Context, from outbox.LSN, binary bool) error {
	err := s.Session.Start(ctx, from, binary)
	if errors.Is(err, replication.ErrSlotInUse) {
		return &outbox.Fault{Class: outbox.Transient, Code: relay.CodeSlotInUse, Message: "start replication",
			Err: err}
	}
	return err
}

// jetStream is a NATS connection as the pipeline sees it.
type jetStream struct {
	*sink.Conn
	session *publishing
	check   func(context.Context) error // of what only the configuration knows
}

func (o *opener) jetStream(conn *sink.Conn, session *publishing, l *Layout) jetStream {
	cc := Checkpoint(o.cfg, l)
	return jetStream{conn, session, func(ctx context.Context) error {
		return CheckLimits(ctx, conn, cc, o.cfg.Reorder.Settings())
	}}
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

// publishing is what the NATS connections of one session share. It belongs to the session's loop.
type publishing struct{ publisher *sink.Publisher } // the last one

func (j jetStream) Check(ctx context.Context) error {
	if err := j.CheckStream(ctx); err != nil {
		return err
	}
	return j.check(ctx)
}

func (j jetStream) Publisher(lastSeq, lostFrom uint64) pipeline.Publisher {
	j.session.publisher = j.Conn.Publisher(lastSeq)
	j.session.publisher.AfterLoss(lostFrom)
	return j.session.publisher
}

func (j jetStream) Resume(lastSeq uint64) (pipeline.Publisher, error) {
	p, err := j.Conn.Resume(j.session.publisher, lastSeq)
	if err != nil {
		return nil, err // a nil *sink.Publisher would not be a nil pipeline.Publisher
	}
	j.session.publisher = p
	return p, nil
}
