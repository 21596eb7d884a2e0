package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// What happens to everything in the middle of the work. Both sides get the same, at the same moments.

// crash kills every program with kill -9 while the relays have published rows that they have not marked yet,
// and starts them again. Relays are in that state most of the time that they work, so it is what a crash
// usually meets; should the moment have passed when the signals arrive, everything is killed once more.
func (w *world) crash(ctx context.Context) error {
	w.one.Lock()
	defer w.one.Unlock()
	for {
		if err := until(ctx, "the relays publish", func() error { return w.between(ctx) }); err != nil {
			return err
		}
		if err := w.end(syscall.SIGKILL); err != nil {
			return err
		}
		if err := until(ctx, "PostgreSQL notices that the relays are gone", func() error {
			return w.noRelay(ctx)
		}); err != nil {
			return err
		}
		met := w.between(ctx)
		if err := w.begin(ctx); err != nil {
			return err
		}
		if met == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// killEverything is crash without regard to the moment, with both servers.
func (w *world) killEverything(ctx context.Context) error {
	w.one.Lock()
	defer w.one.Unlock()
	if err := w.end(syscall.SIGKILL); err != nil {
		return err
	}
	if err := errors.Join(w.crashNATS(), w.crashPostgres(ctx)); err != nil {
		return err
	}
	return w.begin(ctx)
}

// redeploy stops every program cleanly and starts it again.
func (w *world) redeploy(ctx context.Context) error {
	w.one.Lock()
	defer w.one.Unlock()
	if err := w.end(syscall.SIGTERM); err != nil {
		return err
	}
	return w.begin(ctx)
}

func (w *world) crashNATS() error {
	if err := w.nats.Kill(); err != nil {
		return err
	}
	return w.nats.Start()
}

func (w *world) crashPostgres(ctx context.Context) error {
	if err := w.pg.Kill(); err != nil {
		return err
	}
	return w.pg.Start(ctx)
}

// end ends all programs at once.
func (w *world) end(s syscall.Signal) error {
	ended := make(chan error)
	for _, c := range w.children() {
		go func() { ended <- c.end(s) }()
	}
	var errs []error
	for range w.children() {
		errs = append(errs, <-ended)
	}
	return errors.Join(errs...)
}

func (w *world) begin(ctx context.Context) error {
	for _, c := range w.children() {
		if err := c.start(); err != nil {
			return err
		}
	}
	return w.answers(ctx)
}

// between returns nil if the relays' stream has more than the table says: rows are published and not marked.
func (w *world) between(ctx context.Context) error {
	var marked uint64
	if err := w.pool.QueryRow(ctx, "SELECT count(published_at) FROM outbox").Scan(&marked); err != nil {
		return err
	}
	published, err := w.last(ctx, "RELAY")
	if err == nil && published <= marked {
		err = fmt.Errorf("published %d, marked %d", published, marked)
	}
	return err
}

func (w *world) noRelay(ctx context.Context) error {
	var n int
	err := w.pool.QueryRow(ctx,
		"SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'relay-_'").Scan(&n)
	if err == nil && n > 0 {
		err = fmt.Errorf("%d sessions", n)
	}
	return err
}

// last returns a stream's last sequence.
func (w *world) last(ctx context.Context, stream string) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	s, err := w.js.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().State.LastSeq, nil
}
