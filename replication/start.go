package replication

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Start starts the stream at from, which has to be at or above the slot's confirmed LSN to have an effect:
// the server never starts below that. binary asks for column values in binary form. After ErrSlotInUse, and
// any other error that the server gives as an answer, Start may be called again.
//
// A missing or invalidated slot is a plain error: what follows from it is decided by who reads the slot's
// state.
func (s *Session) Start(ctx context.Context, from outbox.LSN, binary bool) error {
	unlock, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if s.streaming() != nil {
		return fmt.Errorf("start replication: already started")
	}
	if s.frames == nil {
		return fmt.Errorf("start replication: the session was opened to ask only")
	}
	if err := s.startReplication(ctx, startCommand(s.cfg, s.version, from, binary)); err != nil {
		if postgres.SQLState(err) == postgres.StateObjectInUse {
			return fmt.Errorf("%w: %w", ErrSlotInUse, err)
		}
		return fmt.Errorf("start replication of slot %s at %v: %w", s.cfg.Slot, from, err)
	}
	h, err := s.repl.Hijack()
	if err != nil {
		return fmt.Errorf("take the replication connection over: %w", err)
	}
	if err := s.run(h, from); err != nil {
		h.Conn.Close() //nolint:errcheck // it is closed whatever this says
		return err
	}
	return nil
}

// run starts the goroutines of the stream on a connection that pgconn has given up. pgconn must hold no byte
// of it.
func (s *Session) run(h *pgconn.HijackedConn, from outbox.LSN) error {
	rest, err := s.frames.detach()
	if err == nil && h.Frontend.ReadBufferLen() != 0 {
		err = fmt.Errorf("%d bytes are left in pgconn's buffer", h.Frontend.ReadBufferLen())
	}
	if err == nil {
		err = s.socket.LeavePoller()
	}
	if err != nil {
		return fmt.Errorf("take the replication connection over: %w", err)
	}
	st := newStream(h.Conn, s.frames.src, rest, from, s.timeout)
	st.log, st.publication, st.noTable = s.log, s.cfg.Publication, s.cfg.Table == ""
	if s.recovering {
		st.verify = func() error { return s.sameTimeline(st) }
	}
	s.socket.Backlog = func() bool { return st.received.Load()+farBehind < s.walEnd.Load() }
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	s.stream = st
	st.run()
	return nil
}

// startReplication sends the command and waits for the stream to begin. An error that the server answers with
// leaves the connection usable.
func (s *Session) startReplication(ctx context.Context, command string) error {
	if err := s.repl.Conn().SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	s.repl.Frontend().SendQuery(&pgproto3.Query{String: command})
	if err := s.repl.Frontend().Flush(); err != nil {
		return err
	}
	var refused error
	for {
		m, err := s.repl.ReceiveMessage(ctx)
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *pgproto3.CopyBothResponse:
			return nil
		case *pgproto3.ErrorResponse:
			refused = pgconn.ErrorResponseToPgError(m)
		case *pgproto3.ReadyForQuery:
			if refused == nil {
				refused = fmt.Errorf("the server did not begin to stream")
			}
			return refused
		}
	}
}

// startCommand is the command that starts the stream. Protocol 1: the server keeps a large transaction to
// itself until it commits, and sends in commit order.
func startCommand(cfg Config, version int, from outbox.LSN, binary bool) string {
	options := "proto_version '1', messages 'true', publication_names " +
		postgres.Literal(postgres.Quote(cfg.Publication)) // a list of identifiers, here of one
	if binary {
		options += ", binary 'true'"
	}
	if cfg.OwnOnly && len(cfg.Clusters) == 0 && version >= 160000 {
		options += ", origin 'none'"
	}
	return fmt.Sprintf("START_REPLICATION SLOT %s LOGICAL %v (%s)", postgres.Quote(cfg.Slot), from, options)
}
