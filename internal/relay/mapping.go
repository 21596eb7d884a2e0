package relay

import (
	"fmt"

	"github.com/outflowhq/outflow/outbox"
)

// Source says what of the WAL is an event. The zero value is the table: so a record from before there was a
// choice says it.
type Source string

// The sources.
const (
	FromTable Source = "" // inserts into the outbox table
	// transactional logical messages with the prefix EventPrefix; there is no table
	FromMessage Source = "message"
	FromBoth    Source = "both" // either, in the order of the WAL
)

// ParseSource reads "table", "message" or "both".
func ParseSource(s string) (Source, error) {
	switch s {
	case "table":
		return FromTable, nil
	case string(FromMessage), string(FromBoth):
		return Source(s), nil
	}
	return "", fmt.Errorf("source %q: want table, message or both", s)
}

// String is what ParseSource reads.
func (s Source) String() string {
	if s == FromTable {
		return "table"
	}
	return string(s)
}

// Rows reports whether inserts into the table are events.
func (s Source) Rows() bool { return s != FromMessage }

// Messages reports whether logical messages are events.
func (s Source) Messages() bool { return s == FromMessage || s == FromBoth }

// Mapping says where events come from, and which columns of the outbox table have the roles that decide the
// order and the content. It is settled by init and kept in the checkpoint record. An empty column name means
// that there is none.
//
// A logical message names its values by the roles themselves. Without a table the mapping has the roles' own
// names, and says only whether events have a key.
type Mapping struct {
	Source  Source `json:"source,omitempty"`
	Table   string `json:"table"` // schema.name; "" if there is none
	Shard   Shard  `json:"shard,omitzero"`
	Doc     string `json:"doc_id"`
	Actor   string `json:"actor_id,omitempty"`
	Counter string `json:"counter,omitempty"`
	Span    string `json:"span,omitempty"`
	Key     string `json:"seq_key,omitempty"`
	Payload string `json:"payload"`

	// OwnOnly: a transaction that was replicated from elsewhere, one with a replication origin, is no input.
	// A record from before there was a choice says false, which is what was done.
	OwnOnly bool `json:"own_only,omitempty"`

	// Control is the table, schema.name, whose rows are ticks and changes of settings, in place of logical
	// messages, which are not replicated; "": logical messages are.
	Control string `json:"control,omitempty"`
	// Subscription names the one whose transactions are inputs, with the position and the time that they had
	// at home, and no others; "": this server is the home.
	Subscription string `json:"subscription,omitempty"`
	// Cluster is the cluster.id of whoever publishes this, where clusters that share nothing publish for one
	// another; 0: they don't.
	Cluster int `json:"cluster,omitempty"`
}

// Away reports whether a home's rows are read on another server.
func (m Mapping) Away() bool { return m.Subscription != "" }

// Keyed reports whether events have a seq_key: a column of their own, or actor and counter to make it from.
func (m Mapping) Keyed() bool { return m.Key != "" || m.Actor != "" && m.Counter != "" }

// Origin names what events come from, for people.
func (m Mapping) Origin() string {
	if !m.Shard.Whole() {
		return "shard " + m.Shard.String() + " of " + m.Table
	}
	switch m.Source {
	case FromMessage:
		return "logical messages (" + outbox.EventPrefix + ")"
	case FromBoth:
		return m.Table + " and logical messages (" + outbox.EventPrefix + ")"
	}
	return m.Table
}
