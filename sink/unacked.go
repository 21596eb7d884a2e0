package sink

import (
	"slices"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

const (
	unackedSlots  = 2048     // more than MaxInFlight and the acknowledged one
	chunkSize     = 64 << 10 // bytes; a larger message gets a chunk of its own
	maxFreeChunks = 16       // chunks that are kept for reuse
)

// unacked holds the messages that were sent and are not acknowledged, as they were encoded, and the newest
// acknowledged one. From it another connection learns how far the messages came, and sends the rest. How they
// were framed (reply subject, lines of a batch) is not part of it. It belongs to the publisher's goroutine;
// [Conn.Resume] hands it to the next publisher.
//
// The bytes lie in chunks, which are reused once everything in them is acknowledged. So a message costs no
// allocation, and the memory is what is in flight plus a chunk or two.
type unacked struct {
	slots       [unackedSlots]unackedMessage // by sequence
	first, next uint64                       // it has the messages from first up to, not including, next
	chunks      []chunk                      // in use, oldest first; the last one is being filled
	free        [][]byte
}

type unackedMessage struct {
	bytes           []byte // subject, header, data
	subject, header int    // their lengths
	expected        int    // where the expected sequence stands in the header
	expectedEnd     int    //
}

type chunk struct {
	buf  []byte
	last uint64 // the newest message in it
}

// newUnacked returns an empty one; the first message that is added must have the sequence last+1.
func newUnacked(last uint64) *unacked { return &unacked{first: last + 1, next: last + 1} }

// add copies a message, whose sequence must follow that of the one added before.
func (k *unacked) add(m *message) {
	c := k.room(m.size())
	start := len(c.buf)
	c.buf = append(c.buf, m.subject...)
	c.buf = append(c.buf, m.header...)
	c.buf = append(c.buf, m.data...)
	c.last = m.seq
	k.slots[m.seq%unackedSlots] = unackedMessage{c.buf[start:len(c.buf):len(c.buf)], len(m.subject),
		len(m.header), m.expected, m.expectedEnd}
	k.next = m.seq + 1
}

// room returns a chunk with room for n more bytes.
func (k *unacked) room(n int) *chunk {
	if i := len(k.chunks) - 1; i >= 0 && cap(k.chunks[i].buf)-len(k.chunks[i].buf) >= n {
		return &k.chunks[i]
	}
	var buf []byte
	if i := len(k.free) - 1; i >= 0 && n <= chunkSize {
		buf, k.free = k.free[i], k.free[:i]
	} else {
		buf = make([]byte, 0, max(n, chunkSize))
	}
	k.chunks = append(k.chunks, chunk{buf: buf})
	return &k.chunks[len(k.chunks)-1]
}

// drop forgets the messages before acked: an acknowledgement of acked proves them all.
func (k *unacked) drop(acked uint64) {
	for ; k.first < acked; k.first++ {
		k.slots[k.first%unackedSlots] = unackedMessage{}
	}
	n := 0
	for n < len(k.chunks)-1 && k.chunks[n].last < k.first {
		if b := k.chunks[n].buf; cap(b) == chunkSize && len(k.free) < maxFreeChunks {
			k.free = append(k.free, b[:0])
		}
		n++
	}
	k.chunks = slices.Delete(k.chunks, 0, n) // few: two for each 64 KiB in flight at the most
}

// at returns the message with a sequence; ok is false if it is not here. Its bytes are valid until the next
// drop.
func (k *unacked) at(seq uint64) (message, bool) {
	if seq < k.first || seq >= k.next {
		return message{}, false
	}
	s := &k.slots[seq%unackedSlots]
	body := s.subject + s.header
	return message{
		subject: s.bytes[:s.subject], header: s.bytes[s.subject:body], data: s.bytes[body:], seq: seq,
		expected: s.expected, expectedEnd: s.expectedEnd, rest: s.expected,
	}, true
}

// header returns our header of the message with a sequence, nil if it is not here.
func (k *unacked) header(seq uint64) *outbox.Header {
	m, _ := k.at(seq)
	return stream.HeaderOf(m.header)
}
