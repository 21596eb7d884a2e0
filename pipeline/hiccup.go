package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// keepReplication is how long a session outlives its connection to NATS.
const keepReplication = 30 * time.Second

// brokerFailure is an error of NATS's side of the session, which another connection to NATS may be without.
type brokerFailure struct{ error }

func (e *brokerFailure) Unwrap() error { return e.error }

// ofBroker marks what the session need not end for. What needs a person is none of it, nor a record that somebody else has written.
func ofBroker(err error) error {
	if err == nil || outbox.ClassOf(err) != outbox.Transient || errors.Is(err, checkpoint.ErrConflict) {
		return err
	}
	return &brokerFailure{err}
}

// keeps reports whether the session goes on without NATS for a while. What the start found to be lost is in the record then: nothing that
// a take-over would have to know is only in memory.
func (s *session) keeps(err error) bool {
	var failure *brokerFailure
	return s.links.Reopen != nil && s.announced && !s.tracker.MustSave() && errors.As(err, &failure)
}

// hiccup is what a session knows of failures of NATS that it outlived, or tries to.
type hiccup struct {
	since  time.Time // when NATS failed; zero: it has not, or all was well since
	tries  int       // attempts since
	behind uint64    // where the last take-over went on

	created time.Time      // of the stream
	newest  *outbox.Header // of the message at the last sequence, at the start
}

// well notes that something was acknowledged on the new connection, or nothing is left to be: the next failure is one of its own.
func (h *hiccup) well(acked, sent uint64) {
	if !h.since.IsZero() && (acked > h.behind || acked == sent) {
		h.since, h.tries = time.Time{}, 0
	}
}

// found is what an attempt to go on has opened and read.
type found struct {
	broker   JetStream
	store    Store
	record   *checkpoint.Record
	revision uint64
	stream   relay.StreamState
	stored   []relay.Stored // the last message that was acknowledged, and what lies behind it
	asked    time.Time
	err      error
}

// rejoin waits for NATS with all that the session has: the stream of replication, which goes on replying, the buffer, the window in hand,
// and what is sent and not proved. Nothing is read, published, recorded, confirmed or ticked meanwhile. nil: the session goes on. Any
// other end is that of the session, with the ordinary start to find out what has become of the stream.
func (s *session) rejoin(ctx context.Context, cause error) error {
	// A refusal may be the first sign of what the connection knows better by now: a stranger's message took the sequence.
	if err := s.links.JetStream.Err(); outbox.ClassOf(err) != outbox.Transient {
		return err
	}
	if s.hiccup.since.IsZero() {
		s.hiccup.since = time.Now()
	}
	s.links.JetStream.Close() // nothing comes any more from what it was
	s.p.hiccuped(cause)

	over := time.NewTimer(time.Until(s.hiccup.since.Add(keepReplication)))
	defer over.Stop()
	next := time.NewTimer(s.pause())
	defer next.Stop()
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	attempts, cancel := context.WithCancel(ctx)
	defer cancel()
	var answer chan *found // nil: nobody is trying
	defer func() { abandon(answer) }()
	for {
		if err := s.links.Source.Err(); err != nil {
			return s.upstreamEnded()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over.C:
			return fmt.Errorf("NATS did not come back within %v: %w", keepReplication, cause)
		case now := <-beat.C:
			s.p.health.waits(now)
		case r := <-s.recorder.done:
			if err := s.cutShort(r); err != nil {
				return err
			}
		case r := <-s.scribe.done:
			s.scribe.finished(r, time.Now(), s.log, s.metrics)
		case <-next.C:
			if s.recorder.busy { // with the old connection: what it wrote there must be over
				next.Reset(backoffMin)
				continue
			}
			answer = make(chan *found, 1)
			acked := s.pub.Acked()
			go func() { answer <- s.links.find(attempts, acked) }()
		case f := <-answer:
			answer = nil
			if f.err == nil {
				return s.takeOver(f)
			}
			if outbox.ClassOf(f.err) != outbox.Transient {
				return fmt.Errorf("NATS failed (%w); then: %s", cause, f.err) // the ordinary start says it again, if it is so
			}
			s.p.health.set(StateAway, f.err)
			s.log.Debug("NATS is away", "err", f.err)
			next.Reset(s.pause())
		}
	}
}

// pause is how long to wait before the next attempt.
func (s *session) pause() time.Duration {
	s.hiccup.tries++
	return backoff(s.hiccup.tries-1, s.p.jitter)
}

// hiccuped says that NATS failed and the session is kept: the same reason once in complaintInterval.
func (p *Pipeline) hiccuped(cause error) {
	level := slog.LevelWarn
	if !p.fresh(cause) {
		level = slog.LevelDebug
	}
	p.log.Log(context.Background(), level, "NATS failed; replication is kept", "for", keepReplication, "err", cause)
	p.health.set(StateAway, cause)
}

