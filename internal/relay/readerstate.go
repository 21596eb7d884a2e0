package relay

import "github.com/outflowhq/outflow/outbox"

// ReaderState is what a cluster that reads the rows of a home has read of it, and of what the others say of
// it, up to a point of its own WAL, as a record keeps it: what package internal/claim goes on from.
type ReaderState struct {
	At       outbox.LSN `json:"at"`       // all rows up to there were read, and none beyond
	Timeline uint32     `json:"timeline"` // that At lies on

	First   outbox.LSN `json:"first,omitempty"`   // the home's first commit that was read here
	Newest  outbox.LSN `json:"newest"`            // the home's newest commit with events
	Settled outbox.LSN `json:"settled"`           // up to there its commits are published by it, or claimed
	Hello   uint64     `json:"hello,omitempty"`   // its newest one; 0: it has said none
	Yielded bool       `json:"yielded,omitempty"` // since then
	Echoes  []uint64   `json:"echoes,omitempty"`  // the newest ones, by cluster.id from 1
}

// Claimed are commits of a home that a cluster publishes for it: those that end above From and up to To.
// Whatever is open at To is closed there.
type Claimed struct {
	From outbox.LSN `json:"from"`
	To   outbox.LSN `json:"to"`
}

// Covers reports whether the cluster publishes a commit.
func (c Claimed) Covers(lsn outbox.LSN) bool { return lsn > c.From && lsn <= c.To }
