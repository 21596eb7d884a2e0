package consumer

import (
	"context"
	"errors"
	"hash/maphash"
	"sync"

	"github.com/jackc/pgx/v5"
)

// The causes of parking.
const (
	causePoison = "poison" // it failed for good
	causeBehind = "behind" // an earlier event of its document is parked
)

// The ways out of parking.
const (
	releaseRetry = "retry"
	releaseSkip  = "skip"
)

// maxKept is how many parked documents are kept in memory, at about 40 bytes each. With more of them the
// table is asked at each event.
const maxKept = 1 << 18

// maxWanted is how many documents are looked for at a time that are to be released.
const maxReleases = 256

// parking holds back the documents that have an event which failed for good: that event and all later ones of
// its document are in a table, in the order of the stream, until an operator releases them.
//
// The table is the truth. It changes only in transactions in which the offset of the document's partition is
// held: an event is in it exactly if the offset is beyond the event and its effect is not there. What is in
// memory only says which documents need not be looked up: it is never short of one that is parked.
//
// A parking is used by one session; what concerns a document by the goroutine of its worker.
type parking struct {
	cfg   *Config
	dec   *decoder
	met   *metrics
	table parkedTable

	mu    sync.Mutex
	seed  maphash.Seed
	count map[uint64]int32 // documents that are parked, by the hash of their name
	full  bool             // there are more than are kept: any may be parked
}

func newParking(cfg *Config, dec *decoder, met *metrics) *parking {
	return &parking{
		cfg: cfg, dec: dec, met: met, table: newParkedTable(cfg.DatabaseSchema, cfg.Name),
		seed: maphash.MakeSeed(), count: map[uint64]int32{},
	}
}

// load reads which documents are parked, at the start of a session.
func (k *parking) load(ctx context.Context, tx pgx.Tx) error {
	documents, err := k.table.documents(ctx, tx, maxKept+1)
	if err != nil {
		return err
	}
	for _, document := range documents {
		k.add(document)
	}
	return nil
}

// add says that a document is parked now. It is called when that is committed.
func (k *parking) add(document string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.full = k.full || len(k.count) >= maxKept; !k.full {
		k.count[k.hash(document)]++
	}
	k.met.documents(len(k.count))
}

// drop says that a document is not parked any more.
func (k *parking) drop(document string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if h := k.hash(document); k.count[h] > 1 {
		k.count[h]--
	} else {
		delete(k.count, h)
	}
	k.met.documents(len(k.count))
}

// may reports whether a document may be parked. It is exact where it says no.
func (k *parking) may(document string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.full || len(k.count) > 0 && k.count[k.hash(document)] > 0
}

func (k *parking) hash(document string) uint64 { return maphash.String(k.seed, storable(document)) }

// parkBehind puts those of the events whose document is parked into the table, in one round trip, in the
// transaction that moves the offset over them. It returns which they are: the others are to be handled. All
// are of one source, in their order.
func (k *parking) parkBehind(ctx context.Context, tx pgx.Tx, events []*Event) (map[*Event]bool, error) {
	return k.table.add(ctx, tx, events, nil)
}

// park puts an event that failed for good into the table, in the transaction that moves the offset over it.
// Once that is committed the caller says so with keep.
func (k *parking) park(ctx context.Context, tx pgx.Tx, e *Event, cause error) error {
	_, err := k.table.add(ctx, tx, []*Event{e}, &failure{e.Attempt, errorText(cause)})
	return err
}

// toRelease returns documents that are to be released, at most maxWanted.
func (k *parking) toRelease(ctx context.Context, tx pgx.Tx) ([]parkedDocument, error) {
	return k.table.toRelease(ctx, tx, maxReleases)
}

// release takes one step in the release of a document, on the goroutine of its worker: the effects of its
// first events and their removal, in one transaction; or, where the first one fails for good, that it is
// parked again. within runs a function in a transaction of this session, in which the offset of the
// document's partition is held and does not move; handle has the effect of one event. When stop ends no
// further attempt is made. An error is the database's, or says that ctx has ended. left reports whether
// events of the document are still parked, again whether more of them are to be released.
func (k *parking) release(ctx, stop context.Context, document string,
	within func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error,
	handle func(ctx context.Context, tx pgx.Tx, e *Event) error,
) (left, again bool, err error) {
	for n, tries := releaseEvents, 1; ; {
		s := releaseStep{parking: k, document: document, tries: tries, handle: handle}
		err := within(ctx, func(ctx context.Context, tx pgx.Tx) error { return s.run(ctx, tx, n) })
		cause := s.cause(err)
		switch {
		case cause == nil && err != nil:
			return true, false, err
		case cause == nil:
			if s.report(); !s.left {
				k.drop(document)
			}
			return s.left, s.more, nil
		case ctx.Err() != nil:
			return true, false, context.Cause(ctx)
		case s.at > 0: // those before it go first
			n = s.at
			continue
		// the commit failed: of which of them shows when they go one by one
		case s.failed == nil && len(s.rows) > 1:
			n = 1
			continue
		}
		row, attempts := s.rows[0], s.rows[0].attempts+tries
		if errors.Is(cause, errEnded) {
			return true, false, fault(ErrHandler, cause, hintEnded,
				"document %q, sequence %d, which was parked", document, row.message.Sequence)
		}
		if isPoison(cause) || tries >= k.cfg.MaxAttempts && !conflict(cause) {
			err := within(ctx, func(ctx context.Context, tx pgx.Tx) error {
				return k.table.failed(ctx, tx, row, attempts, cause)
			})
			if err == nil {
				k.cfg.Log.Error("a parked event failed again", "document", document, "seq",
					row.message.Sequence, "attempts", attempts, "err", cause)
			}
			return true, false, err
		}
		if k.cfg.Backoff.wait(stop, tries) != nil {
			return true, false, nil // it is asked for again
		}
		if n = 1; !conflict(cause) {
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
	at     int   // the row that is being handled
	failed error // what the handler said of it
	whole  bool  // nothing but the commit was left to do
	left   bool  // events of the document are still parked
	more   bool  // and are to be released
}

func (s *releaseStep) run(ctx context.Context, tx pgx.Tx, n int) (err error) {
	s.rows, s.at, s.failed, s.whole = nil, 0, nil, false
	if s.rows, err = s.table.first(ctx, tx, s.document, n); err != nil {
		return err
	}
	if len(s.rows) == 0 { // somebody took the word back, or removed the rows
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

// cause returns what is to be blamed on an event: what the handler said, or what the database said of its
// effect at the commit.
func (s *releaseStep) cause(err error) error {
	switch {
	case s.failed != nil:
		return s.failed
	case s.whole && err != nil && refused(err):
		return err
	}
	return nil
}

// report counts and logs what left.
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
