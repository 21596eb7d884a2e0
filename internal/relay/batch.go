package relay

import "github.com/outflowhq/outflow/outbox"

// Batch is what one read of the replication connection brought: complete messages, in order. Its bytes belong
// to the connection's buffer until Release.
type Batch struct {
	Messages []WALMessage
	Free     func() // takes the buffer back; nil: nothing to do
}

// WALMessage is one thing that the server sent: a pgoutput message, or a keepalive.
type WALMessage struct {
	Keepalive bool
	// WALEnd is, of a keepalive, a marker: every transaction that ends at or below it came before, or was not
	// to come. It never goes back in a stream. Of a pgoutput message it is the LSN of the change; of a
	// Commit, the end LSN of the transaction.
	WALEnd outbox.LSN
	Data   []byte // the pgoutput message, nil for a keepalive; valid until the batch is released
}

// Release gives the buffer back. The messages' bytes must not be used afterwards.
func (b *Batch) Release() {
	if b.Free != nil {
		b.Free()
	}
}
