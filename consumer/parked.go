package consumer

import (
	"context"
	"errors"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Why an event is parked.
const (
	causePoison = "poison" // it failed for good
	causeBehind = "behind" // an earlier event of its document is parked
)

// What a release does with an event.
const (
	releaseRetry = "retry"
	releaseSkip  = "skip"
)

// maxCached is how many parked documents are cached, at about 70 bytes each. If there are more, every event
// is looked up in the table.
const maxCached = 1 << 18

// maxReleases is how many documents to release are read from the table at a time, at least, if a partition is
// not busy with as many.
const maxReleases = 256

// parking holds back documents that have an event which failed for good: that event and all later ones of
// the document are in a table, in stream order, until an operator releases them.
//
// The table is authoritative. It changes only in transactions that hold the offset of the document's
// partition: an event is in it exactly if the offset is beyond the event and it has not taken effect. The
// cache in memory only says which documents need no lookup: it is never short of one that is parked.
//
// A parking is used by one session; what concerns a document, by the goroutine of its worker.
type parking struct {
	cfg   *Config
	dec   *decoder
	met   *metrics
	table parkedTable

	mu    sync.Mutex
	seed  maphash.Seed
	count map[uint64]cachedDocuments // by the hash of their name
	full  bool                       // there are more than are cached: any document may be parked

	// For the metrics, of which each instance shows its own share: those of others are released by others,
	// and this one does not hear of it.
	own    int       // of count
	oldest time.Time // when the first of them was parked; zero: there is none
	stale  bool      // oldest is to be looked up
}

// cachedDocuments are the parked documents of a hash, which are one but for collisions.
type cachedDocuments struct {
	n     int32
	since int64 // Unix time in milliseconds at which the first was parked; 0: of another instance's partition
}

func newParking(cfg *Config, dec *decoder, met *metrics) *parking {
	return &parking{
		cfg: cfg, dec: dec, met: met, table: newParkedTable(cfg.DatabaseSchema, cfg.Name),
		seed: maphash.MakeSeed(), count: map[uint64]cachedDocuments{},
	}
}

// load reads which documents are parked, at the start of a session. own are its partitions, of so many.
func (k *parking) load(ctx context.Context, tx pgx.Tx, partitions int, own []int) error {
	documents, err := k.table.documents(ctx, tx, maxCached+1)
	if err != nil {
		return err
	}
	for _, d := range documents {
		since := int64(0)
		if slices.Contains(own, partitionOf(d.hash, partitions)) {
			since = d.parkedAt.UnixMilli()
		}
		k.note(d.document, since)
	}
	k.report()
	return nil
}

// add records that a document is parked. It is called when that is committed.
func (k *parking) add(document string) { k.note(document, time.Now().UnixMilli()) }

// note records that a document is parked, since a time as in cachedDocuments.
func (k *parking) note(document string, since int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.full = k.full || len(k.count) >= maxCached; k.full {
		return
	}
	h := k.hash(document)
	c := k.count[h]
	if c.n++; c.since == 0 && since != 0 {
		c.since, k.stale = since, true
		k.own++
		k.met.documents(k.own)
	}
	k.count[h] = c
}

// drop records that a document is no longer parked.
func (k *parking) drop(document string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	h := k.hash(document)
	c := k.count[h]
	if c.n > 1 {
		c.n--
		k.count[h] = c
		return
	}
	if delete(k.count, h); c.since != 0 {
		k.stale = true
		k.own--
		k.met.documents(k.own)
	}
}

// report sets the metric of how long something has been parked.
func (k *parking) report() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stale {
		least := int64(0)
		for _, c := range k.count {
			if c.since != 0 && (least == 0 || c.since < least) {
				least = c.since
			}
		}
		k.stale, k.oldest = false, time.Time{}
		if least != 0 {
			k.oldest = time.UnixMilli(least)
		}
	}
	k.met.parkedSince(k.oldest)
}

// may reports whether a document may be parked. False is certain.
func (k *parking) may(document string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.full || len(k.count) > 0 && k.count[k.hash(document)].n > 0
}

func (k *parking) hash(document string) uint64 { return maphash.String(k.seed, storable(document)) }

// parkBehind adds the events whose document is parked to the table, in the transaction that moves the offset
// past them. It returns which they are, and those that it has already: the others are to be handled. All
// events are of one source, in order.
//
// All later events of a parked document are in the table. So a replayed one at or behind the first of them is
// what waits there already: parked again, it would have its effect twice when the document is released. One
// before that had had its effect, and has it again.
func (k *parking) parkBehind(ctx context.Context, tx pgx.Tx, events []*Event) (map[*Event]bool, error) {
	if len(events) == 0 || events[0].source != replay {
		return k.table.add(ctx, tx, events, nil)
	}
	parked, behind, err := k.table.replayed(ctx, tx, events)
	if err != nil {
		return nil, err
	}
	added, err := k.table.add(ctx, tx, behind, nil)
	maps.Copy(parked, added)
	return parked, err
}

// park adds an event that failed for good to the table, in the transaction that moves the offset past it. The
// caller calls add once that is committed.
func (k *parking) park(ctx context.Context, tx pgx.Tx, e *Event, cause error) error {
	_, err := k.table.add(ctx, tx, []*Event{e}, &failure{e.Attempt, errorText(cause)})
	return err
}

