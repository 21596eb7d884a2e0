package checkpoint

import (
	"context"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
)

// Readings are everything that a start decides from, in the order in which [Reader.Read] reads them.
type Readings struct {
	Slot        relay.SlotState
	Record      *Record // nil: there is none
	Revision    uint64  // of the record, or of its deletion; 0: there never was one
	Stream      relay.StreamState
	Server      relay.ServerState
	Publication relay.PublicationIdentity
	Asked       time.Time // before anything was read
	Now         time.Time // when the server had answered
}

// Reader says how each of the readings is made. All fields but Publication are required.
//
// A command whose layout follows the record, or that goes on although the record is corrupt, does so in its
// Record function: whatever is read later may depend on it then.
type Reader struct {
	Slot   func(context.Context) (relay.SlotState, error)
	Record func(context.Context) (rec *Record, revision uint64, err error) // as Store.Load does
	Stream func(context.Context) (relay.StreamState, error)
	Server func(context.Context) (relay.ServerState, error)
	// Publication is called where there is a slot, or a record of one: with neither, that is what has to be
	// said, not that there is no publication. nil: the caller sets Readings.Publication.
	Publication func(context.Context) (relay.PublicationIdentity, error)
}

// Read reads everything, in the one order in which an outflow that is running meanwhile can't make the
// readings look like a loss. It stores messages, then the record, then it confirms to the slot; so slot,
// record and stream are read in the opposite order: at least what the record says is in the stream, and at
// least what the slot says is in the record. The end of the server's WAL only grows and is read after all
// that is compared with it.
//
// An error is that of the first reading that failed.
func (r *Reader) Read(ctx context.Context) (got Readings, err error) {
	got.Asked = time.Now()
	if got.Slot, err = r.Slot(ctx); err != nil {
		return got, err
	}
	if got.Record, got.Revision, err = r.Record(ctx); err != nil {
		return got, err
	}
	if got.Stream, err = r.Stream(ctx); err != nil {
		return got, err
	}
	if got.Server, err = r.Server(ctx); err != nil {
		return got, err
	}
	got.Now = time.Now()
	installed := got.Slot.Exists || got.Record != nil && got.Record.Uninstalled(got.Stream) == 0
	if r.Publication != nil && installed {
		got.Publication, err = r.Publication(ctx)
	}
	return got, err
}

// RecheckAfter is how long after readings that show a loss others are made, on new connections. The loss
// counts only when these agree: a server that is just starting, or a follower that lags, must not be believed
// at once.
func (r *Readings) RecheckAfter() time.Duration {
	if r.Stream.Replicated {
		return 15 * time.Second
	}
	return 5 * time.Second
}
