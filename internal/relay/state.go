package relay

import (
	"math"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// ServerState is what PostgreSQL says of itself at a moment.
type ServerState struct {
	SystemID         string // system identifier
	Database         string
	Version          int // server_version_num, e.g. 150018
	History          History
	WALEnd           outbox.LSN // the end of WAL (current write position; on a standby the last replayed)
	InRecovery       bool       // a standby
	WALSenderTimeout time.Duration
}

// SlotState is a row of pg_replication_slots. The zero value means that there is no such slot.
type SlotState struct {
	Exists       bool
	Plugin       string
	Database     string
	Active       bool
	ActivePID    int        // of the walsender that holds it, 0 if none
	Holder       string     // application_name and address of the holder, for messages
	Confirmed    outbox.LSN // confirmed_flush_lsn
	Restart      outbox.LSN // restart_lsn, 0 if NULL
	WALStatus    string     // reserved, extended, unreserved, lost
	Invalidation string     // why it was invalidated, "" if it was not
	SafeWALSize  int64      // bytes until it is in danger of loss, -1 if unlimited or unknown
}

// PublicationIdentity is what is published: which table, and by which rows of the catalog. Each change that
// hides rows from the stream of changes for a while leaves another identity, whatever became of it since;
// what leaves the same one hides none. It is comparable with ==.
type PublicationIdentity struct {
	OID uint32 `json:"oid"` // of the row in pg_publication
	// its flags (insert, update, through the root) have been the same since
	Xmin uint32 `json:"xmin"`
	// of the row in pg_publication_rel that puts the table into it; 0 for FOR ALL TABLES
	RelOID  uint32 `json:"rel_oid"`
	RelXmin uint32 `json:"rel_xmin"` // its filter and its columns have been the same since
	// of the row in pg_publication_namespace, where a whole schema is published
	SchemaOID  uint32 `json:"schema_oid,omitempty"`
	SchemaXmin uint32 `json:"schema_xmin,omitempty"`

	// 0 in the record of an older outflow, and where there is no table
	TableOID uint32 `json:"table_oid,omitempty"`
	// Path is the xmin of each row that stands between the table and what is published: of pg_inherits, where
	// that is a table above it, and of pg_depend, where it is the schema. A table that was taken out of
	// either for a while has another one.
	Path string `json:"path,omitempty"`
	// Rewritten stands for the leaf partitions whose file is not the one that they were made with, and for
	// these files; "" if there is none. VACUUM FULL and TRUNCATE change it, and so do SET UNLOGGED and SET
	// LOGGED: it shows that rows may have been hidden, not that they were.
	Rewritten string `json:"rewritten,omitempty"`
	// Subscription is the one that brings a home's rows, with the xmin of what it says of the outbox and of
	// the control table; "" where this server is the home.
	Subscription string `json:"subscription,omitempty"`

	// Hidden says why rows that are written now do not reach the stream of changes; nil if they do.
	Hidden *outbox.Fault `json:"-"`
}

// Stored is a message that was read from the stream.
type Stored struct {
	Seq    uint64
	Header *outbox.Header // nil: it has none of ours
	Cut    *outbox.Cut    // nil: it is not a cut
	Time   time.Time      // when the broker stored it, by its clock
}

// StreamState is what JetStream says of the stream at a moment, through its leader.
type StreamState struct {
	Exists     bool
	Created    time.Time
	LastSeq    uint64         // of the last message ever stored, 0 if none was
	LastTime   time.Time      // when that was, by the broker's clock
	FirstSeq   uint64         // of the oldest message that is left; of an empty stream that of the next one
	Messages   uint64         // how many there are
	NewestSeq  uint64         // sequence of the newest message that can be read, 0 if none can
	Newest     *outbox.Header // its header; nil if there is no message or it has none of ours
	Cut        *outbox.Cut    // what it is, if it is a cut
	Replicated bool           // more than one replica; if there is no stream: it may have had them
	Open       string         // what of its configuration lets others' messages in; "": nothing
	Restoring  string         // what it is being restored from; "": it is whole
	Restored   string         // the folder of the archive that it was restored from; "": it was not
	Now        time.Time      // the broker's clock when it was asked; zero where it does not say
	// Erased are the sequences whose messages were erased, as the stream's metadata say: nobody lost them.
	Erased outbox.Sequences
	// durable consumers at the newest message or beyond: after a loss, those that may have had more
	Durables []string
}

// ErasedBehind are the sequences behind the stream's end that it says were erased: the broker has lost that
// end since, and other messages come under them.
func (s *StreamState) ErasedBehind() outbox.Sequences {
	return s.Erased.Within(s.LastSeq+1, math.MaxUint64)
}

// CodeSlotInUse is the code of the transient fault that says that another session holds the slot: that makes
// this one a standby.
const CodeSlotInUse = "slot_in_use"

// CodeStreamMoved is the code of the transient fault that says that the stream changed while its end was
// read.
const CodeStreamMoved = "stream_moved"
