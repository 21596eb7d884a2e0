package replication

import (
	"encoding/binary"

	"github.com/outflowhq/outflow/outbox"
)

// seam joins the stream to the backlog. The backlog has every transaction whose commit record begins below given, the stream every one
// whose commit record begins at or beyond its own start, which is at or below given. So nothing is missing; and what both have, which
// takes a start between two records, is delivered by the backlog.
type seam struct {
	given outbox.LSN // set before the backlog has passed

	past bool // a transaction that only the stream has was seen: what follows is all new
	twin bool // in a transaction that both have
}

// trim empties the transactions that the backlog had: a transaction without changes is no input, and what the stream says of relations
// in it, it says once. A keepalive does not go back behind the backlog.
func (s *seam) trim(b *batch) {
	if s.past {
		return
	}
	kept := b.Messages[:0]
	for _, m := range b.Messages {
		switch {
		case s.past:
		case m.Keepalive:
			m.WALEnd = max(m.WALEnd, s.given)
		case len(m.Data) == 0: // the decoder says what it thinks of it
		case m.Data[0] == 'B':
			s.twin = len(m.Data) >= 9 && outbox.LSN(binary.BigEndian.Uint64(m.Data[1:])) < s.given
			s.past = !s.twin
		case m.Data[0] == 'C':
			s.twin = false
		case s.twin && (m.Data[0] == 'I' || m.Data[0] == 'M'):
			continue
		}
		kept = append(kept, m)
	}
	clear(b.Messages[len(kept):])
	b.Messages = kept
}
