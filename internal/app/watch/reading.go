// Package watch reads how PostgreSQL, the slot, NATS, the stream and its consumers are, over connections of
// its own: also while nothing is published, and on a standby.
package watch

import (
	"time"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// Reading is what was last read of each part. A part that could not be read keeps its old figures, with the
// time at which they were read, and says why.
type Reading struct {
	Postgres  Postgres   `json:"postgres"`
	Slot      Slot       `json:"slot"`
	Instances []Instance `json:"instances,omitempty"` // sorted by name, read with the slot
	// logical slots of the database by which others keep its WAL, those that keep most first, read with the
	// slot; only with cluster.id
	Subscribers []Subscriber `json:"subscribers,omitempty"`
	NATS        NATS         `json:"nats"`
	Stream      Stream       `json:"stream"`
	Consumers   []Consumer   `json:"consumers,omitempty"` // durable ones of the stream, sorted by name

	// How fresh Consumers is: it is read less often than the rest, and takes a right that is optional.
	ConsumerList     Read `json:"consumer_list"`
	ConsumersLeftOut int  `json:"consumers_left_out,omitempty"` // that Consumers does not have

	// Read as seldom as the consumers. Where they can't be read all the rest is as it is.
	Partitions  Partitions  `json:"partitions"`
	Maintenance Maintenance `json:"maintenance"`
}

// Read says how fresh the figures of a part are.
type Read struct {
	At    time.Time `json:"read_at,omitzero"` // when the figures were read; zero: never
	Error string    `json:"error,omitempty"`  // why the last attempt failed; "" if it did not
	// since when attempts fail; zero if the last one did not
	FailingSince time.Time `json:"failing_since,omitzero"`
}

// Postgres is the server that the slot belongs to.
type Postgres struct {
	Read
	Host      string        `json:"host"`               // as connected, host:port/database
	Version   string        `json:"version"`            // for example "17.10"
	Standby   bool          `json:"standby"`            // in recovery
	RoundTrip time.Duration `json:"round_trip"`         // of the last reading, nanoseconds
	WALEnd    outbox.LSN    `json:"wal_end"`            // end of the WAL that is written
	WALRate   float64       `json:"wal_bytes_a_second"` // over the last minutes; 0: not known yet
	// of this connection; none without TLS
	Certificates []Certificate `json:"certificates,omitempty"`
}

// Slot is the replication slot.
type Slot struct {
	Read
	Exists bool `json:"exists"`
	Active bool `json:"active"`
	PID    int  `json:"pid,omitempty"` // the server process that holds it
	// its application_name and address; "" if the role may not see them
	Holder    string     `json:"holder,omitempty"`
	Restart   outbox.LSN `json:"restart"`
	Confirmed outbox.LSN `json:"confirmed"`
	Retained  uint64     `json:"retained_bytes"` // from Restart to the end of WAL; 0 of a slot that is lost
	WALStatus string     `json:"wal_status"`     // reserved, extended, unreserved, lost
	// Bytes of WAL until the slot is in danger; nil: max_slot_wal_keep_size sets no limit.
	Safe         *int64 `json:"safe_wal_bytes,omitempty"`
	Invalidation string `json:"invalidation,omitempty"`
	// the code at which an outflow run waits instead of publishing, as it tells PostgreSQL; "": none says so
	WaitsAt string `json:"waits_at,omitempty"`
}

// Instance is a process of outflow for this slot that is connected to PostgreSQL. Those of one host are one.
type Instance struct {
	Name  string    `json:"name"` // its application_name and address, as of [Slot].Holder
	Since time.Time `json:"connected_since"`
	Own   bool      `json:"own,omitempty"` // of the host that reads this
}

// Subscriber is a slot of pgoutput that is not this Outflow's: of another cluster's subscription as a rule.
type Subscriber struct {
	Slot     string `json:"slot"`
	Active   bool   `json:"active"`
	Retained int64  `json:"retained_bytes"`
	Lost     bool   `json:"lost,omitempty"` // PostgreSQL has removed WAL that it needed
}

// NATS is the server that the pipeline publishes to.
type NATS struct {
	Read
	// of this connection; none without TLS
	Certificates []Certificate `json:"certificates,omitempty"`

	Server    string        `json:"server"` // name and address of the one that answered
	Version   string        `json:"version"`
	RoundTrip time.Duration `json:"round_trip"`

	Storage      uint64 `json:"storage_bytes"`       // of the account
	StorageLimit uint64 `json:"storage_limit_bytes"` // 0: none
}

// Stream is the stream that is published to.
type Stream struct {
	Read
	Exists   bool   `json:"exists"`
	Messages uint64 `json:"messages"`
	Bytes    uint64 `json:"bytes"`
	MaxBytes uint64 `json:"max_bytes"` // 0: no limit
	// it refuses messages when it is full; else it removes its oldest ones then
	Refuses  bool      `json:"refuses_when_full,omitempty"`
	FirstSeq uint64    `json:"first_sequence"`
	LastSeq  uint64    `json:"last_sequence"`
	LastTime time.Time `json:"last_time,omitzero"` // when the newest message was stored, by NATS's clock
	Leader   string    `json:"leader,omitempty"`
	Replicas []Replica `json:"replicas,omitempty"` // beside the leader
}

// Replica is a follower of the stream.
type Replica = jsapi.Replica

// Consumer is a durable consumer of the stream, as JetStream knows it, or one of package consumer whose
// instances read the stream each by itself: as much of it as they have read.
type Consumer struct {
	Name        string    `json:"name"`
	Readers     int       `json:"readers,omitempty"` // instances that read; 0: it is a durable
	Pending     uint64    `json:"pending"`           // messages that it has not been given yet
	AckPending  int       `json:"ack_pending"`       // given and not acknowledged
	Redelivered int       `json:"redelivered"`
	Waiting     int       `json:"waiting"` // pull requests that wait: somebody reads
	AckFloor    uint64    `json:"ack_floor"`
	LastAck     time.Time `json:"last_ack,omitzero"`
	Paused      bool      `json:"paused,omitempty"`
}
