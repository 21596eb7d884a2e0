package pipeline

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// burst is how many messages of a window are handed out before the loop looks around: a window has no limit.
const burst = 1024

// output makes messages of the window that is handed out.
type output struct {
	window *reorder.Window // nil: there is none
	n      int             // its next event
	left   int             // of its messages so many are left to others
	event  relay.Event     // of the newest message that was made
	header outbox.Header   // likewise
	ready  bool            // that message is still to be published: a publisher failed and did not take it
	// in gap mode a window has ended and has no checkpoint yet
	unmarked bool
}

// next makes the next message; more is false at the window's end.
func (o *output) next(history *relay.History) (more bool, err error) {
	w, e := o.window, &o.event
	if more, err = w.Next(e); err != nil || !more {
		return false, err
	}
	o.header = outbox.Header{
		Pos: e.Pos, N: o.n, Of: w.Of, Due: w.Due, Thru: w.Thru, Pull: w.Pull,
		Timeline: history.At(e.Pos.LSN), Sort: w.Sort, ID: e.ID, Key: e.Key, Counter: e.Counter,
	}
	o.n++
	return true, nil
}

// work goes on with the window and the batch in hand until they are done or the publisher is full.
func (s *session) work(ctx context.Context) error {
	for {
		if s.out.window != nil {
			if done, err := s.publish(ctx); err != nil || !done {
				return err
			}
		}
		if cut, due := s.in.dueCut(); due {
			if err := s.carryOut(ctx, cut); err != nil {
				return err
			}
			continue
		}
		m := s.in.message()
		if m == nil {
			s.mark()
			return nil
		}
		committed, err := s.in.read(ctx, m)
		if err == nil && committed {
			err = s.recordClaimed(ctx)
		}
		if err == nil && committed {
			err = s.closeWindow()
		}
		if err != nil {
			return err
		}
	}
}

// history is that of the server on which the events were written. Of a home that is read on another one,
// nothing is known: its messages name the first timeline.
func (s *session) history() *relay.History {
	if s.in.away != nil {
		return &relay.History{Timeline: 1}
	}
	return &s.server.History
}

// closeWindow closes what is due. What is more than the buffer holds is on disk and may take minutes to sort:
// the process does not hang.
func (s *session) closeWindow() (err error) {
	set := s.buffer.Settings()
	if events, bytes := s.buffer.Held(); events > set.MaxEvents || bytes > set.MaxBytes {
		s.p.health.busy(true)
		defer s.p.health.busy(false)
	}
	s.out.n, s.out.left = 0, 0
	s.out.window, err = s.buffer.Close()
	return err
}

// publish hands out the window's messages until there are no more (done), the publisher is full, or burst of
// them are out.
func (s *session) publish(ctx context.Context) (done bool, err error) {
	o := &s.out
	for n := 0; n < burst && !s.pub.Full(); n++ {
		if !o.ready {
			more, err := o.next(s.history())
			if err != nil {
				return false, err
			}
			if !more {
				s.windowDone()
				return true, nil
			}
			if s.isLeft(&o.header) {
				o.left++
				s.leftEvent()
				continue
			}
			skip, err := s.check.Skip(&o.header)
			if err != nil {
				return false, err
			}
			if err := s.whenVerified(ctx); err != nil {
				return false, err
			}
			if skip {
				if to := s.conns.Observer; to != nil {
					seq, stored := s.check.Skipped()
					to.Found(&o.event, &o.header, seq, s.received(&o.event), stored)
				}
				continue
			}
			if s.island != nil {
				if may, err := s.mayPublish(ctx, &o.header); err != nil {
					return false, err
				} else if !may {
					o.left++
					s.leftEvent()
					continue
				}
			}
		}
		if err := s.pub.Publish(&o.event, &o.header); err != nil {
			o.ready = true // a publisher on another connection takes it
			return false, ofJetStream(err)
		}
		o.ready, s.thru = false, o.header.Thru
		s.latency.sent(s.pub.Sent(), o.event.Time)
		s.metrics.sent(len(o.event.Payload))
		if to := s.conns.Observer; to != nil {
			to.Sent(&o.event, &o.header, s.pub.Sent(), s.received(&o.event))
		}
	}
	return false, nil
}

