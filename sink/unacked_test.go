package sink

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/tier"
)

// A message is held from when it was added until a later one is acknowledged.
func TestAMessageIsHeldUntilALaterOneIsAcknowledged(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(1, 2))
	const start = 4711
	k := newUnacked(start)
	made := func(seq uint64) message {
		n := []int{0, 1, 300, 5000, chunkSize, 3 * chunkSize}[seq*2654435761>>7%6]
		return message{
			seq: seq, subject: fmt.Appendf(nil, "_outflow.x.d%d", seq),
			header: fmt.Appendf(nil, "NATS/1.0\r\nX: %d\r\n\r\n", seq),
			data:   bytes.Repeat([]byte{byte(seq)}, n),
		}
	}
	acked, sent := uint64(start), uint64(start)
	rounds := 100
	if tier.Long() {
		rounds = 4000
	}
	for range rounds {
		for range rnd.IntN(40) {
			if sent-acked < MaxInFlight {
				sent++
				m := made(sent)
				k.add(&m)
				clear(m.subject) // they are used again
				clear(m.data)
			}
		}
		if rnd.IntN(3) == 0 {
			acked += uint64(rnd.Int64N(int64(sent - acked + 1)))
			k.drop(acked)
		}
		for _, seq := range []uint64{acked, acked + 1, sent, acked + (sent-acked)/2} {
			m, ok := k.at(seq)
			if want := seq > start && seq <= sent; ok != want {
				t.Fatalf("%d is held: %t; %d is acknowledged, %d sent", seq, ok, acked, sent)
			}
			if ok {
				if w := made(seq); m.seq != seq || !bytes.Equal(m.subject, w.subject) ||
					!bytes.Equal(m.header, w.header) || !bytes.Equal(m.data, w.data) {
					t.Fatalf("message %d is %q %q and %d bytes", seq, m.subject, m.header, len(m.data))
				}
			}
		}
		for _, seq := range []uint64{acked - 1, sent + 1} {
			if _, ok := k.at(seq); ok {
				t.Fatalf("%d is held; %d is acknowledged, %d sent", seq, acked, sent)
			}
		}
	}
}

// Adding costs no allocation. Once everything is acknowledged next to nothing is held, also after large
// messages.
func TestHoldingMessagesAllocatesNothing(t *testing.T) {
	k := newUnacked(0)
	seq := uint64(0)
	m := message{subject: make([]byte, 50), header: make([]byte, 200), data: make([]byte, 250)}
	round := func() {
		for range 1000 {
			seq++
			m.seq = seq
			k.add(&m)
		}
		k.drop(seq)
	}
	round()
	if n := testing.AllocsPerRun(100, round); n > 0 {
		t.Errorf("%v allocations for 1000 messages", n)
	}
	m.data = make([]byte, 1<<20)
	for range 8 {
		seq++
		m.seq = seq
		k.add(&m)
	}
	m.data = nil
	round()
	held := 0
	for _, c := range k.chunks {
		held += cap(c.buf)
	}
	for _, s := range k.slots {
		held += cap(s.bytes)
	}
	for _, b := range k.free {
		held += cap(b)
	}
	if limit := (maxFreeChunks + 2) * chunkSize; held > limit {
		t.Errorf("%d bytes are held, at most %d", held, limit)
	}
}
