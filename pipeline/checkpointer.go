package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// checkpointer stores the checkpoint record. Before each time it reads again what is published: rows that
// were written while it was something else are not in the WAL data, so nothing may be recorded or confirmed
// then.
//
// It belongs to the session's job while one is under way, else to the loop.
type checkpointer struct {
	conns    *Conns
	log      *slog.Logger
	warned   relay.PublicationIdentity // for it a rewritten table was logged
	record   *checkpoint.Record        // as it was stored last
	revision uint64
	tried    *checkpoint.Record // may have been written since, or may still be; nil: nothing
	gaps     []Gap              // whose names were stored last
}

// store stores what is new. asked is when JetStream was asked, which it has answered then.
func (c *checkpointer) store(ctx context.Context, u *checkpoint.Update) (asked time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	// before the publication, which is known to be right up to this end of the WAL
	server, err := c.conns.Source.Server(ctx)
	if err != nil {
		return asked, err
	}
	published, err := c.conns.Source.Publication(ctx)
	if err != nil {
		return asked, err
	}
	if err := c.conns.Checkpoint.CheckPublication(c.record.Publication, published,
		server.WALEnd); err != nil {
		return asked, err
	}
	c.logRewritten(published)
	next := c.record.With(*u, published, server.WALEnd)
	asked = time.Now()
	return asked, c.save(ctx, next)
}

// save stores a record in place of the last one.
func (c *checkpointer) save(ctx context.Context, next *checkpoint.Record) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	ctx, stop := untilLost(ctx, c.conns.JetStream)
	defer stop()
	c.tried = next
	revision, err := c.conns.Store.Save(ctx, next, c.revision)
	if err != nil {
		return ofJetStream(err)
	}
	c.record, c.revision, c.tried = next, revision, nil
	return nil
}

// nameGaps stores the names of open gaps for outflow status, which may not reach this process, or only after
// its death. The record has a hash of each.
func (c *checkpointer) nameGaps(ctx context.Context, gaps []Gap) {
	if slices.Equal(gaps, c.gaps) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, namesTimeout)
	defer cancel()
	ctx, stop := untilLost(ctx, c.conns.JetStream)
	defer stop()
	doc, err := json.Marshal(gaps)
	if err == nil {
		err = c.conns.Store.SaveGaps(ctx, doc)
	}
	if err != nil {
		c.log.Debug("outflow status can't name the open gaps", "err", err)
		return
	}
	c.gaps = gaps
}

// namedBefore is what a process before may have named: in gap mode nothing that is open now, so that names
// are replaced with the session's first record, also those of a process that was killed between the two.
func namedBefore(cp relay.Checkpoint) []Gap {
	if cp.Settings.ByGap() {
		return []Gap{{}}
	}
	return nil
}

// namesTimeout is how long the names of open gaps may hold up what else is to be asked of the servers.
const namesTimeout = time.Second

// logRewritten logs once that partitions have other files than the record knows. That is no reason to stop:
// VACUUM FULL does it.
func (c *checkpointer) logRewritten(now relay.PublicationIdentity) {
	known := c.record.Publication
	if now.Rewritten == "" || now.Rewritten == known.Rewritten || known.TableOID == 0 || now == c.warned {
		return
	}
	c.warned = now
	c.log.Warn("the table, or partitions of it, were rewritten or emptied (VACUUM FULL, CLUSTER, TRUNCATE "+
		"and ALTER TABLE do that), or came rewritten. "+
		"If one was unlogged meanwhile, the rows that were written to it then are not published: outflow "+
		"repair --check looks for them",
		"table", c.conns.Checkpoint.Table, "since", known.Seen)
}

// resume compares the record that was read over a new connection with what was written. saved says that it is
// the one of which that was not known. An error says that somebody else wrote it.
func (c *checkpointer) resume(rec *checkpoint.Record, revision uint64) (saved bool, err error) {
	switch {
	case revision == c.revision && c.record.Is(rec):
		c.tried = nil // if it still arrives, it is refused, or the next one is
		return false, nil
	case revision > c.revision && c.tried != nil && c.tried.Is(rec):
		c.record, c.revision, c.tried = c.tried, revision, nil
		return true, nil
	}
	return false,
		fmt.Errorf("the checkpoint record at revision %d is not what this session wrote, last at %d",
			revision, c.revision)
}

// recordStop puts a fault that was seen to happen into the record, so that each start stops at it until a
// repair accepts it. The session's jobs have ended by then. Without a store it would not be this cluster's to
// say, and each start finds it.
func (p *Pipeline) recordStop(store Store, err error) {
	fault := outbox.FaultOf(err)
	if store == nil || fault == nil || fault.Class != outbox.Gap || !fault.Observed {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), writeTimeout)
	defer cancel()
	for {
		rec, revision, err := store.Load(ctx)
		// a process that starts again and again must not use up the revisions
		if err == nil && rec != nil && rec.Stopped == "" {
			rec.Stopped = fault.Code
			_, err = store.Save(ctx, rec, revision)
		}
		switch {
		case ctx.Err() == nil && (errors.Is(err, checkpoint.ErrConflict) ||
			errors.Is(err, checkpoint.ErrUnknown)):
			// A record of this session was on its way, or one of whoever took over; or it may have been
			// written.
		case err != nil:
			p.log.Error("the checkpoint record does not say that this happened: the next start may not stop "+
				"at it", "code", fault.Code, "err", err)
			p.unrecorded = fault
			return
		default:
			p.unrecorded = nil
			return
		}
	}
}