// isLeft reports whether the record says that others publish the message. Then it is not in the stream, and
// has no part in what is compared and counted.
func (s *session) isLeft(h *outbox.Header) bool {
	if s.reader != nil {
		return !s.isClaimed(h)
	}
	return slices.ContainsFunc(s.left, func(l relay.Left) bool { return l.Covers(h) })
}

// leftEvent counts an own event that is left to others.
func (s *session) leftEvent() {
	if s.reader == nil {
		s.metrics.left.Inc()
	}
}

// received is when an event of the window in hand was received; zero: that is not known.
func (s *session) received(e *relay.Event) time.Time {
	at, _ := s.in.received.of(e.Pos.LSN)
	return at
}

// acked takes note of what is acknowledged.
func (s *session) acked() (seq uint64) {
	seq = s.pub.Acked()
	s.latency.acked(seq, s.metrics)
	if to := s.conns.Observer; to != nil {
		to.Acked(seq)
	}
	s.tracker.Acked(seq)
	return seq
}

// nothingToStore reports whether all that was there at the start of the session was read, and what it has
// closed is acknowledged. What is held was not sent before either.
func (s *session) nothingToStore() bool {
	return s.out.window == nil && s.in.batch == nil && !s.tracker.Unacknowledged() &&
		s.in.end() >= s.server.WALEnd
}

func (s *session) windowDone() {
	w := s.out.window
	s.out.window = nil
	s.in.forgetReceived()
	s.tracker.Made(w.Of - s.out.left)
	if w.Checkpoint.Due == 0 {
		s.out.unmarked = true
	} else {
		s.checkpoint(w.Checkpoint, w.Thru)
	}
	s.metrics.window(w)
}

func (s *session) checkpoint(cp relay.Checkpoint, thru outbox.LSN) {
	if s.reader != nil {
		s.await(waiting{cp, thru})
		return
	}
	s.tracker.Window(s.located(cp))
}

// located says where in the WAL that is read a checkpoint lies.
func (s *session) located(cp relay.Checkpoint) relay.Checkpoint {
	if s.in.away != nil {
		cp.Read, cp.Home = s.in.away.start(cp.Published()), s.in.away.home
	}
	if s.in.tally != nil {
		cp.Tally, cp.Said = s.in.tally.at(cp.Due), s.in.tally.said
	}
	cp.Timeline = s.server.History.At(cp.At())
	return cp
}

// mark makes the checkpoint of gap mode's last window: once for all that a batch brought, because it lists
// all sequences that wait.
func (s *session) mark() {
	if held, _ := s.buffer.Held(); !s.out.unmarked || held > 0 && !s.mayHold() {
		return
	}
	s.out.unmarked = false
	if cp, ok := s.buffer.Marker(s.in.reached()); ok {
		s.checkpoint(cp, cp.Due)
	}
}

// whenVerified notes, once, that the session is verified: all messages that are in the stream already have
// been made again. What the start found to be lost is recorded now, before anything is sent: a later start
// must not take the new messages for the lost ones.
func (s *session) whenVerified(ctx context.Context) error {
	if !s.check.Verified() || s.verified {
		return nil
	}
	s.verified = true
	if s.tracker.MustSave() {
		if err := s.free(ctx); err != nil { // a question uses the record as well
			return err
		}
		update := s.beginSave(time.Now())
		asked, err := s.checkpointer.store(ctx, &update)
		if err != nil {
			return fmt.Errorf("checkpoint record: %w", err)
		}
		s.heard = asked
		s.tracker.Saved(time.Now())
	}
	if s.clusters != nil {
		s.clusters.lacks, s.clusters.lost = 0, false
	}
	if s.island != nil {
		s.island.compared()
	}
	s.p.unconfirmed, s.p.diverged = unconfirmed{}, unconfirmed{}
	s.log.Log(ctx, s.p.stateLevel(), "session proved: the stream ends where the WAL says", "last_seq",
		s.pub.Sent())
	s.p.health.set(StateRunning, nil)
	return nil
}
