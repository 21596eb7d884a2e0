package catalog

import (
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Config names the server that holds the outbox, and what is there.
type Config struct {
	URL         string // connection URL or keyword string; "": libpq's PG* environment
	Slot        string
	Publication string
	// schema.name, or name for one of public; a part in double quotes may hold dots. "": events are logical
	// messages, there is no table
	Table   string
	Shard   relay.Shard // the part of the table that is published
	ShardBy string      // the column that decides to which part a row belongs: the document's

	// the control table, like Table; "": ticks and changes of settings are logical messages
	Control      string
	Subscription string // the one whose transactions are read; "": those that were written here
}

// Target is where the configuration says that connections go.
func (c *Config) Target() postgres.Target { return postgres.Target{URL: c.URL, Slot: c.Slot} }