// toRelease returns documents of some of so many partitions that are to be released, at most n. It is called
// every few seconds, and says in the metrics how long something has been parked by now.
func (k *parking) toRelease(ctx context.Context, tx pgx.Tx, n, partitions int, own []int64) ([]parkedDocument,
	error) {
	k.report()
	return k.table.toRelease(ctx, tx, n, partitions, own)
}

// release takes one step in the release of a document, on the goroutine of its worker: it handles the first
// events and removes them, in one transaction, or parks the first one again if that fails for good. within
// runs a function in a transaction that holds the offset of the document's partition without moving it;
// handle handles one event. When stop ends no further attempt is made. An error is the database's, or says
// that ctx has ended. left reports whether events of the document are still parked, again whether more of
// them are to be released.
func (k *parking) release(ctx, stop context.Context, document string,
	within func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error,
	handle func(ctx context.Context, tx pgx.Tx, e *Event) error,
) (left, again bool, err error) {
	for n, tries := releaseEvents, 1; ; {
		if stop.Err() != nil {
			return true, false, nil // the next session finds it again
		}
		s := releaseStep{parking: k, document: document, tries: tries, handle: handle}
		err := within(ctx, func(ctx context.Context, tx pgx.Tx) error { return s.run(ctx, tx, n) })
		cause := s.cause(err)
		switch {
		case cause == nil && !s.whole && conflict(err) || // or the server has ended what took too long
			cause == nil && err != nil && !s.whole && len(s.rows) > 1 && ctx.Err() == nil &&
				!errors.Is(err, errChanged):
			n = max(1, len(s.rows)/2)
			continue
		case cause == nil && err != nil:
			return true, false, err
		case cause == nil:
			if s.report(); !s.left {
				k.drop(document)
			}
			return s.left, s.more, nil
		case hanging(cause) != nil:
			return true, false, cause
		case errors.Is(err, errEnded):
			return true, false, fault(ErrHandler, err, hintEnded,
				"document %q, sequence %d, which was parked", document,
				s.rows[s.at].message.Sequence)
		case ctx.Err() != nil:
			return true, false, context.Cause(ctx)
		case s.at > 0: // release those before it first
			n = s.at
			continue
		case s.failed == nil && len(s.rows) > 1: // the commit failed: find out for which event
			n = 1
			continue
		}
		row, attempts, advised := s.rows[0], s.rows[0].attempts+tries, adviceOf(cause)
		counts := !conflict(cause) && !advised.waits()
		if advised.how == parked || tries >= k.cfg.MaxAttempts && counts {
			err := insist(ctx, func() error {
				return within(ctx, func(ctx context.Context, tx pgx.Tx) error {
					return k.table.failed(ctx, tx, row, attempts, cause)
				})
			})
			if err == nil {
				k.cfg.Log.Error("a parked event failed again", "document", document, "seq",
					row.message.Sequence, "attempts", attempts, "err", cause)
			}
			return true, false, err
		}
		pause := k.cfg.Backoff.pause(tries)
		if advised.waits() {
			pause = max(pause, advised.after)
			k.cfg.Log.Warn("a parked event that is released has to wait", "document", document, "seq",
				row.message.Sequence, "after", pause, "err", cause)
		}
		_ = sleep(stop, pause)
		if n = 1; counts {
			tries++
		}
	}
}

// releaseStep is one transaction of a release.
type releaseStep struct {
	*parking
	document string
	tries    int // at the first row
	handle   func(ctx context.Context, tx pgx.Tx, e *Event) error

	rows   []parkedRow
	at     int   // index of the row that is being handled
	failed error // the handler's error for it
	whole  bool  // everything but the commit was done
	left   bool  // events of the document are still parked
	more   bool  // and are to be released
}

func (s *releaseStep) run(ctx context.Context, tx pgx.Tx, n int) (err error) {
	s.rows, s.at, s.failed, s.whole = nil, 0, nil, false
	if s.rows, err = s.table.first(ctx, tx, s.document, n); err != nil {
		return err
	}
	if len(s.rows) == 0 { // somebody withdrew the release, or deleted the rows
		s.left, err = s.table.has(ctx, tx, s.document)
		return err
	}
	for i := range s.rows {
		row := &s.rows[i]
		if s.at = i; row.skip {
			continue
		}
		e, err := s.dec.event(&row.message)
		if err == nil {
			if e.Attempt = row.attempts + 1; i == 0 {
				e.Attempt += s.tries - 1
			}
			err = s.handle(ctx, tx, e)
		} else {
			err = Poison(err)
		}
		if err != nil {
			s.failed = err
			return err
		}
	}
	if s.more, err = s.table.done(ctx, tx, s.document, s.rows); err != nil {
		return err
	}
	s.left, s.at, s.whole = s.more, 0, true
	return nil
}

// cause returns the error that an event caused: the handler's, or the database's at the commit.
func (s *releaseStep) cause(err error) error {
	switch {
	case s.failed != nil:
		return s.failed
	case s.whole && err != nil && refused(err):
		return err
	}
	return nil
}

// report counts and logs the events that were released.
func (s *releaseStep) report() {
	for i := range s.rows {
		row := &s.rows[i]
		if !row.skip {
			s.met.released(releaseRetry)
			continue
		}
		s.met.released(releaseSkip)
		s.cfg.Log.Warn("a parked event was skipped", "document", s.document, "seq", row.message.Sequence,
			"subject", row.message.Subject)
	}
}
