package erasure

import (
	"time"

	"github.com/nats-io/nats.go"
)

// Parked is an event that a consumer has parked.
type Parked struct {
	Stream   string    // that the consumer reads
	Created  time.Time // when that was made; zero: not known
	Sequence uint64    // in it; 0: not known, because it was replayed
	Subject  string
	Header   nats.Header
	Data     []byte // of dead letters only
}

// FoundParked is what was found of parked events in the databases of consumers.
type FoundParked struct {
	Events int64    // that went, or would go
	Seen   []string // the databases
	Unseen []string // what could not be looked into, and why
}
