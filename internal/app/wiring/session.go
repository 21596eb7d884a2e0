package wiring

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/tracing"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
)

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
