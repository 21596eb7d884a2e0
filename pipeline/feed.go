package pipeline

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

func (s *session) take(b *relay.Batch, now time.Time) {
	s.batch, s.next = b, 0
	for i := range b.Messages {
		if !b.Messages[i].Keepalive {
			s.lastData = now
			break
		}
	}
}

// work goes on with the window and the batch in hand until they are done or the publisher is full.
func (s *session) work(ctx context.Context) error {
	for {
		if s.window != nil {
			if done, err := s.publish(ctx); err != nil || !done {
				return err
			}
		}
		if s.batch == nil {
			return nil
		}
		if s.next == len(s.batch.Messages) {
			s.batch.Release()
			s.batch = nil
			return nil
		}
		m := &s.batch.Messages[s.next]
		s.next++
		if err := s.read(ctx, m); err != nil {
			return err
		}
	}
}

// read takes one message of the replication stream.
func (s *session) read(ctx context.Context, m *relay.WALMessage) error {
	if m.Keepalive {
		if !s.decoder.InTransaction() {
			if err := s.proof.Input(m.WALEnd); err != nil {
				return err
			}
			s.marker = max(s.marker, m.WALEnd)
			s.metrics.received(m.WALEnd)
		}
		return nil
	}
	s.marker = 0
	if err := s.decoder.Decode(m.Data, &s.result); err != nil {
		return err
	}
	if s.result.Malformed != nil {
		s.metrics.malformed.Inc()
		s.p.malformed.say(s.log, slog.LevelWarn, "a change of ordering settings is malformed, or of an unknown version, and has no effect",
			"err", s.result.Malformed)
	}
	if s.result.Missing {
		// The rows that follow can't be published as they are, and all later ones neither if the table lacks the column still.
		if _, err := limited("publication", s.links.Source.Publication)(ctx); err != nil {
			return err
		}
	}
	if s.result.Ignored != decoder.NothingIgnored {
		s.ignored(s.result.Ignored)
	}
	switch s.result.Kind {
	case decoder.Event:
		s.lastInput = s.lastData
		return s.buffer.Append(&s.result.Event)
	case decoder.Commit:
		return s.commit(&s.result.Commit)
	}
	return nil
}

var ignoredWhy = map[decoder.Ignored]string{
	decoder.IgnoredMessage: "message events are in the WAL, and source is table: they are not published",
	decoder.IgnoredOutside: "message events that were not written transactionally are in the WAL: they are not published",
	decoder.IgnoredRow:     "rows of the outbox table are in the WAL, and source is message: they are not published",
}

func (s *session) ignored(what decoder.Ignored) {
	s.metrics.ignored.WithLabelValues(what.String()).Inc()
	s.p.ignored[what].say(s.log, slog.LevelWarn, ignoredWhy[what], "after", s.last)
}

func (s *session) commit(c *relay.Commit) error {
	if c.Kind != relay.NoInput && c.LSN > s.from {
		if err := s.proof.Input(c.LSN); err != nil {
			return err
		}
		s.lastInput = s.lastData
		if c.Kind == relay.SettingsChange {
			s.changed(c)
		}
		if c.Kind == relay.Events {
			s.held.add(c.LSN, s.lastData)
		}
	}
	if c.Kind == relay.NoInput { // PostgreSQL 14 sends empty transactions: they say what a keepalive would
		s.marker = c.LSN
	}
	s.last = max(s.last, c.LSN)
	s.metrics.received(c.LSN)
	if err := s.buffer.Commit(*c); err != nil {
		return err
	}
	w, err := s.closeWindow()
	if err != nil {
		return err
	}
	s.window, s.n = w, 0
	if oldest, held := s.buffer.OldestLSN(); held {
		s.held.of(oldest) // forgets what is older
	} else {
		s.held.clear()
	}
	return nil
}

// changed takes note of new ordering settings. Whoever may write logical messages can change them as often as the server writes WAL.
func (s *session) changed(c *relay.Commit) {
	level, said := slog.LevelInfo, &s.p.ownChanges
	if c.Settings != s.scribe.want {
		level, said = slog.LevelWarn, &s.p.otherChanges
		s.metrics.otherChanges.Inc()
	}
	said.say(s.log, level, "ordering settings changed in the WAL", "lsn", c.LSN, "settings", c.Settings)
	s.scribe.read(c.Settings)
}

// closeWindow closes what is due. What is more than the buffer holds is on disk and may take minutes to sort: that is no standstill.
func (s *session) closeWindow() (*reorder.Window, error) {
	set := s.buffer.Settings()
	if events, bytes := s.buffer.Held(); events > set.MaxEvents || bytes > set.MaxBytes {
		s.p.health.sorting(true)
		defer s.p.health.sorting(false)
	}
	return s.buffer.Close()
}

// publish hands out the window's events until it is empty (done), the publisher is full, or burst of them are out.
func (s *session) publish(ctx context.Context) (done bool, err error) {
	w := s.window
	for n := 0; n < burst && !s.pub.Full(); n++ {
		if !s.made {
			more, err := w.Next(&s.event)
			if err != nil {
				return false, err
			}
			if !more {
				s.windowDone()
				return true, nil
			}
			s.header = outbox.Header{
				Pos: s.event.Pos, N: s.n, Of: w.Of, Due: w.Due, Thru: w.Thru, Pull: w.Pull,
				Timeline: s.server.History.At(s.event.Pos.LSN), Sort: w.Sort, ID: s.event.ID, Key: s.event.Key,
			}
			s.n++
			skip, err := s.proof.Skip(&s.header)
			if err != nil {
				return false, err
			}
			if err := s.whenProved(ctx); err != nil {
				return false, err
			}
			if skip {
				continue
			}
		}
		if err := s.pub.Publish(&s.event, &s.header); err != nil {
			s.made = true // a publisher on another connection takes it
			return false, ofBroker(err)
		}
		s.made = false
		s.latency.sent(s.pub.Sent(), s.event.Time)
		s.metrics.sent(len(s.event.Payload))
	}
	return false, nil
}

func (s *session) windowDone() {
	w := s.window
	s.window = nil
	place := w.Checkpoint
	place.Timeline = s.server.History.At(place.Due)
	s.tracker.Made(w.Of)
	s.tracker.Window(place)
	s.metrics.window(w)
}

// whenProved notes, once, that the session is proved: all messages that are in the stream already have been made again. What the start
// found to be lost is recorded now, before anything is sent: a later start must not take the new messages for the lost ones.
func (s *session) whenProved(ctx context.Context) error {
	if !s.proof.Verified() || s.announced {
		return nil
	}
	s.announced = true
	if s.tracker.MustSave() {
		snap := s.tracker.BeginSave(time.Now())
		heard, err := s.recorder.store(ctx, &snap)
		if err != nil {
			return fmt.Errorf("checkpoint record: %w", err)
		}
		s.heard = heard
		s.tracker.Saved(time.Now())
	}
	s.p.unconfirmed, s.p.diverged = unconfirmed{}, unconfirmed{}
	s.p.health.set(StateRunning, nil)
	s.log.Info("session proved: the stream ends where the WAL says", "last_seq", s.pub.Sent())
	return nil
}
