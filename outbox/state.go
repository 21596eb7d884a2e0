package outbox

import "time"

// ServerState is what PostgreSQL says of itself at a moment.
type ServerState struct {
	SystemID         string // system identifier
	Database         string
	Version          int // server_version_num, e.g. 150018
	History          History
	WALEnd           LSN  // the end of WAL (current write position; on a standby the last replayed)
	InRecovery       bool // a standby
	WALSenderTimeout time.Duration
}

// SlotState is a row of pg_replication_slots. The zero value means that there is no such slot.
type SlotState struct {
	Exists       bool
	Plugin       string
	Database     string
	Active       bool
	ActivePID    int    // of the walsender that holds it, 0 if none
	Holder       string // application_name and address of the holder, for messages
	Confirmed    LSN    // confirmed_flush_lsn
	Restart      LSN    // restart_lsn, 0 if NULL
	WALStatus    string // reserved, extended, unreserved, lost
	Invalidation string // why it was invalidated, "" if it was not
	SafeWALSize  int64  // bytes until it is in danger of loss, -1 if unlimited or unknown
}

// PublicationIdentity tells a publication, and the table's membership in it, from others of the same name: rows that are written
// while the table is out of the publication are never decoded.
type PublicationIdentity struct {
	OID        uint32 `json:"oid"`                  // of the row in pg_publication
	Xmin       uint32 `json:"xmin"`                 //
	RelOID     uint32 `json:"rel_oid"`              // of the row in pg_publication_rel that puts the table into it; 0 for FOR ALL TABLES
	RelXmin    uint32 `json:"rel_xmin"`             //
	SchemaOID  uint32 `json:"schema_oid,omitempty"` // of the row in pg_publication_namespace, where a whole schema is published
	SchemaXmin uint32 `json:"schema_xmin,omitempty"`
}

// Stored is a message that was read from the stream.
type Stored struct {
	Seq    uint64
	Header *Header // nil: it has none of ours
}

// StreamState is what JetStream says of the stream at a moment, through its leader.
type StreamState struct {
	Exists     bool
	Created    time.Time
	LastSeq    uint64    // of the last message ever stored, 0 if none was
	Messages   uint64    // how many there are
	NewestSeq  uint64    // sequence of the newest message that can be read, 0 if none can
	Newest     *Header   // its header; nil if there is no message or it has none of ours
	Replicated bool      // more than one replica
	Now        time.Time // the broker's clock when it was asked; zero where it does not say
	Durables   []string  // durable consumers at the newest message or beyond: after a loss, those that may have had more
}
