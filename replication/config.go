package replication

import (
	"errors"
	"log/slog"

	"github.com/outflowhq/outflow/replication/catalog"
)

// Config says which server, slot, publication and table, and how they are read.
type Config struct {
	catalog.Config
	WriteURL string // for heartbeats and changes of settings; "": URL
	// no transactions that were replicated from elsewhere. PostgreSQL 14 and 15 send them all the same, with
	// their origin, and so does any with Clusters: what a cluster says to the others is among them
	OwnOnly bool
	Logger  *slog.Logger
}

func (c Config) logger() *slog.Logger {
	if c.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return c.Logger.With("component", "replication")
}

// What callers branch on.
var (
	// ErrSlotInUse says that another connection holds the slot: wait, watch [Session.Slot], and call Start
	// again.
	ErrSlotInUse = errors.New("the replication slot is in use")
	// ErrClosed says that the session was ended from our side, by Stop or Close.
	ErrClosed = errors.New("the replication session is closed")
	// ErrLate says that a row was not written, because the time until which it had to be was over.
	ErrLate = errors.New("it was too late to write the row")
)
