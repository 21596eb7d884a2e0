package maintenance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestPartitionsComeAndGoAndPublishNoRowAgain: partitions are made, attached, detached and attached again
// while rows flow. Rows arrive by way of the parent, and of the partition itself. A partition that comes back
// with its rows does not publish them again.
func TestPartitionsComeAndGoAndPublishNoRowAgain(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	// Without commit timestamps: some rows are put back for the comparison.
	p := underLoad(t, pgtest.Server(t), ns.URL(), "parts", 500, harness.PartitionedTable(t))
	const drop = 8 // the round in which a partition is dropped, while outflow is away
	var detached []string
	for i := 3; i < 12; i++ {
		// The next one is ready before the rows are: made outside, then attached, which locks the parent for
		// a moment only.
		name := fmt.Sprintf("part_%d", i)
		harness.Exec(t, p.conn, fmt.Sprintf("CREATE TABLE %s (LIKE outbox INCLUDING GENERATED INCLUDING "+
			"DEFAULTS)", name))
		if i%3 == 0 { // with a row that nobody published
			harness.Exec(t, p.conn, fmt.Sprintf("INSERT INTO %s (part, doc_id, actor_id, counter, payload) "+
				"VALUES (%d, 'brought along', 'x', %[2]d, '[]')", name, i))
		}
		harness.Exec(t, p.conn, fmt.Sprintf("ALTER TABLE outbox ATTACH PARTITION %s FOR VALUES IN (%d)", name,
			i))
		if i == drop-1 { // what is written now is read when its partition is gone
			p.Kill()
			p.written(200)
		}
		harness.Exec(t, p.conn, fmt.Sprintf("UPDATE turn SET part = %d", i))
		// who still writes to the old one has ended
		harness.Exec(t, p.conn, "BEGIN; LOCK TABLE outbox IN SHARE MODE; COMMIT")
		p.written(100)
		old := fmt.Sprintf("part_%d", i-2)
		concurrently := ""
		if i%2 == 0 {
			concurrently = " CONCURRENTLY"
		}
		harness.Exec(t, p.conn, fmt.Sprintf("ALTER TABLE outbox DETACH PARTITION %s%s", old, concurrently))
		if i == drop {
			harness.Exec(t, p.conn, "CREATE TABLE kept AS SELECT part, id, doc_id, actor_id, counter, "+
				"payload FROM "+old)
			harness.Exec(t, p.conn, "DROP TABLE "+old)
			p.Start()
		} else {
			detached = append(detached, old)
		}
		if p.Process.Running() {
			p.publishing()
		}
	}
	p.load.Ending.Store(true)
	p.load.Wait(t)
	written := int(p.load.Written.Load())
	harness.Exec(t, p.conn, "INSERT INTO part_11 (part, doc_id, actor_id, counter, payload) VALUES (11, "+
		"'direct', 'x', 1, '[]')")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), p.Stream, written+1)
	for _, name := range detached {
		harness.Exec(t, p.conn, fmt.Sprintf("ALTER TABLE outbox ATTACH PARTITION %s FOR VALUES IN (%s)", name,
			strings.TrimPrefix(name, "part_")))
	}
	harness.Insert(t, p.conn, "last", 1, "{}")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), p.Stream, written+2)
	p.MustStop(t)
	// For the comparison: what was published of the partition that is gone, and what was not to be published.
	harness.Exec(t, p.conn, fmt.Sprintf("CREATE TABLE part_%d PARTITION OF outbox FOR VALUES IN (%[1]d)",
		drop-2))
	harness.Exec(t, p.conn, "INSERT INTO outbox (part, id, doc_id, actor_id, counter, payload) SELECT * "+
		"FROM kept")
	harness.Exec(t, p.conn, "DELETE FROM outbox WHERE doc_id = 'brought along'")
	p.complete()
}
