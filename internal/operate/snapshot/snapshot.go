package snapshot

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/outbox"
)

// attempts is how often a snapshot is tried while connections are lost.
const attempts = 6

// prepareTimeout is far above what table, publication and stream take.
const prepareTimeout = 2 * time.Minute

// Options extend the configuration.
type Options struct {
	// Prepare makes table, publication, stream and bucket if they are missing. Before, it calls fits with
	// what is there, and makes nothing if that returns an error.
	Prepare func(ctx context.Context, fits Fits) error

	Hit func(point string) // called at points where tests kill the process; may be nil
}

// Fits reports what a snapshot must not touch, as far as a start reads it.
type Fits = func(checkpoint.Config, *wiring.Layout, checkpoint.Readings) error

// snapshot is one run of init --snapshot.
type snapshot struct {
	cfg config.Config
	log *slog.Logger
	o   Options
	rep *Report

	ours     bool   // the record says that this snapshot is under way
	revision uint64 // of the record, as it was last written
	// the stream has a new ingress, which neither another process nor an earlier attempt knows
	renewed bool
}

// Run prepares the set-up and publishes the existing rows. The report says how far it came, with an error
// too.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (*Report, error) {
	if o.Hit == nil {
		o.Hit = func(string) {}
	}
	s := &snapshot{cfg: cfg, log: log, o: o, rep: &Report{Slot: cfg.Slot, Stream: cfg.Stream}}
	if err := s.prepare(ctx); err != nil {
		return s.rep, err
	}
	for n := 1; ; n++ {
		err := s.attempt(ctx)
		switch {
		case err == nil || ctx.Err() != nil || outbox.ClassOf(err) != outbox.Transient:
			return s.rep, err
		case n == attempts:
			return s.rep, fmt.Errorf("%w. The snapshot did not finish: run `outflow init --snapshot` again, "+
				"it goes on behind what is published", err)
		}
		progress.Step(ctx, "begins again: %v", err)
		s.renewed = false // messages of this attempt may still be on their way
		select {
		case <-ctx.Done():
			return s.rep, ctx.Err()
		case <-time.After(time.Duration(n) * 500 * time.Millisecond):
		}
	}
}

func (s *snapshot) prepare(ctx context.Context) error {
	if err := allowed(s.cfg); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, prepareTimeout)
	defer cancel()
	if err := s.checkArchived(ctx); err != nil {
		return err
	}
	return s.o.Prepare(ctx, s.fits)
}

// attempt makes a whole snapshot. It renews the stream's ingress first; only connections that are opened
// after that know the new one.
func (s *snapshot) attempt(ctx context.Context) error {
	if !s.renewed {
		err := s.recorded(ctx, func(l *backfill.Conns, rd *backfill.Readings) error {
			if err := l.NATS.RenewIngress(ctx); err != nil {
				return err
			}
			// the rows come behind the end of the stream, which may have gone back
			if err := conns.Erasures(ctx, s.cfg, rd.Server, (*erasure.Ledger).Lower, erasure.End{
				Stream: s.cfg.Stream, Created: rd.Stream.Created, Last: rd.Stream.LastSeq}); err != nil {
				return err
			}
			return l.NATS.ForgetErased(ctx, rd.Stream.ErasedBehind())
		})
		if err != nil {
			return err
		}
		s.renewed = true
	}
	return s.recorded(ctx, func(l *backfill.Conns, rd *backfill.Readings) error {
		return s.execute(ctx, l, rd)
	})
}

// recorded calls f with new connections, when the record says that a snapshot is under way.
func (s *snapshot) recorded(ctx context.Context, f func(*backfill.Conns, *backfill.Readings) error) error {
	l, err := backfill.Open(ctx, s.cfg, s.log)
	if err != nil {
		return err
	}
	defer l.Close()
	s.rep.Table = l.Layout.Mapping.Table
	rd, err := l.Read(ctx)
	if err != nil {
		return err
	}
	if err := s.check(ctx, l, &rd); err != nil {
		return err
	}
	if err := s.begin(ctx, l, &rd); err != nil {
		return err
	}
	return f(l, &rd)
}
