package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// keepReplication is how long a session outlives its connection to NATS.
const keepReplication = 30 * time.Second

// jetStreamFailure is an error of NATS's side of the session, which another connection to NATS may be
// without.
type jetStreamFailure struct{ error }

func (e *jetStreamFailure) Unwrap() error { return e.error }

// ofJetStream marks an error that the session may outlive. One that needs a person is not marked, nor is a
// record that somebody else has written.
func ofJetStream(err error) error {
	if err == nil || outbox.ClassOf(err) != outbox.Transient || errors.Is(err, checkpoint.ErrConflict) {
		return err
	}
	return &jetStreamFailure{err}
}

// outlives reports whether the session waits for NATS after an error. What the start found to be lost is in
// the record then, so nothing that has to be known after it is only in memory. A home for which others
// publish listens instead.
func (s *session) outlives(err error) bool {
	var failure *jetStreamFailure
	return s.conns.Reopen != nil && s.verified && !s.tracker.MustSave() && errors.As(err, &failure) &&
		s.clusters == nil
}

// outage is what a session knows of failures of NATS that it outlived, or tries to.
type outage struct {
	since   time.Time // when NATS failed; zero: it has not, or all was well since
	tries   int       // attempts since
	resumed uint64    // the stream's last sequence when the session went on

	created time.Time      // of the stream
	start   uint64         // its last sequence at the session's start
	newest  *outbox.Header // of the message there
}

// acknowledged reports whether an outage is over: something was acknowledged on the new connection, or
// nothing is left to be. The next failure is another outage.
func (o *outage) acknowledged(acked, sent uint64) (over bool) {
	if o.since.IsZero() || acked <= o.resumed && acked < sent {
		return false
	}
	o.since, o.tries = time.Time{}, 0
	return true
}

// probe is what an attempt to reconnect has opened and read.
type probe struct {
	js       JetStream
	store    Store
	record   *checkpoint.Record
	revision uint64
	stream   relay.StreamState
	stored   []relay.Stored // the last message that was acknowledged, and what lies behind it
	asked    time.Time      // before anything was
	err      error          // nothing is open then
}

// reconnect waits for NATS with all that the session has: replication, which goes on replying, the buffer,
// the window in hand, and what is sent and not acknowledged. Nothing is read, published, recorded or
// confirmed meanwhile, and no heartbeat is written. nil: the session goes on. After an error it ends, and the
// ordinary start finds out what has become of the stream.
func (s *session) reconnect(ctx context.Context, cause error) error {
	// A refusal may be the first sign of what the connection knows better by now: a stranger's message took
	// the sequence.
	if err := s.conns.JetStream.Err(); outbox.ClassOf(err) != outbox.Transient {
		return err
	}
	if s.outage.since.IsZero() {
		s.outage.since = time.Now()
	}
	s.conns.JetStream.Close() // nothing that it still says counts
	s.p.natsFailed(cause)

	over := time.NewTimer(time.Until(s.outage.since.Add(keepReplication)))
	defer over.Stop()
	next := time.NewTimer(s.pause())
	defer next.Stop()
	poll := time.NewTicker(idleInterval) // of replication, whose batches may not be taken
	defer poll.Stop()
	attempts, cancel := context.WithCancel(ctx)
	defer cancel()
	var answer chan *probe // nil: no attempt is under way
	defer func() { abandon(answer) }()
	for {
		if err := s.conns.Source.Err(); err != nil {
			return replicationEnded(s.conns.Source)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over.C:
			return fmt.Errorf("NATS did not come back within %v: %w", keepReplication, cause)
		case <-poll.C:
			s.p.health.turned(time.Now())
		case result := <-s.questions.done:
			// It may have lost NATS as well. Whether a record was written is found out later.
			var failure *jetStreamFailure
			if err := s.questions.take(result); err != nil && !errors.As(err, &failure) {
				return err
			}
		case result := <-s.heartbeats.worker.done:
			if err := s.heartbeats.worker.take(result); err != nil {
				return err
			}
		case <-next.C:
			if s.questions.busy { // with the old connection: what it wrote there must be over
				next.Reset(backoffMin)
				continue
			}
			answer = make(chan *probe, 1)
			acked := s.pub.Acked()
			go func() {
				defer crash.Guard()
				answer <- s.conns.attempt(attempts, acked)
			}()
		case pr := <-answer:
			answer = nil
			if pr.err == nil {
				return s.resume(pr)
			}
			if outbox.ClassOf(pr.err) != outbox.Transient {
				// the ordinary start says it again, if it is so
				return fmt.Errorf("NATS failed (%w); then: %s", cause, pr.err)
			}
			s.p.health.set(StateAway, pr.err)
			s.log.Debug("NATS is away", reason(pr.err)...)
			next.Reset(s.pause())
		}
	}
}

// pause is how long to wait before the next attempt.
func (s *session) pause() time.Duration {
	s.outage.tries++
	return backoff(s.outage.tries-1, s.p.jitter)
}

// natsFailed counts and logs that NATS failed and the session is kept: the same reason is logged once in
// complaintInterval.
func (p *Pipeline) natsFailed(cause error) {
	p.metrics.failed(p.stage, cause)
	level := slog.LevelWarn
	if !p.fresh(cause) {
		level = slog.LevelDebug
	}
	p.log.Log(context.Background(), level, "NATS failed; replication is kept",
		append(reason(cause), "for", keepReplication)...)
	p.health.set(StateAway, cause)
}

