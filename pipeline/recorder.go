package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// recorder stores the record in a goroutine of its own. Before each storing what is published is read again: rows that were written
// while it was something else are not in the WAL data, so nothing may be recorded or confirmed then. It also reads how far the
// server is, for metrics: it owns the ordinary connection while the session runs. And it asks the broker, which may have died in silence:
// what is stored there counts as durable only for as long as it is known to live.
type recorder struct {
	links    *Conns
	log      *slog.Logger
	warned   relay.PublicationIdentity // the goroutine's: that rows of it may be hidden was said
	record   *checkpoint.Record        // the goroutine's while busy, else the loop's
	revision uint64                    // likewise
	tried    *checkpoint.Record        // likewise: what may have been written since or not; nil: nothing

	requests chan *checkpoint.Update // nil: read the server's state
	done     chan recorded
	cancel   context.CancelFunc
	stopped  chan struct{}

	busy    bool      // a request is under way
	watched time.Time // when the server's state was
}

// recorded is the answer to a request.
type recorded struct {
	snapshot *checkpoint.Update // what was stored; nil: the server's state was read
	end      outbox.LSN
	slot     relay.SlotState
	stream   relay.StreamState
	moved    bool      // the stream changed too fast to be read: it lives, and its acknowledgements say where it is
	heard    time.Time // when the broker was asked what it has answered
	err      error
}

// watchInterval is how often the server's state is read while a session runs.
const watchInterval = 2 * time.Second

func newRecorder(links *Conns, log *slog.Logger, rec *checkpoint.Record, revision uint64) *recorder {
	ctx, cancel := context.WithCancel(context.Background())
	r := &recorder{
		links: links, log: log, record: rec, revision: revision, cancel: cancel,
		requests: make(chan *checkpoint.Update, 1), done: make(chan recorded, 1),
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
				answer.heard, answer.err = r.store(ctx, snap)
			} else {
				answer.err = r.look(ctx, &answer)
			}
			r.done <- answer
		}
	}
}

func (r *recorder) store(ctx context.Context, snap *checkpoint.Update) (heard time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	server, err := r.links.Source.Server(ctx) // before the publication: up to here it is known to be right
	if err != nil {
		return heard, err
	}
	published, err := r.links.Source.Publication(ctx)
	if err != nil {
		return heard, err
	}
	if err := r.links.Checkpoint.CheckPublication(r.record.Publication, published, server.WALEnd); err != nil {
		return heard, err
	}
	r.rewritten(published)
	r.tried = r.record.With(*snap, published, server.WALEnd)
	heard = time.Now()
	ctx, cancel = untilLost(ctx, r.links.JetStream)
	defer cancel()
	revision, err := r.links.Store.Save(ctx, r.tried, r.revision)
	if err != nil {
		return heard, ofBroker(err)
	}
	r.record, r.revision, r.tried = r.tried, revision, nil
	return heard, nil
}

// rewritten says once that partitions have other files than the record knows. That is no reason to stop: VACUUM FULL does it.
func (r *recorder) rewritten(now relay.PublicationIdentity) {
	known := r.record.Publication
	if now.Rewritten == "" || now.Rewritten == known.Rewritten || known.TableOID == 0 || now == r.warned {
		return
	}
	r.warned = now
	r.log.Warn("the table, or partitions of it, were rewritten or emptied (VACUUM FULL, CLUSTER, TRUNCATE and ALTER TABLE do that), or came rewritten. "+
		"If one was unlogged meanwhile, the rows that were written to it then are not published: outflow repair --check looks for them",
		"table", r.links.Checkpoint.Table, "since", known.Seen)
}

// found compares the record that a new connection to the broker has read with what was written. wrote says that it is the one of which
// that was not known. The caller has made sure that no request is under way.
func (r *recorder) found(rec *checkpoint.Record, revision uint64) (wrote bool, err error) {
	switch {
	case revision == r.revision && r.record.Is(rec):
		r.tried = nil // should it still come, the next one is refused, or it is
		return false, nil
	case revision > r.revision && r.tried != nil && r.tried.Is(rec):
		r.record, r.revision, r.tried = r.tried, revision, nil
		return true, nil
	}
	return false, fmt.Errorf("the checkpoint record at revision %d is not what this session wrote, last at %d", revision, r.revision)
}

// untilLost ends a context with the connection to the broker.
func untilLost(ctx context.Context, b JetStream) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-b.Lost():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

func (r *recorder) look(ctx context.Context, answer *recorded) (err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if answer.slot, err = r.links.Source.Slot(ctx); err != nil {
		return err
	}
	server, err := r.links.Source.Server(ctx)
	if err != nil {
		return err
	}
	answer.end, answer.heard = server.WALEnd, time.Now()
	ctx, cancel = untilLost(ctx, r.links.JetStream)
	defer cancel()
	answer.stream, err = r.links.JetStream.Tail(ctx)
	if f := outbox.FaultOf(err); f != nil && f.Code == relay.CodeStreamMoved {
		answer.moved, err = true, nil
	}
	return ofBroker(err)
}

// remember puts a fault that was seen to happen into the record, so that each start stops at it until a repair accepts it. The
// session's recorder has ended by then.
func (p *Pipeline) remember(links *Conns, err error) {
	fault := outbox.FaultOf(err)
	if fault == nil || fault.Class != outbox.Gap || !fault.Observed {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), writeTimeout)
	defer cancel()
	for {
		rec, revision, err := links.Store.Load(ctx)
		if err == nil && rec != nil && rec.Stopped == "" { // who starts again and again leaves the revisions that there are
			rec.Stopped = fault.Code
			_, err = links.Store.Save(ctx, rec, revision)
		}
		switch {
		case ctx.Err() == nil && (errors.Is(err, checkpoint.ErrConflict) || errors.Is(err, checkpoint.ErrUnknown)):
			// A record of this session was on its way, or one of whoever took over; or it may have been written.
		case err != nil:
			p.log.Warn("the checkpoint record does not say that this happened: the next start may not stop at it", "code", fault.Code, "err", err)
			return
		default:
			return
		}
	}
}

func (r *recorder) offer(snap checkpoint.Update) {
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
