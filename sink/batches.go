package sink

import (
	"crypto/rand"
	"encoding/base64"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"
)

// Batches allows publishers to send messages as atomic batches, which a server that syncs each write syncs once (from 2.15 on). It is
// shared by the connections of one process: what a server refused is not tried again.
type Batches struct{ refused atomic.Bool }

// The limits of a batch. The server takes 1000 messages in one.
const (
	maxBatch      = 500
	maxBatchBytes = 1 << 20
	minBatch      = 24        // fewer go faster as they are: a batch costs the server files of its own
	minBatchBytes = 256 << 10 // or so many bytes
	maxBatched    = 128 << 10 // bytes of a message that may be in one
	batchOverhead = 128       // bytes of the headers of a batch, at most

	batchLevel = 5 // of JetStream's API: nats-server 2.15
)

// The server's pace, measured on messages that go one by one: if it takes longer than slowPace for each of paceSpan messages that it had
// on the wire already, and that twice in a row, it syncs each of them.
const (
	paceSpan  = 200
	slowPace  = 40 * time.Microsecond
	slowSpans = 2
)

// batches returns what allows batches on this stream; nil if nothing does. mu is held.
func (c *Conn) batches() *Batches {
	b, s := c.cfg.Batches, c.stream
	if b == nil || b.refused.Load() || s == nil || !s.AllowAtomic || s.Replicas > 1 || s.Storage != "file" {
		return nil
	}
	// The level is that of the server that has the stream, which may be another one than we are connected to.
	if level, err := strconv.Atoi(s.Metadata["_nats.level"]); err != nil || level < batchLevel {
		return nil
	}
	return b
}

// batch is the state of batching in a publisher.
type batch struct {
	allowed *Batches // nil: never
	on      bool     // the server has turned out to be slow
	pace    pace

	id    []byte // what the ids of this publisher's batches begin with
	first uint64 // the open batch's first sequence
	n     int    // messages of it that were sent; 0: none is open
	bytes int    //
}

func newBatch(allowed *Batches) batch {
	b := batch{allowed: allowed}
	if allowed != nil {
		var random [9]byte
		_, _ = rand.Read(random[:]) // it never fails
		b.id = append(base64.RawURLEncoding.AppendEncode(nil, random[:]), '-')
	}
	return b
}

// open reports whether a batch has begun and is not committed.
func (b *batch) open() bool { return b.n > 0 }

// full reports whether a message of the given size is the last one of the open batch.
func (b *batch) full(size int) bool { return b.n+1 >= maxBatch || b.bytes+size >= maxBatchBytes }

// add makes the message the next one of the batch; commit: the last.
func (b *batch) add(m *message, commit bool) {
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
		m.rest = m.expectedEnd // the server takes an expected sequence on the first one only: it holds for all
	}
	if commit {
		b.n = 0
	}
}

// batchable reports whether the message may be part of a batch: its headers may not take it above what the server takes.
func (p *Publisher) batchable(m *message) bool {
	return m.size() <= maxBatched && len(m.header)+len(m.data)+batchOverhead <= p.enc.limit
}

// pace measures how long the server takes for a message.
type pace struct {
	from uint64        // acknowledged when the span began; 0: none has
	at   time.Duration // when that was
	slow int           // spans in a row that were slow
}

// watchPace is told what was acknowledged, and turns batches on where the server is slow.
func (p *Publisher) watchPace(acked uint64) {
	if p.batch.allowed == nil || p.batch.on {
		return
	}
	w, at := &p.batch.pace, time.Duration(p.ackedAt.Load())
	switch {
	case w.from == 0:
	case acked < w.from+paceSpan:
		return
	default:
		each := (at - w.at) / time.Duration(acked-w.from)
		if w.slow++; each < slowPace {
			w.slow = 0
		}
		if w.slow == slowSpans {
			p.batch.on = true
			p.conn.cfg.Logger.Info("the server syncs each message: they go in atomic batches from now on", slog.Duration("each", each))
			return
		}
	}
	if w.from = 0; p.written >= acked+paceSpan {
		w.from, w.at = acked, at
	}
}
