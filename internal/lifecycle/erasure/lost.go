package erasure

import (
	"context"
	"slices"
	"time"
)

// End is where a stream ends.
type End struct {
	Stream  string
	Created time.Time // when the stream was made
	Last    uint64    // its last sequence
}

func (e *End) of(r *Record) bool {
	return r.Stream == e.Stream && r.Created.Equal(e.Created.Truncate(time.Microsecond))
}

func (e *End) before(r *Record) bool { return e.of(r) && r.CutSeq > e.Last }

// MayBeBefore reports whether the end lies before the cut of a request, or of an erasure that may have read
// one and not noted it yet.
func (e *End) MayBeBefore(all []*Record) bool {
	return slices.ContainsFunc(all, func(r *Record) bool { return e.before(r) || e.of(r) && r.Cut == 0 })
}

// CheckLower makes sure that Lower may write the requests that it has to write.
func (l *Ledger) CheckLower(ctx context.Context, end End) error {
	all, err := Read(ctx, l.conn, l.root)
	for _, r := range all {
		if !end.before(r) {
			continue
		}
		var may bool
		if err := l.conn.QueryRow(ctx, "SELECT has_table_privilege($1::text, 'UPDATE')", r.table).
			Scan(&may); err != nil {
			return l.explain("read table "+r.table, err)
		}
		if !may {
			return l.noRight(nil, "write table "+r.table)
		}
	}
	return err
}

// Lower lowers the cuts that lie behind the end of a stream: the broker has lost that, and other messages
// come under the sequences there. Of those the position tells which were committed before the cut. It is
// called before the first of them is published, and may be called again.
//
// No erasure is at work meanwhile: it would go by the cut that it has read before, and write that back.
func (l *Ledger) Lower(ctx context.Context, end End) error {
	all, err := Read(ctx, l.conn, l.root)
	if err != nil || !end.MayBeBefore(all) {
		return err
	}
	if err := NoneAtWork(ctx, l.conn, l.root); err != nil {
		return err
	}
	if all, err = Read(ctx, l.conn, l.root); err != nil {
		return err
	}
	for _, r := range all {
		if !end.before(r) {
			continue
		}
		if _, err := l.conn.Exec(ctx, "UPDATE "+r.table+" SET cut_sequence = $3 WHERE slot = $1 AND "+
			"request = $2", r.Slot, r.Request, int64(end.Last)); err != nil {
			return l.explain("write table "+r.table, err)
		}
	}
	return nil
}
