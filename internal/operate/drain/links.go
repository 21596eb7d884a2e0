package drain

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
)

// links are the connections that are read from. Nothing is written over them.
type links struct {
	layout *wiring.Layout
	conn   *sink.Conn
	store  *checkpoint.Store
	pg     *replication.Session
}

func open(ctx context.Context, cfg config.Config, log *slog.Logger) (_ *links, err error) {
	l := &links{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.layout, err = wiring.ReadLayout(ctx, cfg, log); err != nil {
		return nil, err
	}
	sc, err := wiring.Sink(cfg, l.layout, log)
	if err != nil {
		return nil, err
	}
	if l.conn, err = wiring.Connect(ctx, cfg, sc); err != nil {
		return nil, err
	}
	l.store = wiring.Store(cfg, l.conn)
	if l.pg, err = replication.Open(ctx, wiring.Replication(cfg, log)); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *links) close() {
	if l == nil {
		return
	}
	if l.conn != nil {
		l.conn.Close()
	}
	if l.pg != nil {
		l.pg.Close()
	}
}

// read reads in such an order that what it says is never more than is so: the end of WAL last would count WAL that the rest had not
// seen yet.
func (l *links) read(ctx context.Context) (*checkpoint.Readings, error) {
	r := &checkpoint.Readings{}
	var err error
	if r.Server, err = l.pg.Server(ctx); err != nil {
		return nil, err
	}
	if r.Slot, err = l.pg.Slot(ctx); err != nil {
		return nil, err
	}
	if r.Record, _, err = l.store.Load(ctx); err != nil {
		return nil, err
	}
	if r.Stream, err = l.conn.State(ctx); err != nil {
		return nil, err
	}
	return r, nil
}

// streamer is the streamer that drain runs while nobody else holds the slot. Its methods may be called on nil, which is none.
type streamer struct {
	p      *pipeline.Pipeline
	cancel context.CancelFunc
	ended  chan error // gets one value
	close  func()
}

func stream(ctx context.Context, cfg config.Config, log *slog.Logger) *streamer {
	ctx, cancel := context.WithCancel(ctx)
	s := &streamer{cancel: cancel, ended: make(chan error, 1)}
	s.p, s.close = wiring.Drainer(cfg, log, prometheus.NewRegistry())
	go func() { s.ended <- s.p.Run(ctx) }()
	return s
}

// standby reports whether another outflow took the slot.
func (s *streamer) standby() bool { return s.p.Status().State == pipeline.StateStandby }

func (s *streamer) done() <-chan error {
	if s == nil {
		return nil
	}
	return s.ended
}

// stop ends it cleanly.
func (s *streamer) stop() {
	if s == nil {
		return
	}
	s.cancel()
	<-s.ended
	s.stopped()
}

// stopped releases what is left of one that has ended by itself.
func (s *streamer) stopped() {
	s.cancel()
	s.close()
}
