package pipeline

import (
	"context"
	"fmt"
	"time"
)

// confirm tells PostgreSQL up to where it need not keep WAL any more, if that moved.
func (s *session) confirm() {
	lsn := s.tracker.Confirmable(s.heard)
	if lsn <= s.confirmed {
		return
	}
	s.confirmed = lsn
	s.conns.Source.Confirm(lsn)
	s.tracker.Confirmed(lsn)
}

// save starts to store the record. What it may still find before it is stored is the next session's to judge.
func (s *session) save(now time.Time) {
	update := s.tracker.BeginSave(now)
	s.questions.start(func(ctx context.Context) func() error {
		asked, err := s.checkpointer.store(ctx, &update)
		return func() error {
			if err != nil {
				return fmt.Errorf("checkpoint record: %w", err)
			}
			s.heard = asked
			s.tracker.Saved(time.Now())
			return nil
		}
	})
}

// askStates starts to read both servers' states.
func (s *session) askStates(now time.Time) {
	s.monitor.asked, s.monitor.acked = now, s.pub.Acked()
	s.questions.start(func(ctx context.Context) func() error {
		st, err := s.conns.readStates(ctx)
		return func() error {
			if err != nil {
				return fmt.Errorf("read the server's state: %w", err)
			}
			s.p.health.watched(st.walEnd, &st.slot, now)
			if err := s.monitor.check(&st); err != nil {
				return err
			}
			s.heard = st.asked
			return nil
		}
	})
}
