package sink

// The limits of what is in flight, and of what goes without an acknowledgement of its own.
const (
	MaxInFlight      = 2000
	MaxInFlightBytes = 8 << 20
	ackEvery         = 50
	ackEveryBytes    = 256 << 10
)

// inflight counts what was sent and is not acknowledged, and decides which messages ask for an
// acknowledgement. Callers ask fits before they send a message and needsReply for its reply subject, call add
// when they send it, and settle whenever an acknowledgement came: that of one message settles everything up
// to it. It belongs to the publisher's goroutine.
type inflight struct {
	acked, sent uint64 // sequences: the last acknowledged, the last sent
	bytes       int    // of sent and not acknowledged
	sinceReply  int    // bytes sent since the last message with a reply subject
	// messages since then; begins just below the limit, so that the first message asks
	countSince int
	pending    []pendingAck // messages with a reply subject that are not acknowledged, ascending
}

// pendingAck is a message that has asked for an acknowledgement.
type pendingAck struct {
	seq   uint64
	bytes int // of the messages since the pendingAck before it, including its own
}

// needsReply reports whether the next message, of the given size, must carry a reply subject whatever follows
// it.
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

// settle takes out what an acknowledgement of seq proves.
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

// fits reports whether so many more bytes may be sent (the number of messages is checked by
// [Publisher.Full]). A message above the limit goes alone.
func (f *inflight) fits(size int) bool {
	return f.bytes == 0 || f.bytes+size <= MaxInFlightBytes
}
