package drain

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

// streamer publishes while nobody else holds the slot. A nil one does not run: done and stop may be called on
// it.
type streamer struct {
	p      *pipeline.Pipeline
	cancel context.CancelFunc
	ended  chan error // receives one value
	close  func()
}

func stream(ctx context.Context, cfg config.Config, log *slog.Logger) *streamer {
	ctx, cancel := context.WithCancel(ctx)
	s := &streamer{cancel: cancel, ended: make(chan error, 1)}
	s.p, s.close = wiring.Drainer(cfg, log, prometheus.NewRegistry())
	go func() {
		defer crash.Guard()
		s.ended <- s.p.Run(ctx)
	}()
	return s
}

// standby reports whether another outflow took the slot.
func (s *streamer) standby() bool { return s.p.Status().State == pipeline.StateStandby }

// published is up to where it knows that everything is published; 0: nowhere.
func (s *streamer) published() outbox.LSN {
	if s == nil {
		return 0
	}
	return s.p.Status().Published
}

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
