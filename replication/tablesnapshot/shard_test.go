package tablesnapshot

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Where rows of a shard are read from the table, those of the others are not there.
func TestASnapshotReadsTheRowsOfItsShardOnly(t *testing.T) {
	t.Parallel()
	outboxdb.EachWithRowFilters(t, func(t *testing.T, srv *pgserver.Server) {
		d := newDatabase(t, srv)
		d.Exec("CREATE TABLE outbox (id int, doc_id text, payload jsonb)") // ids may repeat, and be missing
		d.Exec("INSERT INTO outbox SELECT n / 2, 'doc' || n % 7, '{}' FROM generate_series(2, 201) n")
		d.Exec("INSERT INTO outbox SELECT NULL, 'doc' || n % 7, '{}' FROM generate_series(1, 70) n")
		var none, double, alike, known int
		for k := range 2 {
			c := d.cfg
			c.Shard, c.ShardBy = relay.Shard{Index: k, Of: 2}, "doc_id"
			r, err := OpenReader(within(t), c)
			must.Succeed(t, err)
			if err := r.LoadKnown(within(t), func(add func(...IDHash) error) error {
				return add(IDHash(outbox.HeaderIDSum("v=1 id=7 key=")))
			}); err != nil {
				t.Fatal(err)
			}
			s, err := r.Snapshot(within(t), "")
			must.Succeed(t, err)
			defer s.Close()
			q := Query{Mapping: relay.Mapping{Doc: "doc_id"}, ID: "id", SkipKnown: true}
			without, err := s.Count(within(t), q)
			must.Succeed(t, err)
			q.SkipKnown = false
			all, err := s.Count(within(t), q)
			must.Succeed(t, err)
			known += all - without
			missing, twice, err := s.CheckIDs(within(t), "id")
			if err != nil || missing%10 != 0 {
				t.Error(missing, twice, err)
			}
			none, double = none+missing, double+twice
			for doc := range 7 {
				n, err := s.CountAt(within(t), q, Cursor{Doc: fmt.Sprint("doc", doc)})
				if err != nil || n != 0 && n != 10 {
					t.Error(n, err)
				}
				alike += n
			}
		}
		if none != 70 || alike != 70 || double > 100 || known != 2 {
			t.Errorf("%d rows without an id, %d found by place (want 70), %d ids twice, %d rows known "+
				"(want 2)", none, alike, double, known)
		}
	})
}
