package pipeline

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
)

// stop is the clean stop: no more WAL data is taken, what is in flight is acknowledged, the newest checkpoint
// is recorded, other clusters are told what is published, and the last confirmation goes out; all within the
// stop timeout. What is only held stays in the WAL.
func (s *session) stop() error {
	s.p.health.set(StateStopping, nil)
	if !s.check.Verified() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.p.cfg.StopTimeout)
	defer cancel()
	err := s.settle(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%d messages not acknowledged within the stop timeout", s.pub.Sent()-s.pub.Acked())
	}
	if err == nil {
		err = s.recordLast(ctx)
	}
	if err == nil {
		s.sayLast(ctx)
	}
	s.confirm()
	go discard(s.conns.Source.Batches())
	if stopErr := s.conns.Source.Stop(ctx); err == nil && stopErr != nil {
		err = fmt.Errorf("end replication: %w", stopErr)
	}
	return err
}

// settle waits until everything that was sent is acknowledged.
func (s *session) settle(ctx context.Context) error {
	for s.pub.Acked() != s.pub.Sent() {
		wait, err := s.flush(time.Now())
		if err != nil {
			return err
		}
		if wait <= 0 {
			wait = idleInterval
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.conns.JetStream.Lost():
			return connectionLost(s.conns.JetStream)
		case <-s.pub.Notify():
		case <-time.After(wait):
		}
		if err := s.pub.Check(time.Now()); err != nil {
			return ofJetStream(err)
		}
	}
	s.acked()
	return nil
}

// recordLast waits for the record that is being stored and stores the newest checkpoint.
func (s *session) recordLast(ctx context.Context) error {
	for {
		if !s.questions.busy {
			if !s.tracker.Pending() {
				return nil
			}
			s.save(time.Now())
		}
		select {
		case <-ctx.Done():
			return errors.New("the checkpoint record was not stored within the stop timeout")
		case result := <-s.questions.done:
			if err := s.questions.take(result); err != nil {
				return err
			}
		}
	}
}

func discard(batches <-chan *relay.Batch) {
	for b := range batches {
		b.Release()
	}
}
