package repair

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// findReplaced finds the candidates that a repair which is under way has published, and whose messages the
// stream has replaced or discarded since, by its own limits. Each of its attempts goes on behind the one
// before: if as many rows are missing up to the newest message as are gone behind where the first one began,
// it is they. Once more they would come behind what came after them.
func (s *scan) findReplaced(ctx context.Context, rd backfill.Readings) error {
	if s.latest == nil || s.counts[missing] == 0 {
		return nil
	}
	at, known := *s.begun, rd.Explained(s.again)
	gone := int(s.newest - at - s.present - known.Within(at+1, s.newest).Count())
	if gone <= 0 {
		return nil
	}
	defer progress.Wait(ctx, "PostgreSQL sorts the rows of table "+s.l.Layout.Mapping.Table)()
	column, _ := s.snap.Table().Column(s.l.Layout.ID)
	there := false      // the newest message's row, among the rows so far
	var before []idHash // those before it that are missing
	err := s.snap.Rows(ctx, tablesnapshot.Query{
		Mapping: s.l.Layout.Mapping, ID: s.l.Layout.ID, Columns: []string{s.l.Layout.ID},
		Where: s.r.o.Where, Sorted: true,
	}, func(v [][]byte) error {
		raw, _ := rawID(column, v[0])
		id := hashID(string(outbox.AppendHeaderValue(nil, raw)))
		if there = there || id == *s.latest; !there && s.outcomes[id] == missing {
			before = append(before, id)
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case !there || len(before) > 0 && len(before) != gone:
		return refuse(codeRemoved, fmt.Sprintf("the repair that did not finish has published %d events "+
			"that are not in stream %s any more, and %d rows that it may have published are in no message: "+
			"which of them it has can't be told", gone, s.r.cfg.Stream, len(before)),
			"Give the --where that it was begun with, or a condition that holds for the row of the "+
				"stream's newest message and for none that comes before that, by document and key")
	}
	for _, id := range before {
		s.set(id, inStream)
	}
	if len(before) > 0 {
		s.replaced = uint64(gone)
	}
	return nil
}
