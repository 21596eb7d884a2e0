package erasure

import (
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// Read reads all requests of an outbox, of every slot; none where nobody ever asked for an erasure.
func Read(ctx context.Context, q catalog.Querier, root catalog.Table) ([]*Record, error) {
	kept, err := tables(ctx, q, root)
	if err != nil {
		return nil, err
	}
	var all []*Record
	for _, k := range kept {
		some, err := read(ctx, q, k, catalog.OfRoot, root.OID, root.Quoted())
		if err != nil {
			return nil, mayNotRead(root, k.Table+", "+rowsOf(k), err)
		}
		all = append(all, some...)
	}
	slices.SortStableFunc(all, func(a, b *Record) int { return a.Requested.Compare(b.Requested) })
	return all, nil
}

// mayNotRead explains that the role may not read tables.
func mayNotRead(root catalog.Table, tables string, err error) error {
	if postgres.SQLState(err) != postgres.StateInsufficientPrivilege {
		return err
	}
	return postgres.Fatal(err, "no_right", "GRANT SELECT ON "+tables+" TO it",
		"the role may not read what was erased from %s", root.Quoted())
}

// maxBack is how many rows that have come back are kept in memory.
const maxBack = 1_000_000

// Back are rows of a snapshot that were erased before: by the id that an event has, the request. They are in
// the table again because somebody put them back.
type Back map[string]string

// FindBack finds them among the rows of a query. PostgreSQL compares the ids with those that were noted, and
// an HMAC of the document decides, for where ids have begun anew.
func FindBack(ctx context.Context, snap *tablesnapshot.Snapshot, q tablesnapshot.Query, all []*Record) (Back,
	error) {
	back := Back{}
	if len(all) == 0 || q.ID == "" {
		return back, nil
	}
	root := snap.Table()
	for at, of := range byPlace(all) {
		err := snap.Noted(ctx, q, at.rows, "noted.slot = "+postgres.Literal(at.slot),
			func(n tablesnapshot.Noted) error {
				if r := of[n.Request]; r == nil || !r.Is(n.Doc) {
					return nil
				}
				if back[string(n.ID)] = n.Request; len(back) > maxBack {
					return &outbox.Fault{Class: outbox.Gap, Code: "erased_rows",
						Message: fmt.Sprintf("more than %d rows of %s were erased before (request %s) and "+
							"are there again", maxBack, root.Quoted(), n.Request)}
				}
				return nil
			})
		if err != nil {
			return nil, mayNotRead(root, at.rows, err)
		}
	}
	return back, nil
}

// place is where the hashes of ids are noted.
type place struct{ rows, slot string }

func byPlace(all []*Record) map[place]map[string]*Record {
	places := map[place]map[string]*Record{}
	for _, r := range all {
		at := place{r.rows, r.Slot}
		if places[at] == nil {
			places[at] = map[string]*Record{}
		}
		places[at][r.Request] = r
	}
	return places
}

// Has reports whether a row with that id has come back.
func (b Back) Has(id string) bool { _, ok := b[id]; return ok }

// String says how many rows there are, and of which requests; "" if none.
func (b Back) String() string {
	if len(b) == 0 {
		return ""
	}
	n := map[string]int{}
	for _, request := range b {
		n[request]++
	}
	return fmt.Sprintf("%s of the table %s erased before (%s), and left out. To delete what is there "+
		"again, erase its document once more, with another name for the request", units.Of(len(b), "row"),
		units.Agree(len(b), "is there again, was", "are there again, were"), named(n))
}

// maxNamed is how many requests are named.
const maxNamed = 10

// named names some of the keys.
func named(n map[string]int) string {
	names := slices.Sorted(maps.Keys(n))
	more := ""
	if len(names) > maxNamed {
		names, more = names[:maxNamed], " and others"
	}
	return "request " + strings.Join(names, ", ") + more
}

// Unfinished are the requests of a slot that have not finished, by name.
func Unfinished(all []*Record, slot string) (names []string) {
	for _, r := range all {
		if r.Slot == slot && r.Finished.IsZero() {
			names = append(names, r.Request)
		}
	}
	return names
}

// Unknown are those sequences of a stream's erased messages that no request has: the database is from before
// the erasure.
func Unknown(all []*Record, slot, stream string, erased outbox.Sequences) (unknown outbox.Sequences) {
	var known outbox.Sequences
	for _, r := range all {
		if r.Slot == slot || r.Stream == stream {
			known = append(known, r.Erased...)
		}
	}
	known = outbox.Sequences(nil).With(known...)
	for _, e := range erased {
		unknown = append(unknown, known.Lacking(e.From, e.To)...)
	}
	return unknown
}

// maxRemembered is how many documents a Past remembers at a time.
const maxRemembered = 1 << 16

// Past tells of messages whether they were erased. For a document that it has not seen it computes an HMAC
// for each request.
type Past struct {
	// Stream is the stream that all messages are of. Of a request of another one the time when that was made
	// says nothing of them.
	Stream string
	// Now is when the stream was made that there is. It is no earlier one than a request's: if it was made
	// before that, the broker's clock was set back. Zero: there is none.
	Now time.Time

	q      catalog.Querier
	system string
	all    []*Record
	docs   map[string][]*Record
}

// OpenPast reads all requests of an outbox, as [Read] does. It asks q for ids later.
func OpenPast(ctx context.Context, q catalog.Querier, root catalog.Table) (*Past, error) {
	p := &Past{q: q, docs: map[string][]*Record{}}
	var err error
	if p.all, err = Read(ctx, q, root); err != nil || len(p.all) == 0 {
		return p, err
	}
	return p, q.QueryRow(ctx, "SELECT "+system).Scan(&p.system)
}

// Has reports whether a message of the document was erased, or is about to be: one of a stream that was made
// at a time.
func (p *Past) Has(ctx context.Context, doc string, created time.Time, header string, seq uint64) (bool,
	error) {
	of, known := p.docs[doc]
	if !known && len(p.all) > 0 {
		for _, r := range p.all {
			if r.Is(doc) {
				of = append(of, r)
			}
		}
		if len(p.docs) >= maxRemembered {
			clear(p.docs)
		}
		p.docs[doc] = of
	}
	for _, r := range of {
		if gone, err := p.gone(ctx, r, created, header, seq); gone || err != nil {
			return gone, err
		}
	}
	return false, nil
}

// gone is Has of one request. Where the database was moved to another cluster, positions before and after
// that have nothing in common: the cut of one cluster says nothing of a message of the other, and whether the
// message's id was noted does.
func (p *Past) gone(ctx context.Context, r *Record, created time.Time, header string, seq uint64) (gone bool,
	err error) {
	cut := *r
	if r.System != p.system {
		cut.Cut = 0
	}
	if r.Stream != p.Stream || created.Equal(p.Now) && created.Before(r.Created) {
		gone = cut.Goes(header, 0)
	} else {
		gone = cut.GoesFrom(created, header, seq)
	}
	switch {
	case r.IsLast(header):
		return false, nil
	case r.Cut == 0: // not known yet
		return true, nil
	case gone:
		return true, nil
	case r.System == p.system && created.Equal(r.Created):
		return false, nil
	}
	sum := outbox.HeaderIDSum(header)
	err = p.q.QueryRow(ctx, "SELECT EXISTS (SELECT FROM "+r.rows+" WHERE sum = $1::text::uuid AND slot = $2 "+
		"AND request = $3)", hex.EncodeToString(sum[:]), r.Slot, r.Request).Scan(&gone)
	if err != nil {
		err = fmt.Errorf("read table %s: %w", r.rows, err)
	}
	return gone, err
}
