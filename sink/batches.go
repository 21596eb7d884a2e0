package sink

import (
	"crypto/rand"
	"encoding/base64"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/outflowhq/outflow/sink/stream"
)

// Batches allows publishers to send messages as atomic batches: a server that syncs each write syncs a batch
// only once (from 2.15 on). The connections of one process share it, so that batches are not tried again
// after a server has refused one.
type Batches struct{ refused atomic.Bool }

// The limits of a batch. The server takes 1000 messages in one.
const (
	maxBatch      = 500
	maxBatchBytes = 1 << 20
	// fewer go faster one by one: a batch costs the server files of its own, some milliseconds
	minBatch      = 32
	minBatchBytes = 256 << 10 // or so many bytes
	maxBatched    = 128 << 10 // bytes of a message that may be in one
	batchOverhead = 128       // bytes of the headers of a batch, at most

	// levels of JetStream's API
	fenceLevel  = 1 // nats-server 2.11 knows the header that names the fence's subject
	atomicLevel = 2 // 2.12 has atomic batches
	batchLevel  = 5 // 2.15 syncs one once
)

// The server's pace is measured on the first messages of a session, which go one by one. A span are messages
// that it has on the wire at a time; if each takes longer than slowPace, it syncs each. As many spans in a
// row as paceSpans decide.
const (
	paceSpan = 200
	// in flight meanwhile: it says nothing before it has synced all that it has, and a disk may take 10 ms
	// for each
	paceWindow = 256
	paceSpans  = 2
	slowPace   = 40 * time.Microsecond
)

// batches returns what allows batches on this stream; nil if nothing does. mu is held.
func (c *Conn) batches() *Batches {
	b, s, least := c.cfg.Batches, c.config, batchLevel
	switch {
	case b == nil || b.refused.Load() || s == nil || !s.AllowAtomic:
		return nil
	case c.inTurns():
		least = atomicLevel
	case s.Replicas > 1 || s.Storage != "file":
		return nil
	}
	if level(s) < least {
		return nil
	}
	return b
}

// level is that of the server that has the stream, which may be another one than we are connected to.
func level(s *stream.Config) int {
	level, _ := strconv.Atoi(s.Metadata["_nats.level"]) // 0: 2.10 does not say
	return level
}

// batching is the state of batching in a publisher. It belongs to the publisher's goroutine.
type batching struct {
	allowed *Batches // nil: never
	on      bool     // the server has turned out to sync each message
	pace    pace

	id    []byte // what the ids of this publisher's batches begin with
	first uint64 // the open batch's first sequence
	n     int    // messages of it that were sent; 0: none is open
	bytes int    //
}

func newBatching(allowed *Batches) batching {
	b := batching{allowed: allowed}
	if allowed != nil {
		var random [9]byte
		_, _ = rand.Read(random[:]) // it never fails
		b.id = append(base64.RawURLEncoding.AppendEncode(nil, random[:]), '-')
	}
	return b
}

// open reports whether a batch has begun and is not committed.
func (b *batching) open() bool { return b.n > 0 }

// full reports whether a message of the given size is the last one of the open batch.
func (b *batching) full(size int) bool { return b.n+1 >= maxBatch || b.bytes+size >= maxBatchBytes }

// add makes the message the next one of the batch; commit: the last.
func (b *batching) add(m *message, commit bool) {
	if b.n == 0 {
		b.first, b.bytes = m.seq, 0
	}
	b.n++
	b.bytes += m.size()
	l := m.lines[:0]
	if commit {
		l = append(l, headerBatchCommit+": 1\r\n"...)
	}
	l = append(append(l, headerBatchID+": "...), b.id...)
	l = strconv.AppendUint(l, b.first, 36)
	l = append(l, "\r\n"+headerBatchSeq+": "...)
	l = strconv.AppendInt(l, int64(b.n), 10)
	m.lines = append(l, "\r\n"...)
	if b.n > 1 {
		// the server takes an expected sequence on the first one only: it holds for all
		m.rest = m.expectedEnd
	}
	if commit {
		b.n = 0
	}
}

// batchable reports whether the message may be part of a batch: its headers may not take it above what the
// server takes.
func (p *Publisher) batchable(m *message) bool {
	return m.size() <= maxBatched && len(m.header)+len(m.data)+batchOverhead <= p.enc.limit
}

// pace measures how long the server takes for a message.
type pace struct {
	begun      bool          // a span has
	from       uint64        // acknowledged then
	until      uint64        // on the wire then
	at         time.Duration // when that was
	slow, fast int           // spans in a row
}

// probing reports whether the pace is still to be found out.
func (b *batching) probing() bool { return b.allowed != nil && !b.on && b.pace.fast < paceSpans }

// flushed is told that all messages up to sequence written are on the wire, and up to acked are acknowledged.
func (b *batching) flushed(acked, written uint64, at time.Duration) {
	if w := &b.pace; b.probing() && !w.begun && written >= acked+paceSpan {
		w.begun, w.from, w.until, w.at = true, acked, written, at
	}
}

// settled is told what was acknowledged, and when. It reports, with the time that each took, that batches go
// from now on.
func (b *batching) settled(acked uint64, at time.Duration) (each time.Duration, turned bool) {
	w := &b.pace
	if !w.begun || acked < w.until {
		return 0, false
	}
	w.begun = false
	if each = (at - w.at) / time.Duration(acked-w.from); each < slowPace {
		w.slow, w.fast = 0, w.fast+1
	} else {
		w.slow, w.fast = w.slow+1, 0
	}
	b.on = w.slow == paceSpans
	return each, b.on
}
