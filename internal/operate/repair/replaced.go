package repair

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	catalogue "github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// attempt is an attempt of the repair that is under way.
type attempt struct {
	checkpoint.Attempt
	rows    []idHash // for which its condition holds, in the order of publication
	unknown bool     // which these are: PostgreSQL can't evaluate the condition any more

	all    int        // how many messages the stream has behind its sequence
	after  int        // how many of them come behind the last one that is its own
	there  int        // how many of them are its own
	last   uint64     // the last one of those
	anchor outbox.LSN // at which that was published
	latest idHash     // the event of that
	done   bool       // that was the last row that it had to publish
}

// readAttempts reads the rows that each attempt looked at, as they are now.
func (s *scan) readAttempts(ctx context.Context) error {
	if len(s.attempts) == 0 {
		return nil
	}
	defer progress.Wait(ctx, "PostgreSQL sorts the rows of table "+s.l.Layout.Mapping.Table)()
	column, _ := s.snap.Table().Column(s.l.Layout.ID)
	for i := range s.attempts {
		a := &s.attempts[i]
		if a.Where != "" && a.Where != s.r.o.Where && !slices.Contains(s.r.o.EarlierWhere, a.Where) {
			given := catalogue.Word(a.Where)
			unseen := func(r rune) bool { return r != '\n' && r != '\t' && !unicode.IsPrint(r) }
			if strings.ContainsFunc(a.Where, unseen) {
				given = strconv.Quote(a.Where) // it may be somebody else's
			}
			return &outbox.Fault{
				Class: outbox.Usage, Code: "earlier_where",
				Message: "by the checkpoint record a repair that did not finish has published rows by the " +
					"condition " + given,
				Hint: "If it is a condition of yours, give it as it stands: as --where, to go on with that " +
					"repair, or as --earlier-where, beside what this one is to publish, which without " +
					"--where is all that is missing. It is SQL, and whoever may write the record may have " +
					"put it there",
			}
		}
		same := func(o attempt) bool { return o.Where == a.Where }
		if n := slices.IndexFunc(s.attempts[:i], same); n >= 0 {
			a.rows, a.unknown = s.attempts[n].rows, s.attempts[n].unknown
			continue
		}
		err := s.snap.TryRows(ctx, tablesnapshot.Query{
			Mapping: s.l.Layout.Mapping, ID: s.l.Layout.ID, Columns: []string{s.l.Layout.ID}, Where: a.Where,
			Sorted: true,
		}, func(v [][]byte) error {
			if raw, ok := rawID(column, v[0]); ok {
				id := hashID(string(outbox.AppendHeaderValue(nil, raw)))
				if a.rows = append(a.rows, id); !s.candidate(id) {
					s.beside[id] = missing
				}
			}
			return nil
		})
		if f := outbox.FaultOf(err); f != nil && f.Code == "where" { // of the candidates it was none
			progress.Step(ctx, "any row may be one of the repair that did not finish: %v", err)
			a.rows, a.unknown, err = nil, true, nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkAttempts refuses a condition with which the record would be more than the broker takes.
func (s *scan) checkAttempts() error {
	if s.counts[missing] == 0 || s.goesOn {
		return nil
	}
	all := []checkpoint.Attempt{{Where: s.r.o.Where}}
	for _, a := range s.attempts {
		all = append(all, a.Attempt)
	}
	if s.lostAll {
		all = all[:1]
	}
	doc, err := json.Marshal(all)
	most := s.l.NATS.API().NATS().MaxPayload() / 4 * 3 // the record has more than that
	if err != nil || int64(len(doc)) <= most {
		return err
	}
	return &outbox.Fault{
		Class: outbox.Usage, Code: "flags", Message: fmt.Sprintf("--where, with the conditions of what a "+
			"repair that did not finish has published, takes %d bytes of the checkpoint record, and at "+
			"most %d have room", len(doc), most),
		Hint: "Give a shorter one: ids may stand in a table, --where \"id IN (SELECT id FROM ...)\"",
	}
}

func (s *scan) candidate(id idHash) bool {
	_, is := s.outcomes[id]
	return is
}

// was is where a row was found that is a candidate, or that an attempt looked at.
func (s *scan) was(id idHash) outcome {
	was, candidate := s.outcomes[id]
	if !candidate {
		was = s.beside[id]
	}
	return was
}

// missing reports whether such a row is in no message.
func (s *scan) missing(id idHash) bool { return s.was(id) == missing }

// missingOf are those of them.
func (s *scan) missingOf(ids []idHash) []idHash {
	return slices.DeleteFunc(slices.Clone(ids), func(id idHash) bool { return !s.missing(id) })
}

// attemptAt is the attempt that published a message at that sequence; -1: none did.
func (s *scan) attemptAt(seq uint64) int {
	n, _ := slices.BinarySearchFunc(s.attempts, seq, func(a attempt, seq uint64) int {
		if a.Seq < seq {
			return -1
		}
		return 1
	})
	return n - 1
}

// stored notes a message, which may be behind the sequence of an attempt.
func (s *scan) stored(seq uint64) {
	s.read++
	if n := s.attemptAt(seq); n >= 0 {
		s.attempts[n].all++
		s.attempts[n].after++
	}
}

// published notes that a repair has published it.
func (s *scan) published(seq uint64, h *outbox.Header, id idHash) {
	if n := s.attemptAt(seq); n >= 0 {
		a := &s.attempts[n]
		a.there, a.last, a.anchor, a.latest, s.by[id] = a.there+1, seq, h.Pos.LSN, id, n
		a.done, a.after = h.N+1 == h.Of, 0
	}
}

// sum is the part of an id in the sum of an attempt.
func (id idHash) sum() uint64 { return binary.BigEndian.Uint64(id[:]) }

func sum(ids []idHash) (n uint64) {
	for _, id := range ids {
		n += id.sum()
	}
	return n
}

// findReplaced finds the rows that the attempts of a repair which is under way have published, and whose
// messages the stream has replaced or discarded since, by its own limits. Once more they would come behind
// what came after them.
//
// An attempt publishes rows in their order, so it has published as many of the first ones as there are
// sequences that are its own. By their sum they are the rows that were missing then. If they are not, because
// some were deleted, or because it has itself replaced what it found in the stream, its newest message tells:
// whatever comes before that was in the stream, unless the WAL behind another anchor was to bring it. Behind
// it, what was in the stream is missing among what is still to be published, and nobody knows which is which:
// only if nothing of the one or of the other is there.
func (s *scan) findReplaced(ctx context.Context, rd backfill.Readings, keep bool) error {
	if s.snap == nil || len(s.attempts) == 0 {
		return nil
	}
	end, err := s.publishedTo(ctx, rd)
	if s.lostAll = end == 0; err != nil || s.lostAll {
		return err
	}
	known, kept := rd.Explained(s.again), s.read
	for _, a := range s.attempts {
		kept -= a.all
	}
	for i := range s.attempts {
		a := &s.attempts[i]
		before := kept + int(known.Within(1, a.Seq).Count()) // up to its sequence
		kept += a.all
		to := end
		if i+1 < len(s.attempts) {
			to = min(to, s.attempts[i+1].Seq)
		}
		if to < a.Seq { // the end of the stream is lost
			continue
		}
		gone := max(0, int(to-a.Seq)-int(known.Within(a.Seq+1, to).Count())-a.all)
		n := gone + a.there
		if a.unknown {
			a.rows = s.missingOf(slices.Collect(maps.Keys(s.outcomes)))
		}
		rows := make([]idHash, 0, len(a.rows)) // that were missing then
		found := 0                             // what is still there of what it had found
		for _, id := range a.rows {
			if by, is := s.by[id]; is && by >= i || s.missing(id) {
				rows = append(rows, id)
			} else if s.was(id) == inStream {
				found++
			}
		}
		left := int(rd.Removed(s.again)) // at most so many of the others have gone from the stream
		if a.Found != nil {
			left = max(0, min(a.Found.Rows-found, a.Found.Sequences-before))
		}
		// in another stream, or of another past of the server, that would tell nothing
		exact := !a.unknown && sum(rows) == a.Sum && (s.sameStream || a.there > 0) &&
			(keep || s.identity == nil)
		at := slices.Index(rows, a.latest)
		newest := max(a.Seq, a.last)
		behindIt := int(to-newest) - int(known.Within(newest+1, to).Count()) - a.after // that are gone
		told := a.there > 0 && at >= 0 && behindIt <= 0                                // how far it came
		mixed := behindIt > 0 && a.after > 0                                           // they may be foreign
		exact = exact && (!told || at < n)                                             // else it left one out
		first, behind, here := rows, []idHash(nil), false
		switch own, is := s.beforeNext(i, rows); {
		case exact && told:
			first = rows[:at+1]
		case exact && is && len(own) <= n: // else the stream has lost its end, or that one missed fewer
			first, told = own, true
		case exact:
			first = rows[:min(n, len(rows))]
		case told: // in a new slot, others may have been written since
			first, behind, here = rows[:at], s.missingOf(rows[at:]), keep && a.anchor == s.anchor.Due
		}
		lost := s.missingOf(first)
		if here = here && len(lost) >= gone && len(lost)-gone <= left; here {
			left -= len(lost) - gone
		}
		switch {
		case here, exact && (told || len(lost) == gone && !mixed):
			s.setInStream(lost)
		case gone == 0 && left == 0: // nothing is
		case slices.ContainsFunc(lost, s.candidate):
			return s.cantTell(ctx, gone, lost)
		default: // they are left out
			s.replaced += uint64(gone)
		}
		switch {
		case left == 0, gone == 0 && sum(rows)-sum(lost) == a.Sum: // they were all missing then
		case here && a.done && len(behind) <= left:
			s.setInStream(behind)
		case slices.ContainsFunc(behind, s.candidate):
			return s.cantTell(ctx, gone, behind)
		}
		// Where somebody else's message is among its own, sequences don't count these: another one begins.
		s.goesOn = a.Where == s.r.o.Where && i == len(s.attempts)-1 && a.all == a.there &&
			(here || exact && n == len(first) && a.Sum-sum(first) == s.sum())
	}
	return nil
}

// beforeNext is what an attempt has published of its rows, where the next one went on with the others: by its
// sum it lacked these, whatever somebody else has published between.
func (s *scan) beforeNext(i int, rows []idHash) (first []idHash, is bool) {
	if i+1 == len(s.attempts) || s.attempts[i+1].Where != s.attempts[i].Where {
		return nil, false
	}
	left := s.attempts[i].Sum - s.attempts[i+1].Sum
	for n, id := range rows {
		if left == 0 {
			return rows[:n], true
		}
		left -= id.sum()
	}
	return rows, left == 0
}

// setInStream notes rows that were in the stream, and that it has replaced or discarded.
func (s *scan) setInStream(ids []idHash) {
	for _, id := range ids {
		s.set(id, inStream)
	}
	s.replaced += uint64(len(ids))
}

// cantTell is the fault of rows of which an attempt may have published or replaced some, beside what of its
// own is gone.
func (s *scan) cantTell(ctx context.Context, gone int, rows []idHash) error {
	of := map[idHash]bool{}
	for _, id := range rows {
		of[id] = s.candidate(id)
	}
	first, last, err := s.edges(ctx, func(id idHash) bool { return of[id] }, func([]byte) {})
	if err != nil {
		return err
	}
	return refuse(codeRemoved, fmt.Sprintf("the repair that did not finish has published %s "+
		"that the stream %s no longer has, and %s that it may have published, or replaced, %s in no "+
		"message: whether it has can't be told. In the order (document, key) the first one is %v, the last "+
		"one %v", units.Of(gone, "event"), s.r.cfg.Stream,
		units.Of(len(rows), "row"), units.Agree(len(rows), "is", "are"), first, last),
		"Leave those rows out with --where. What of them is missing all the same, publish "+
			"afterwards: outflow repair --accept rows_missing --where ...")
}

// publishedTo is up to where the stream has what attempts have published, or had it. An empty stream may have
// lost it, unless all of it is too old, by the broker's clock, as they are: this process may run elsewhere.
// An attempt may have published for long.
func (s *scan) publishedTo(ctx context.Context, rd backfill.Readings) (uint64, error) {
	if rd.Stream.NewestSeq > 0 {
		return rd.Stream.NewestSeq, nil
	}
	limits, err := s.l.NATS.Limits(ctx)
	at := s.attempts[len(s.attempts)-1].At
	if rd.Stream.LastTime.After(at) {
		at = rd.Stream.LastTime
	}
	if limits.Age == 0 || rd.Stream.Now.Sub(at) < limits.Age {
		return 0, err
	}
	return rd.Stream.LastSeq, err
}

// sum is that of what is missing.
func (s *scan) sum() (n uint64) {
	for id, was := range s.outcomes {
		if was == missing {
			n += id.sum()
		}
	}
	return n
}

// addAttempt adds an attempt that publishes what is missing, unless it goes on with the last one. rd is what
// was read before.
func (s *scan) addAttempt(to *checkpoint.Record, rd backfill.Readings) {
	at, now := s.anchor.Seq, rd.Stream.Now.Add(time.Since(rd.Now)).UTC() // by the broker's clock
	all := slices.DeleteFunc(slices.Clone(to.Begun.Attempts), func(a checkpoint.Attempt) bool {
		// the stream has gone back, or nothing was published
		return s.lostAll || a.Seq >= at
	})
	if n := len(all); s.goesOn && n == len(s.attempts) {
		all[n-1].At = now
	} else {
		rd.Record = to // it has the end that the broker has lost by now
		known := int(rd.Explained(s.again).Within(1, at).Count())
		all = append(all, checkpoint.Attempt{Seq: at, Where: s.r.o.Where, Sum: s.sum(), At: now,
			Found: &checkpoint.Found{Rows: s.counts[inStream], Sequences: s.read + known}})
	}
	to.Begun.Attempts = all
}