// abandon closes what an attempt still opens.
func abandon(answer chan *found) {
	if answer == nil {
		return
	}
	go func() {
		if f := <-answer; f.err == nil {
			f.broker.Close()
		}
	}()
}

// cutShort takes the answer of a recorder that lost the broker under it. Whether the record was written is found out later.
func (s *session) cutShort(r recorded) error {
	var failure *brokerFailure
	if err := s.recorded(r); err != nil && !errors.As(err, &failure) {
		return err
	}
	return nil
}

// find opens the broker's side anew and reads, in the order of a start, what says whether the session may go on. After an error nothing is
// left open.
func (l *Conns) find(ctx context.Context, acked uint64) *found {
	f := &found{asked: time.Now()}
	open, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if f.broker, f.store, f.err = l.Reopen(open); f.err != nil {
		return f
	}
	if f.err = f.read(ctx, open, acked); f.err != nil {
		f.broker.Close()
	}
	return f
}

func (f *found) read(ctx, open context.Context, acked uint64) (err error) {
	if err := f.broker.Check(open); err != nil {
		return err
	}
	if err := f.broker.Watch(open); err != nil {
		return err
	}
	if f.record, f.revision, err = load(ctx, f.store); err != nil {
		return err
	}
	if f.stream, err = limited("stream", f.broker.Tail)(ctx); err != nil {
		return err
	}
	f.stored, err = stored(ctx, f.broker, max(acked, 1)-1, f.stream.LastSeq)
	return err
}

// stored reads what of the stream is to be compared.
func stored(ctx context.Context, b JetStream, above, upTo uint64) ([]relay.Stored, error) {
	ctx, cancel := context.WithTimeout(ctx, compareTimeout)
	defer cancel()
	all, err := b.Stored(ctx, above, upTo)
	if err != nil {
		return nil, fmt.Errorf("read the stream's last messages: %w", err)
	}
	return all, nil
}

// compareTimeout is how long it may take to read what can have been in flight: one message after the other, in the worst case.
const compareTimeout = 30 * time.Second

// takeOver lets the session go on with the new connection, if the record is what this session wrote and the stream ends with what it
// published. The stream is a prefix of what was sent then, at least what was proved: what the other end of the old connection still
// stores is the very message that is sent again now, or is refused.
func (s *session) takeOver(f *found) (err error) {
	defer func() {
		if err != nil {
			f.broker.Close()
			err = fmt.Errorf("NATS is back, and this session can't go on: %w", err)
		}
	}()
	wrote, err := s.recorder.found(f.record, f.revision)
	if err != nil {
		return err
	}
	if err := s.ends(f); err != nil {
		return err
	}
	acked := s.pub.Acked()
	pub, err := f.broker.Resume(f.stream.LastSeq)
	if err != nil {
		return err
	}
	now := time.Now()
	s.pub = pub
	s.links.JetStream, s.links.Store = f.broker, f.store
	if wrote {
		s.tracker.Saved(now)
	} else {
		s.tracker.Unsaved()
	}
	// As at a start: the broker lives, and what is there has been there for as long as the times beside it say.
	s.tracker.Reconnected(f.asked, f.stream.Now, now)
	s.heard, s.hiccup.behind = f.asked, f.stream.LastSeq
	s.metrics.resumed()
	s.p.health.set(StateRunning, nil)
	s.log.Info("NATS is back; going on behind seq", "seq", f.stream.LastSeq, "acknowledged", acked, "sent", pub.Sent(),
		"after", now.Sub(s.hiccup.since).Round(time.Millisecond))
	return nil
}

// ends returns an error unless the stream ends with messages of this session, behind the newest one that is proved or with it: whatever
// else there is to be found is the ordinary start's to judge. A stranger's message may lie further up, with ours behind it.
func (s *session) ends(f *found) error {
	st, acked, sent := &f.stream, s.pub.Acked(), s.pub.Sent()
	switch {
	case !st.Exists:
		return errors.New("the stream is gone")
	case !st.Created.Equal(s.hiccup.created):
		return errors.New("the stream is another one")
	case st.LastSeq < acked || st.LastSeq > sent:
		return fmt.Errorf("the stream's last sequence is %d; %d was acknowledged, %d was sent", st.LastSeq, acked, sent)
	case st.LastSeq == 0:
		return nil
	case st.NewestSeq != st.LastSeq:
		return fmt.Errorf("the stream's newest message is %d, its last sequence %d", st.NewestSeq, st.LastSeq)
	}
	for _, m := range f.stored {
		want := s.pub.Header(m.Seq)
		if want == nil && m.Seq == s.startSeq {
			want = s.hiccup.newest
		}
		if m.Seq >= acked && (want == nil || m.Header == nil || *want != *m.Header) {
			return fmt.Errorf("the stream's message %d is %v; this session sent %v", m.Seq, m.Header, want)
		}
	}
	return nil
}
