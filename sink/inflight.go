package sink

// The limits of what is in flight, and of what goes without an acknowledgement of its own.
const (
	maxInFlight      = 2000
	maxInFlightBytes = 8 << 20
	ackEvery         = 50
	ackEveryBytes    = 256 << 10
)

// inflight counts what was sent and is not acknowledged. Which messages carry a reply subject is decided here; an acknowledgement
// of one settles everything up to it.
type inflight struct {
	acked, sent uint64       // sequences: the last acknowledged, the last sent
	bytes       int          // of sent and not acknowledged
	sinceReply  int          // bytes sent since the last message with a reply, and
	countSince  int          // messages; at the start as if it were time, so that a refusal of the first one tells its cause
	pending     []pendingAck // messages with a reply that are not acknowledged, ascending
}

// due is a message whose acknowledgement is due.
type pendingAck struct {
	seq   uint64
	bytes int // of the messages since the due before it, with its own
}

// needsReply reports whether the next message, of the given size, carries a reply subject whatever follows it.
func (f *inflight) needsReply(size int) bool {
	return f.countSince+1 >= ackEvery || f.sinceReply+size >= ackEveryBytes
}

// add counts a message that is being sent.
func (f *inflight) add(seq uint64, size int, reply bool) {
	f.sent = seq
	f.bytes += size
	f.sinceReply += size
	f.countSince++
	if reply {
		f.pending = append(f.pending, pendingAck{seq, f.sinceReply})
		f.sinceReply, f.countSince = 0, 0
	}
}

// settle takes out what is proved by an acknowledgement of seq.
func (f *inflight) settle(seq uint64) {
	n := 0
	for n < len(f.pending) && f.pending[n].seq <= seq {
		f.bytes -= f.pending[n].bytes
		n++
	}
	if n > 0 {
		f.acked = f.pending[n-1].seq
		f.pending = append(f.pending[:0], f.pending[n:]...) // 40 of them at the most
	}
}

// messages is how many are in flight.
func (f *inflight) messages() int { return int(f.sent - f.acked) }

// fits reports whether so many bytes may be sent; how many messages may be, Full says. What is larger than the limit goes alone.
func (f *inflight) fits(size int) bool {
	return f.bytes == 0 || f.bytes+size <= maxInFlightBytes
}
