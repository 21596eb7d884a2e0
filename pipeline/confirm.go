package pipeline

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
)

// confirm tells PostgreSQL up to where it need not keep WAL any more, if that moved. Where a home's rows are
// read on another server, for a stream of this cluster alone, that is nothing from which somebody might have
// to go on with the home's stream.
func (s *session) confirm() {
	if s.in.away != nil && !s.in.shared && s.reader == nil {
		s.tracker.Limit(s.in.away.home.LSN)
	}
	lsn := s.tracker.Confirmable(s.heard)
	if lsn <= s.confirmed {
		return
	}
	s.confirmed = lsn
	s.conns.Source.Confirm(lsn)
	s.tracker.Confirmed(lsn)
}

// offerWatermark writes what this home has published into the control table, if there is anything new: an
// input that it is about, and not another one's watermark. So an idle home writes none.
func (s *session) offerWatermark(now time.Time) {
	if s.in.tally == nil || s.in.away != nil {
		return
	}
	recorded, h := s.tracker.Recorded(), &s.server.History
	w := relay.Watermark{Confirmed: relay.Confirmed{LSN: s.confirmed, Timeline: h.Timeline},
		At: recorded.Due, Tally: recorded.Tally}
	if n := len(h.Switches); n > 0 {
		w.Began = h.Switches[n-1].End
	}
	s.heartbeats.offerWatermark(now, w, s.in.newest, func() {
		s.in.tally.said = relay.Said{At: now.UTC().Truncate(time.Millisecond), LSN: w.LSN, Events: w.Events}
	})
}

// beginSave is what is to be stored.
func (s *session) beginSave(now time.Time) checkpoint.Update {
	update := s.tracker.BeginSave(now)
	if s.island != nil {
		update.Heard = s.island.state()
	}
	if s.reader != nil {
		update.Reader = s.reader.state()
	}
	return update
}

// save starts to store the record. What it may still find before it is stored is the next session's to judge.
func (s *session) save(now time.Time) {
	update, gaps := s.beginSave(now), s.openGaps()
	s.saved = now
	s.questions.start(func(ctx context.Context) func() error {
		asked, err := s.checkpointer.store(ctx, &update)
		if err == nil {
			s.checkpointer.nameGaps(ctx, gaps)
		}
		return func() error {
			if err != nil {
				return fmt.Errorf("checkpoint record: %w", err)
			}
			s.heard = asked
			s.claimed = s.checkpointer.record.Claimed
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
			s.monitor.walEnd = st.walEnd
			if err := s.monitor.check(&st); err != nil {
				return err
			}
			s.heard = st.asked
			return nil
		}
	})
}
