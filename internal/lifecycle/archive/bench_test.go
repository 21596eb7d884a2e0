package archive

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/outbox"
)

// recorded are the messages of a recorded editing session, over and over, with headers as Outflow's.
func recorded(b *testing.B) func(seq uint64) *Message {
	b.Helper()
	ops, err := recording.Load(recording.FriendsForever)
	must.Succeed(b, err)
	return func(seq uint64) *Message {
		op := ops[seq%uint64(len(ops))]
		h := outbox.Header{Pos: outbox.Position{LSN: outbox.LSN(1<<32 + 200*seq)}, Of: 1,
			Due: outbox.LSN(1<<32 + 200*seq), Timeline: 1, Key: fmt.Sprintf("%s:%020d", op.Actor, op.Counter)}
		return &Message{Seq: seq, Time: made.Add(time.Duration(1_234_567 * seq)),
			Subject: "outbox." + op.Doc, Data: op.Payload,
			Header: nats.Header{outbox.HeaderName: {string(h.Append(nil))},
				"Nats-Expected-Last-Sequence": {fmt.Sprint(seq - 1)}}}
	}
}

const benchMessages = 100_000

func segmentOf(b *testing.B, next func(uint64) *Message) *Segment {
	b.Helper()
	s, err := newSegment(Manifest{Version: version, Stream: "S", Created: made, First: 1})
	must.Succeed(b, err)
	for seq := uint64(1); seq <= benchMessages; seq++ {
		must.Succeed(b, s.Add(next(seq)))
	}
	return s
}

// BenchmarkArchive makes a segment: events/s of one core, and the size against that of the lines.
func BenchmarkArchive(b *testing.B) {
	next := recorded(b)
	for b.Loop() {
		m, _, err := segmentOf(b, next).finish()
		must.Succeed(b, err)
		b.ReportMetric(100*float64(m.Bytes)/float64(m.Raw), "%size")
	}
	b.ReportMetric(benchMessages*float64(b.N)/b.Elapsed().Seconds(), "events/s")
}

// BenchmarkVerify reads a segment back.
func BenchmarkVerify(b *testing.B) {
	m, object, err := segmentOf(b, recorded(b)).finish()
	must.Succeed(b, err)
	for b.Loop() {
		must.Succeed(b, readObject(b.Context(), object, m, func(*Message, Hash) error { return nil }))
	}
	b.ReportMetric(benchMessages*float64(b.N)/b.Elapsed().Seconds(), "events/s")
}
