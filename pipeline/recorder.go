package pipeline

import (
	"context"
	"errors"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/outbox"
)

// recorder stores the record in a goroutine of its own. Before each storing the publication is read again: rows that were written
// while the table was out of it are not in the WAL data, so nothing may be recorded or confirmed then. It also reads how far the
// server is, for metrics: it owns the ordinary connection while the session runs.
type recorder struct {
	links    *Links
	record   *checkpoint.Record // the goroutine's while busy, else the loop's
	revision uint64             // likewise

	requests chan *checkpoint.Snapshot // nil: read the server's state
	done     chan recorded
	cancel   context.CancelFunc
	stopped  chan struct{}

	busy    bool      // a request is under way
	watched time.Time // when the server's state was
}

// recorded is the answer to a request.
type recorded struct {
	snapshot *checkpoint.Snapshot // what was stored; nil: the server's state was read
	end      outbox.LSN
	slot     outbox.SlotState
	err      error
}

// watchInterval is how often the server's state is read while a session runs.
const watchInterval = 2 * time.Second

func newRecorder(links *Links, rec *checkpoint.Record, revision uint64) *recorder {
	ctx, cancel := context.WithCancel(context.Background())
	r := &recorder{
		links: links, record: rec, revision: revision, cancel: cancel,
		requests: make(chan *checkpoint.Snapshot, 1), done: make(chan recorded, 1),
		stopped: make(chan struct{}),
	}
	go r.run(ctx)
	return r
}

func (r *recorder) run(ctx context.Context) {
	defer close(r.stopped)
	for {
		select {
		case <-ctx.Done():
			return
		case snap := <-r.requests:
			answer := recorded{snapshot: snap}
			if snap != nil {
				answer.err = r.store(ctx, snap)
			} else {
				answer.end, answer.slot, answer.err = r.look(ctx)
			}
			r.done <- answer
		}
	}
}

func (r *recorder) store(ctx context.Context, snap *checkpoint.Snapshot) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	server, err := r.links.Upstream.Server(ctx) // before the publication: up to here it is known to be right
	if err != nil {
		return err
	}
	identity, err := r.links.Upstream.Publication(ctx)
	if err != nil {
		return err
	}
	if identity != r.record.Publication.PublicationIdentity {
		return errors.New("the publication is not the one that it was when the session started")
	}
	r.record = r.record.With(*snap, server.WALEnd)
	r.revision, err = r.links.Store.Save(ctx, r.record, r.revision)
	return err
}

func (r *recorder) look(ctx context.Context) (end outbox.LSN, slot outbox.SlotState, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if slot, err = r.links.Upstream.Slot(ctx); err != nil {
		return 0, slot, err
	}
	server, err := r.links.Upstream.Server(ctx)
	return server.WALEnd, slot, err
}

func (r *recorder) offer(snap checkpoint.Snapshot) {
	r.busy = true
	r.requests <- &snap
}

func (r *recorder) watchDue(now time.Time) bool {
	return !r.busy && now.Sub(r.watched) >= watchInterval
}

func (r *recorder) watch(now time.Time) {
	r.busy, r.watched = true, now
	r.requests <- nil
}

// close ends the goroutine. What it is doing is cut short: a record that may or may not have been stored is read at the next start.
func (r *recorder) close() {
	r.cancel()
	<-r.stopped
}
