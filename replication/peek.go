package replication

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

const (
	peekProgress = 2 * time.Second  // how often a long peek says how far it is
	peekGoodbye  = 2 * time.Second  // how long the server may take to end the stream by itself
	peekRelease  = 10 * time.Second // and to give the slot back when it was ended by force
)

// Peek decodes what the slot holds without consuming it and calls f with each message, keepalives excepted,
// in order: the transactions that commit before where the WAL ended on disk when it began. limit is the
// number of changes after which no further transaction is begun, 0 for no limit. A message's Data is valid
// until f returns. An error of f ends it and is returned.
//
// It is a stream that confirms nothing: the server holds no more of it than of any stream, and no time limit
// of statements ends it.
func Peek(ctx context.Context, cfg Config, limit int, f func(Message) error) error {
	s, err := Open(ctx, cfg)
	if err != nil {
		return err
	}
	defer s.Close()
	state, err := s.Slot(ctx)
	if err != nil {
		return err
	}
	if !state.Exists {
		return postgres.Fatal(nil, "slot_missing", "Run `outflow init`, or set slot to one that exists",
			"slot %q does not exist", cfg.Slot)
	}
	p := peek{limit: limit, f: f}
	if p.end, err = s.flushedLSN(ctx); err != nil {
		return err
	}
	if err := s.Start(ctx, 0, false); err != nil {
		return peekFault(cfg, state, err)
	}
	err = p.read(ctx, s)
	if ctx.Err() == nil {
		s.releaseSlot(ctx)
	}
	if ended := s.Err(); errors.Is(err, errPeekCut) && ended != nil {
		return peekFault(cfg, state, ended)
	}
	return err
}

// flushedLSN is where the WAL ends that can be decoded. What an open transaction has written is flushed by
// whole pages: that can end in the middle of a record, and no stream passes it before somebody commits. So we
// do, and the WAL writer flushes what there is.
func (s *Session) flushedLSN(ctx context.Context) (outbox.LSN, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer unlock()
	const commit = `SELECT CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_current_xact_id()
		END`
	if _, err := s.conn.Exec(ctx, commit); err != nil {
		return 0, fmt.Errorf("flush the WAL: %w", err)
	}
	var end string
	err = s.conn.QueryRow(ctx, `SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN
		pg_catalog.pg_last_wal_replay_lsn()
		ELSE pg_catalog.pg_current_wal_flush_lsn() END::text`).Scan(&end)
	if err != nil {
		return 0, fmt.Errorf("read the end of WAL: %w", err)
	}
	return outbox.ParseLSN(end)
}

// releaseSlot ends the stream and waits until the slot is free for whoever comes next. A server in the middle
// of a large transaction does not hear a goodbye before its end: it finds the connection closed.
func (s *Session) releaseSlot(ctx context.Context) {
	soon, cancel := context.WithTimeout(ctx, peekGoodbye)
	err := s.streaming().stop(soon)
	cancel()
	for begun := time.Now(); err != nil && time.Since(begun) < peekRelease; {
		state, readErr := s.Slot(ctx)
		if readErr != nil || !state.Active || state.ActivePID != int(s.repl.PID()) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// errPeekCut says that the stream ended before the peek did.
var errPeekCut = errors.New("the stream of what the slot holds ended early")

// peek is one reading of a slot.
type peek struct {
	end    outbox.LSN // transactions whose commit begins there or later are not read
	limit  int
	f      func(Message) error
	n      int        // messages handed out
	inside bool       // of a transaction
	at     outbox.LSN // how far the stream has come
}

func (p *peek) read(ctx context.Context, s *Session) error {
	progress := time.NewTicker(peekProgress)
	defer progress.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-progress.C:
			s.log.Info("reading what the slot holds", "slot", s.cfg.Slot, "messages", p.n, "at", p.at, "of",
				p.end)
		case b, ok := <-s.Batches():
			if !ok {
				return errPeekCut
			}
			done, err := p.batch(b.Messages)
			b.Release()
			if done || err != nil {
				return err
			}
		}
	}
}

// batch hands messages on, and reports whether the end is reached. Inside of a transaction a keepalive says
// nothing of that.
func (p *peek) batch(all []Message) (done bool, err error) {
	for _, m := range all {
		p.at = max(p.at, m.WALEnd)
		if m.Keepalive {
			if !p.inside && m.WALEnd >= p.end {
				return true, nil
			}
			continue
		}
		begin := len(m.Data) > 8 && m.Data[0] == 'B'
		if begin && (p.limit > 0 && p.n >= p.limit ||
			outbox.LSN(binary.BigEndian.Uint64(m.Data[1:])) >= p.end) {
			return true, nil
		}
		p.n++
		if err := p.f(m); err != nil {
			return false, err
		}
		commit := len(m.Data) > 0 && m.Data[0] == 'C'
		if p.inside = begin || p.inside && !commit; commit && m.WALEnd >= p.end {
			return true, nil
		}
	}
	return false, nil
}

func peekFault(cfg Config, state relay.SlotState, err error) error {
	switch {
	case outbox.FaultOf(err) != nil:
		return err
	case errors.Is(err, ErrSlotInUse):
		holder := fmt.Sprintf("pid %d", state.ActivePID)
		if state.Holder != "" {
			holder += " (" + state.Holder + ")"
		}
		if state.ActivePID == 0 {
			holder = "another connection"
		}
		return postgres.Fatal(err, "slot_in_use", "Stop outflow first, or inspect another slot",
			"slot %q is in use by %s", cfg.Slot, holder)
	case postgres.SQLState(err) == postgres.StateInsufficientPrivilege:
		return postgres.Fatal(err, "no_replication_right",
			"ALTER ROLE ... REPLICATION (on managed platforms grant their replication role)",
			"the role may not read from a replication slot")
	case postgres.SQLState(err) == postgres.StateNotInPrerequisiteState:
		return postgres.Fatal(err, "slot_unusable",
			"Run `outflow status`: it says what happened to the slot and what to do",
			"slot %q can't be read", cfg.Slot)
	}
	return fmt.Errorf("peek at slot %s: %w", cfg.Slot, err)
}
