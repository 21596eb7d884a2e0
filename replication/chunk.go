package replication

import (
	"fmt"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// chunkLimits bound a chunk of the backlog.
type chunkLimits struct {
	bytes     int           // of pgoutput's messages: the server holds them until all are made
	time      time.Duration // until the first of them comes, roughly
	rows      int           // of pgoutput's messages, at least
	minWindow uint64        // of WAL
	maxWindow uint64
	patience  time.Duration // longer than this, and it is not read by SQL
	reread    uint64        // bytes of WAL that may be read again for each chunk, whatever the chunk brings
}

// defaultLimits: work_mem is as large as a chunk, so that it stays in the server's memory.
var defaultLimits = chunkLimits{
	bytes: 64 << 20, time: time.Second, rows: 1000, minWindow: 64 << 20, maxWindow: 1 << 30, patience: 30 * time.Second, reread: 256 << 20,
}

// firstChunk is the bytes of the first chunk.
const firstChunk = 8 << 20

// chunkSize finds out how large a chunk should be. Each one begins with reading again what lies between where the server can begin to
// decode, which moves only every few seconds of the backlog's time, and where the last one ended. So few large ones are cheap; but the
// server makes a chunk whole before it sends it.
type chunkSize struct {
	chunkLimits
	rows   int    // of the next one: the server ends it with the transaction that reaches it
	window uint64 // bytes of WAL of the next one
	last   outbox.LSN
	behind uint64 // bytes of WAL that the next one reads again
}

// newChunkSize is for a backlog that begins at pos, of messages of so many bytes on average; the first chunk begins to read at restart.
func newChunkSize(l chunkLimits, average int, pos, restart outbox.LSN) chunkSize {
	s := chunkSize{chunkLimits: l, last: pos, behind: outbox.Distance(restart, pos), window: min(max(l.minWindow, 256<<20), l.maxWindow)}
	s.rows = max(l.rows, min(firstChunk, l.bytes)/max(average, 1))
	return s
}

// next takes note of a chunk that ended at pos; the one behind it begins to read at restart. It is an error if that goes on costing
// more than it brings.
func (s *chunkSize) next(c *chunk, pos, restart outbox.LSN) error {
	brought, again := outbox.Distance(s.last, pos), s.behind
	s.last, s.behind = pos, outbox.Distance(restart, pos)
	full := c.bytes >= s.bytes/2
	switch {
	case c.took < s.time/2 || brought < again: // what is read again grows no larger with it
		s.rows, s.window = 2*s.rows, 2*s.window
	case c.took > s.time:
		s.rows, s.window = s.rows/2, s.window/2
	}
	if c.rows > 0 {
		s.rows = min(s.rows, s.bytes/max(c.bytes/c.rows, 1))
	}
	s.rows = max(s.rows, s.chunkLimits.rows)
	s.window = min(max(s.window, s.minWindow), s.maxWindow)
	if full && again > s.reread && again > 8*brought {
		return fmt.Errorf("each chunk would read %d bytes of WAL again for %d new ones: a transaction was open for long?", again, brought)
	}
	return nil
}
