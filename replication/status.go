package replication

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/crash"
)

const (
	maxStatusInterval = 10 * time.Second
	minStatusInterval = 5 * time.Millisecond
	// confirmDelay is how long a confirmed LSN may wait for later ones to go with it.
	confirmDelay = 100 * time.Millisecond
	// writeTimeout is how long a status may take to be written. A server that reads nothing for so long is
	// gone.
	writeTimeout = 10 * time.Second
)

// statusInterval is the longest time between two statuses, for a server with that wal_sender_timeout (0:
// off).
func statusInterval(timeout time.Duration) time.Duration {
	if timeout == 0 {
		return maxStatusInterval
	}
	return min(maxStatusInterval, max(timeout/4, minStatusInterval))
}

// writeStatuses is the writer goroutine: everything that is sent after START_REPLICATION is sent here.
func (s *stream) writeStatuses() {
	defer crash.Guard()
	interval := statusInterval(s.timeout)
	timer := time.NewTimer(interval)
	defer timer.Stop()
	sent := time.Now() // the start counts as a sign of life
	for {
		select {
		case <-s.quit:
			return
		case <-s.drain:
			s.sendFinalStatus()
			return
		case <-s.statusWanted:
		case <-timer.C:
		case <-s.confirmedMoved:
			if wait := confirmDelay - time.Since(sent); wait > 0 {
				timer.Reset(min(wait, interval-time.Since(sent)))
				continue
			}
		}
		if err := s.write(s.status(nil)); err != nil {
			s.fail(fmt.Errorf("send a status: %w", err))
			return
		}
		sent = time.Now()
		timer.Reset(interval)
	}
}

// sendFinalStatus sends a last status and the end of our side.
func (s *stream) sendFinalStatus() {
	if err := s.write(append(s.status(nil), 'c', 0, 0, 0, 4)); err != nil {
		s.fail(fmt.Errorf("send the last status: %w", err))
	}
}

func (s *stream) write(b []byte) error {
	if err := s.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err := s.conn.Write(b)
	return err
}

// postgresEpoch is where PostgreSQL's clock begins, in Unix microseconds: 2000-01-01 00:00 UTC.
const postgresEpoch = 946_684_800_000_000

// status appends a standby status message: write, flush and apply are what is confirmed, and never beyond
// what the stream has reached. Zero means nothing, to the server as well.
func (s *stream) status(b []byte) []byte {
	lsn := min(s.confirmed.Load(), s.received.Load())
	b = append(b, 'd', 0, 0, 0, 4+34, 'r')
	for range 3 {
		b = binary.BigEndian.AppendUint64(b, lsn)
	}
	b = binary.BigEndian.AppendUint64(b, uint64(time.Now().UnixMicro()-postgresEpoch))
	return append(b, 0) // no reply wanted
}
