package pipeline

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// errFound ends the session that has put into the record what that had lost.
var errFound = fmt.Errorf("the record has again what others publish: %w", errAnew)

// mayLack reports whether the stream may differ because the record lacks something: a broker that crashes may
// lose its newest revisions, and keep messages that were published behind them. What led to them is in the
// WAL.
func (s *session) mayLack(err error) bool {
	f := outbox.FaultOf(err)
	switch {
	case s.clusters == nil || s.clusters.lacks == 0 || f == nil || f.Code != codeDivergence:
		return false
	case s.island != nil: // it would have made a message that the stream does not have, and which is known
		return s.out.window != nil && s.check.Whole()
	}
	return true
}

// findLost reads on for cluster rows alone, up to where the WAL ended when the process took what it knows
// from the record. A reader records the claims that it finds. A home that made a message which the stream
// does not have records that it left this one to others, if they have claimed it, up to where the first claim
// of it goes: there may be another one behind it, and then the stream differs once more. Then the session
// begins again, and the stream decides.
func (s *session) findLost(ctx context.Context, cause error) error {
	made, rows := s.out.header, s.clusters
	s.buffer.Discard()
	s.out = output{}
	s.p.health.sessionEnded() // as to what it held
	s.p.health.busy(true)
	defer s.p.health.busy(false)
	s.log.Warn("the stream differs: reading on for what the record may lack", reason(cause)...)
	for read := max(s.in.end(), rows.read); ; read = max(read, rows.read) {
		if s.island != nil && s.island.Claimed(made.Due, made.Pos.LSN) && !s.publishedBefore(&made) {
			if err := s.leave(ctx, &made); err != nil {
				return err
			}
			return errFound
		}
		if read >= rows.lacks {
			break
		}
		m := s.in.message()
		if m == nil {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case b, ok := <-s.conns.Source.Batches():
				if !ok {
					return replicationEnded(s.conns.Source)
				}
				s.in.take(b, time.Now())
			}
			continue
		}
		if err := s.rows(m); err != nil {
			return err
		}
		if m.Keepalive && !s.in.decoder.InTransaction() {
			read = max(read, m.WALEnd)
		}
	}
	rows.lacks = 0
	if err := s.recordClaimed(ctx); err != nil {
		return err
	}
	return cause
}
