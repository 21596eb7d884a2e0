package archive

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/outbox"
)

// recorded are the messages of a recorded editing session, over and over, with headers as Outflow's, of
// transactions of twelve rows.
func recorded(tb testing.TB) func(seq uint64) *Message {
	tb.Helper()
	ops, err := recording.Load(recording.FriendsForever)
	must.Succeed(tb, err)
	random := rand.NewChaCha8([32]byte{17})
	rnd := rand.New(random)
	lsn, at := outbox.LSN(1<<32), made
	return func(seq uint64) *Message {
		op, i := ops[seq%uint64(len(ops))], int(seq%12)
		if i == 0 {
			lsn += 1024 + 8*outbox.LSN(rnd.IntN(1024))
			at = at.Add(time.Duration(rnd.Int64N(1_000_000)))
		}
		at = at.Add(time.Duration(1000 + rnd.Int64N(5000)))
		id, err := uuid.NewRandomFromReader(random)
		must.Succeed(tb, err)
		h := outbox.Header{Pos: outbox.Position{LSN: lsn, Index: uint32(i)}, N: i, Of: 12, Due: lsn,
			Thru: lsn, Timeline: 1, ID: id.String(), Key: fmt.Sprintf("%s:%020d", op.Actor, op.Counter)}
		return &Message{Seq: seq, Time: at, Subject: "outbox." + op.Doc, Data: op.Payload,
			Header: nats.Header{outbox.HeaderName: {string(h.Append(nil))},
				"Nats-Expected-Last-Sequence": {fmt.Sprint(seq - 1)}}}
	}
}

// stored is how many bytes a message has in a file of the stream.
func stored(m *Message) int {
	const record, headerSize, framing = 30, 4, len("NATS/1.0\r\n\r\n")
	return record + headerSize + framing + len(m.Subject) + len(headerBlock(m.Header)) + len(m.Data)
}

// messagesOf makes messages, and says how many bytes they have in the stream.
func messagesOf(tb testing.TB, n int) (all []*Message, inStream int) {
	tb.Helper()
	next := recorded(tb)
	for seq := uint64(1); seq <= uint64(n); seq++ {
		msg := next(seq)
		all, inStream = append(all, msg), inStream+stored(msg)
	}
	return all, inStream
}

// segmentOf makes a segment.
func segmentOf(tb testing.TB, version int, all []*Message) (m *Manifest, object []byte) {
	tb.Helper()
	s, err := newSegment(Manifest{Version: version, Stream: "S", Created: made, First: 1})
	must.Succeed(tb, err)
	for _, msg := range all {
		must.Succeed(tb, s.Add(msg))
	}
	m, object, err = s.finish()
	must.Succeed(tb, err)
	return m, object
}

// TestASegmentHasAQuarterOfTheStreamsBytes, also of the shortest messages that there are.
func TestASegmentHasAQuarterOfTheStreamsBytes(t *testing.T) {
	t.Parallel()
	all, inStream := messagesOf(t, 5000)
	if _, object := segmentOf(t, version, all); 4*len(object) > inStream {
		t.Errorf("%d bytes of %d", len(object), inStream)
	}
}

// perCore reports events/s of one core: the machine may have others to work for.
func perCore(b *testing.B, run func()) {
	b.Helper()
	spent := func() time.Duration {
		var used syscall.Rusage
		must.Succeed(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
		return time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	before := spent()
	for b.Loop() {
		run()
	}
	b.ReportMetric(benchMessages*float64(b.N)/(spent()-before).Seconds(), "events/s")
}

const benchMessages = 20_000

// BenchmarkArchive makes a segment, as this version does and as version 1 did: events/s of one core, and its
// size against that of the messages in the stream.
func BenchmarkArchive(b *testing.B) {
	all, inStream := messagesOf(b, benchMessages)
	for v := 1; v <= version; v++ {
		b.Run(fmt.Sprint("version ", v), func(b *testing.B) {
			perCore(b, func() {
				_, object := segmentOf(b, v, all)
				b.ReportMetric(100*float64(len(object))/float64(inStream), "%size")
			})
		})
	}
}

// BenchmarkVerify reads a segment back.
func BenchmarkVerify(b *testing.B) {
	all, _ := messagesOf(b, benchMessages)
	for v := 1; v <= version; v++ {
		b.Run(fmt.Sprint("version ", v), func(b *testing.B) {
			m, object := segmentOf(b, v, all)
			perCore(b, func() {
				must.Succeed(b, readObject(b.Context(), object, m, func(*Message, Hash) error { return nil }))
			})
		})
	}
}
