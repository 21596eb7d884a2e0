package replication

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Lengths of what stands before the data of a CopyData message.
const (
	walDataHeader = 1 + 8 + 8 + 8 // type, start, end, the server's time
	keepaliveSize = 1 + 8 + 8 + 1 // type, end, the server's time, whether a reply is wanted
)

// handle takes one protocol message of the stream. What it keeps goes into b; an error ends the stream.
func (s *stream) handle(b *batch, typ byte, body []byte) error {
	switch typ {
	case 'd':
		return s.copyData(b, body)
	case 'N':
		return s.notice(body)
	case 'E':
		return s.serverError(body)
	case 'C':
		if !closed(s.drain) {
			return errors.New("the server has ended it") // all is sent and confirmed, and it stops
		}
		return nil
	case 'Z':
		return errEnd
	case 'c', 'S', 'A': // the server's side has ended, a changed parameter, a notification
		return nil
	}
	return fmt.Errorf("unexpected message of type %q", typ)
}

func (s *stream) copyData(b *batch, body []byte) error {
	if len(body) == 0 {
		return fmt.Errorf("empty CopyData message")
	}
	switch body[0] {
	case 'w':
		if len(body) < walDataHeader {
			return fmt.Errorf("WAL data message of %d bytes", len(body))
		}
		b.Messages = append(b.Messages, Message{WALEnd: outbox.LSN(binary.BigEndian.Uint64(body[9:])),
			Data: body[walDataHeader:]})
	case 'k':
		if len(body) < keepaliveSize {
			return fmt.Errorf("keepalive of %d bytes", len(body))
		}
		// After a start keepalives may go back towards restart_lsn; what an earlier one promised still holds.
		s.high = max(s.high, outbox.LSN(binary.BigEndian.Uint64(body[1:])))
		b.Messages = append(b.Messages, Message{Keepalive: true, WALEnd: s.high})
		if body[17] != 0 {
			signal(s.statusWanted)
		}
	default:
		return fmt.Errorf("unexpected CopyData message of type %q", body[0])
	}
	return nil
}

// notice ends the stream where PostgreSQL 18 says that it skips the rows of a publication that is missing;
// others are logged. The text may be translated, so the routine's name counts as well.
func (s *stream) notice(body []byte) error {
	var m pgproto3.NoticeResponse
	if err := m.Decode(body); err != nil {
		return fmt.Errorf("read a notice: %w", err)
	}
	n := pgconn.ErrorResponseToPgError((*pgproto3.ErrorResponse)(&m))
	skipped := n.Routine == "LoadPublications" || strings.Contains(n.Message, "skipped loading publication")
	// messages are not skipped by that
	if n.Code == postgres.StateNotInPrerequisiteState && skipped && !s.noTable {
		return catalog.PublicationMissing(s.publication, !s.noTable, n)
	}
	s.log.Warn("notice in the replication stream", "code", n.Code, "notice", n.Message)
	return nil
}

// serverError classifies an error that ends the stream: only a publication that is missing is of class fatal.
func (s *stream) serverError(body []byte) error {
	var m pgproto3.ErrorResponse
	if err := m.Decode(body); err != nil {
		return fmt.Errorf("read an error: %w", err)
	}
	e := pgconn.ErrorResponseToPgError(&m)
	if e.Code == postgres.StateUndefinedObject { // the slot was there when the stream started
		return catalog.PublicationMissing(s.publication, !s.noTable, e)
	}
	return e
}