// abandon closes what an attempt that nobody waits for any more still opens.
func abandon(answer chan *probe) {
	if answer == nil {
		return
	}
	go func() {
		defer crash.Guard()
		if pr := <-answer; pr.err == nil {
			pr.js.Close()
		}
	}()
}

// attempt opens JetStream's side anew and reads, in the order of a start, what says whether the session may
// go on.
func (c *Conns) attempt(ctx context.Context, acked uint64) *probe {
	pr := &probe{asked: time.Now()}
	open, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if pr.js, pr.store, pr.err = c.Reopen(open); pr.err != nil {
		return pr
	}
	if pr.err = pr.read(ctx, open, acked); pr.err != nil {
		pr.js.Close()
	}
	return pr
}

func (pr *probe) read(ctx, open context.Context, acked uint64) (err error) {
	if err := pr.js.Check(open); err != nil {
		return err
	}
	if err := pr.js.Watch(open); err != nil {
		return err
	}
	if pr.record, pr.revision, err = load(ctx, pr.store); err != nil {
		return err
	}
	if pr.stream, err = limited("stream", pr.js.Tail)(ctx); err != nil {
		return err
	}
	pr.stored, err = stored(ctx, pr.js, max(acked, 1)-1, pr.stream.LastSeq, false)
	return err
}

// stored reads what of the stream is to be compared.
func stored(ctx context.Context, b JetStream, above, upTo uint64, more bool) ([]relay.Stored, error) {
	ctx, cancel := context.WithTimeout(ctx, compareTimeout)
	defer cancel()
	all, err := b.Stored(ctx, above, upTo, more)
	if err != nil {
		return nil, fmt.Errorf("read the stream's last messages: %w", err)
	}
	return all, nil
}

// compareTimeout is how long it may take to read what can have been in flight: one message after the other,
// in the worst case.
const compareTimeout = 30 * time.Second

// resume lets the session go on with the new connection, if the record is what this session wrote and the
// stream ends with what it published. The stream is a prefix of what was sent then, and has at least what was
// acknowledged: whatever the server still gets of the old connection is the very message that is sent again
// now, or is refused.
func (s *session) resume(pr *probe) (err error) {
	defer func() {
		if err != nil {
			pr.js.Close()
			err = fmt.Errorf("NATS is back, and this session can't go on: %w", err)
		}
	}()
	saved, err := s.checkpointer.resume(pr.record, pr.revision)
	if err != nil {
		return err
	}
	if err := s.checkEnd(pr); err != nil {
		return err
	}
	acked := s.pub.Acked()
	pub, err := pr.js.Resume(pr.stream.LastSeq)
	if err != nil {
		return err
	}
	now := time.Now()
	s.pub = pub
	s.conns.JetStream, s.conns.Store = pr.js, pr.store
	if saved {
		s.tracker.Saved(now)
	} else {
		s.tracker.Unsaved()
	}
	// As at a start: JetStream lives, and what is there has been there for as long as the times beside it
	// say.
	s.tracker.Reconnected(pr.asked, pr.stream.Now, now)
	s.heard, s.outage.resumed = pr.asked, pr.stream.LastSeq
	s.metrics.resumptions.Inc()
	s.log.Debug("NATS answers; going on behind seq", "seq", pr.stream.LastSeq, "acknowledged", acked, "sent",
		pub.Sent())
	return nil
}

// settleOutage says that NATS is back when it has stored something again: one whose disk is full answers all
// else, and the session goes on with it in vain.
func (s *session) settleOutage(now time.Time, acked uint64) {
	since := s.outage.since
	if !s.outage.acknowledged(acked, s.pub.Sent()) {
		return
	}
	s.p.health.set(StateRunning, nil)
	s.log.Info("NATS is back", "acknowledged", acked, "after", now.Sub(since).Round(time.Millisecond))
}

// checkEnd returns an error unless the stream ends with messages of this session, at or behind the newest one
// that is acknowledged: anything else is for the ordinary start to judge. A stranger's message may lie
// further up, with ours behind it.
func (s *session) checkEnd(pr *probe) error {
	st, acked, sent := &pr.stream, s.pub.Acked(), s.pub.Sent()
	switch {
	case !st.Exists:
		return errors.New("the stream is gone")
	case !st.Created.Equal(s.outage.created):
		return errors.New("the stream is another one")
	case st.LastSeq < acked || st.LastSeq > sent:
		return fmt.Errorf("the stream's last sequence is %d; %d was acknowledged, %d was sent", st.LastSeq,
			acked, sent)
	case st.LastSeq == 0:
		return nil
	case st.NewestSeq != st.LastSeq:
		return fmt.Errorf("the stream's newest message is %d, its last sequence %d", st.NewestSeq, st.LastSeq)
	}
	for _, m := range pr.stored {
		want := s.pub.Header(m.Seq)
		if want == nil && m.Seq == s.outage.start {
			want = s.outage.newest
		}
		if m.Seq >= acked && (want == nil || m.Header == nil || *want != *m.Header) {
			return fmt.Errorf("the stream's message %d is %v; this session sent %v", m.Seq, m.Header, want)
		}
	}
	return nil
}
