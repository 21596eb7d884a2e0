package catalog

import (
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Config names the server that holds the outbox, and what is there.
type Config struct {
	URL         string // connection URL or keyword string; "": libpq's PG* environment
	Slot        string
	Command     string // what connects in place of outflow run, as of [postgres.Target]
	Publication string
	// schema.name, or name for one of public; a part in double quotes may hold dots. "": events are logical
	// messages, there is no table
	Table   string
	Shard   relay.Shard // the part of the table that is published
	ShardBy string      // the column that decides to which part a row belongs: the document's

	// the control table, like Table; "": ticks and changes of settings are logical messages
	Control      string
	Subscription string // the one whose transactions are read; "": those that were written here

	// Cluster is the cluster.id where several clusters write into the control table: each replaces its own
	// rows there. 0: there is one writer, and a row replaces each one before it.
	Cluster int
	// Clusters names, by its cluster.id, the subscription that brings the rows of each other cluster, where
	// they publish for one another: Subscription is one of them, if there is one. nil: they do not.
	Clusters map[int]string
}

// Target is where the configuration says that connections go.
func (c *Config) Target() postgres.Target {
	return postgres.Target{URL: c.URL, Slot: c.Slot, Command: c.Command}
}
