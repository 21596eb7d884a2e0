package outbox

// Batch is what one read of the replication connection brought: complete messages, in order. Its bytes belong to the connection's
// buffer until Release.
type Batch struct {
	Messages []WALMessage
	Free     func(*Batch) // takes the buffer back; nil: nothing to do
}

// WALMessage is a message of the replication stream: a pgoutput message or a keepalive.
type WALMessage struct {
	Data   []byte // one pgoutput message; nil for a keepalive
	WALEnd LSN    // for a keepalive: everything below has been sent before it
}

// Keepalive reports whether the message is a keepalive.
func (m *WALMessage) Keepalive() bool { return m.Data == nil }

// Release gives the buffer back. The messages' bytes must not be used afterwards.
func (b *Batch) Release() {
	if b.Free != nil {
		b.Free(b)
	}
}
