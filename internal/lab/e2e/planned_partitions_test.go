package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// partitioned makes an outbox table with a list of partitions, of which a row of another table says which one is written to.
func partitioned(t *testing.T) func(*pgx.Conn) {
	return func(conn *pgx.Conn) {
		t.Helper()
		mustExec(t, conn, "CREATE TABLE turn (part int NOT NULL)")
		mustExec(t, conn, "INSERT INTO turn VALUES (2)")
		mustExec(t, conn, "CREATE FUNCTION turn() RETURNS int LANGUAGE sql VOLATILE AS 'SELECT part FROM turn'")
		mustExec(t, conn, `CREATE TABLE outbox (part int NOT NULL DEFAULT turn(), id uuid DEFAULT gen_random_uuid(), doc_id text NOT NULL,
			actor_id text NOT NULL, counter bigint NOT NULL,
			seq_key text NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED,
			payload jsonb NOT NULL) PARTITION BY LIST (part)`)
		mustExec(t, conn, "CREATE TABLE part_1 PARTITION OF outbox FOR VALUES IN (1)")
		mustExec(t, conn, "CREATE TABLE part_2 PARTITION OF outbox FOR VALUES IN (2)")
	}
}

// TestPartitions: partitions are made, attached, detached and attached again while rows flow. Rows arrive by way of the parent, and of the
// partition itself. A partition that comes back with its rows does not publish them again.
func TestPartitions(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	// Without commit timestamps: some rows are put back for the comparison.
	p := underLoad(t, pgtest.Server(t), ns.URL(), "parts", 500, partitioned(t))
	const drop = 8 // the round in which a partition is dropped, while outflow is away
	var detached []string
	for i := 3; i < 12; i++ {
		// The next one is ready before the rows are: made outside, then attached, which locks the parent for a moment only.
		name := fmt.Sprintf("part_%d", i)
		mustExec(t, p.conn, fmt.Sprintf("CREATE TABLE %s (LIKE outbox INCLUDING GENERATED INCLUDING DEFAULTS)", name))
		if i%3 == 0 { // with a row that nobody published
			mustExec(t, p.conn, fmt.Sprintf("INSERT INTO %s (part, doc_id, actor_id, counter, payload) VALUES (%d, 'brought along', 'x', %[2]d, '[]')", name, i))
		}
		mustExec(t, p.conn, fmt.Sprintf("ALTER TABLE outbox ATTACH PARTITION %s FOR VALUES IN (%d)", name, i))
		if i == drop-1 { // what is written now is read when its partition is gone
			p.kill()
			p.written(200)
		}
		mustExec(t, p.conn, fmt.Sprintf("UPDATE turn SET part = %d", i))
		mustExec(t, p.conn, "BEGIN; LOCK TABLE outbox IN SHARE MODE; COMMIT") // who still writes to the old one has ended
		p.written(100)
		old := fmt.Sprintf("part_%d", i-2)
		concurrently := ""
		if i%2 == 0 {
			concurrently = " CONCURRENTLY"
		}
		mustExec(t, p.conn, fmt.Sprintf("ALTER TABLE outbox DETACH PARTITION %s%s", old, concurrently))
		if i == drop {
			mustExec(t, p.conn, "CREATE TABLE kept AS SELECT part, id, doc_id, actor_id, counter, payload FROM "+old)
			mustExec(t, p.conn, "DROP TABLE "+old)
			p.start()
		} else {
			detached = append(detached, old)
		}
		if p.child.Running() {
			p.publishing()
		}
	}
	p.load.ending.Store(true)
	p.load.wait(t)
	written := int(p.load.written.Load())
	mustExec(t, p.conn, "INSERT INTO part_11 (part, doc_id, actor_id, counter, payload) VALUES (11, 'direct', 'x', 1, '[]')")
	awaitMessages(t, js(t, ns.URL()), p.stream, written+1)
	for _, name := range detached {
		mustExec(t, p.conn, fmt.Sprintf("ALTER TABLE outbox ATTACH PARTITION %s FOR VALUES IN (%s)", name, strings.TrimPrefix(name, "part_")))
	}
	row(t, p.conn, "last", 1, "{}")
	awaitMessages(t, js(t, ns.URL()), p.stream, written+2)
	if code := p.term(); code != 0 {
		t.Errorf("stop: exit code %d", code)
	}
	// For the comparison: what was published of the partition that is gone, and what was not to be published.
	mustExec(t, p.conn, fmt.Sprintf("CREATE TABLE part_%d PARTITION OF outbox FOR VALUES IN (%[1]d)", drop-2))
	mustExec(t, p.conn, "INSERT INTO outbox (part, id, doc_id, actor_id, counter, payload) SELECT * FROM kept")
	mustExec(t, p.conn, "DELETE FROM outbox WHERE doc_id = 'brought along'")
	p.complete()
}
