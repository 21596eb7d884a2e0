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

	followed sync.Once // the record, where the default would have been another

	batches *sink.Batches // for all sessions; nil: none

	reloaded atomic.Pointer[config.Config] // in place of cfg, for the side of NATS; nil: nothing was

	deadLetters *prometheus.CounterVec // by reason
}

// open opens NATS first: a session that has no NATS to begin with takes nothing from PostgreSQL.
func (o *opener) open(ctx context.Context) (_ *pipeline.Conns, err error) {
	conn, err := o.openJetStream(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	if err := CheckShared(ctx, o.cfg, conn); err != nil {
		return nil, err
	}
	rec, err := o.record(ctx, conn)
	if err != nil {
		return nil, err
	}
	rc := Replication(o.cfg, o.log)
	rc.OwnOnly = ownOnly(o.cfg, rec)
	if !rc.OwnOnly && !o.cfg.Replication.Explicit {
		o.followed.Do(func() {
			o.log.Info("what is replicated from other servers is published: the checkpoint record says so, " +
				"and replication.origin is not set")
		})
	}
	session, err := openReplication(ctx, o.cfg, rc)
	if err != nil {
		return nil, at("postgres.url", err)
	}
	defer func() {
		if err != nil {
			session.Close()
		}
	}()
	layout, err := Apply(ctx, o.cfg, session)
	if err != nil {
		return nil, err
	}
	layout.Follow(o.cfg, rec)
	if err := o.check(layout); err != nil {
		return nil, err
	}
	if err := o.checkWriter(ctx, session); err != nil {
		return nil, err
	}
	sc, err := o.sink(layout)
	if err != nil {
		return nil, err
	}
	if err := conn.Encode(sc); err != nil {
		return nil, err
	}
	var observer pipeline.Observer // of the session's spans; nil: none are reported
	if o.tracer != nil {
		if observer, err = o.tracer.Observer(sc); err != nil {
			return nil, err
		}
	}
	var writer pipeline.Writer = o.writer
	if layout.Mapping.Away() && !o.cfg.Cluster.Islands() {
		writer = nil // the home writes ticks and settings
	}
	publishing := new(publishing)
	return &pipeline.Conns{
		Observer:  observer,
		Source:    &source{session, layout.Needed()},
		JetStream: o.jetStream(conn, publishing, layout),
		Store:     SessionStore(o.cfg, conn),
		Reopen: func(ctx context.Context) (pipeline.JetStream, pipeline.Store, error) {
			conn, err := o.openJetStream(ctx, layout)
			if err != nil {
				return nil, nil, err
			}
			return o.jetStream(conn, publishing, layout), SessionStore(o.cfg, conn), nil
		},
		Writer:     writer,
		Checkpoint: Checkpoint(o.cfg, layout),
		Decoder:    Decoder(o.cfg, layout),
		Binary:     layout.Binary,
	}, nil
}

// openJetStream opens the side of NATS; layout nil: what messages are made of is not known yet.
func (o *opener) openJetStream(ctx context.Context, layout *Layout) (*sink.Conn, error) {
	sc, err := o.sink(layout)
	if err != nil {
		return nil, err
	}
	if o.batches == nil {
		o.batches = sc.Batches
	}
	sc.Batches = o.batches
	sc.DeadLettered = func(r sink.Reason) { o.deadLetters.WithLabelValues(string(r)).Inc() }
	conn, err := Connect(ctx, o.cfg, sc)
	if err != nil {
		return nil, err
	}
	if err := Store(o.cfg, conn).CheckAlone(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// record reads what this cluster has recorded, which says how the table is read; nil: nothing yet.
func (o *opener) record(ctx context.Context, conn *sink.Conn) (*checkpoint.Record, error) {
	if !o.cfg.Cluster.Elsewhere() {
		rec, _, err := HomeStore(o.cfg, conn).Load(ctx)
		return rec, err
	}
	rec, _, err := Store(o.cfg, conn).Load(ctx)
	if err == nil && (rec == nil || rec.Creating) {
		err = &outbox.Fault{
			Class: outbox.Fatal, Code: "not_initialised",
			Message: fmt.Sprintf("cluster %d has no record of the home's rows for stream %s",
				o.cfg.Cluster.ID, o.cfg.Stream),
			Hint: "Run `outflow init`",
		}
	}
	return rec, err
}

// sink is how messages are made and sent, as the last reload has it; layout nil: how they are sent.
func (o *opener) sink(layout *Layout) (sink.Config, error) {
	cfg := o.cfg
	if reloaded := o.reloaded.Load(); reloaded != nil {
		cfg = *reloaded
	}
	if layout == nil {
		return Broker(cfg, o.log)
	}
	return Sink(cfg, layout, o.log)
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

func (j jetStream) Publisher(lastSeq, lostFrom, fence uint64) pipeline.Publisher {
	j.session.publisher = j.Conn.Publisher(lastSeq)
	j.session.publisher.AfterLoss(lostFrom)
	j.session.publisher.BehindCut(fence)
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
