package decoder

import (
	"fmt"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
)

// scenario is what a service and its operator do to a database, and how the outbox is read from it. Its
// events are in testdata/<events>.golden, the same for every version of PostgreSQL; edits, for the
// benchmarks, have none.
type scenario struct {
	name, events string
	since        int    // the first major that can play it
	publish      string // further publication options
	setup        string // before publication and slot
	steps        []string
	config       Config
}

// Two edits of the trace rustcode, of the sizes that the benchmarks are about.
const (
	edit200 = `[[25738, 171, "            // Usually the cursor will be discarded after one change, but for\n            // consistency of compound edits we'll update the cursor to point to\n            // the end of the new content."]]`
	edit1K  = `[[60043, 0, "                let current_item = self.cursor.current_item();\n                let (start, end) = C::split_item(current_item, self.item_offset);\n                // Move the cursor back to the start of the item we're\n                // splitting.\n                self.cursor.move_to_item_start(self.list.head.height, self.item_offset);\n                // This feels pretty inefficient; but its probably fine.\n                self.list.replace_item(&mut self.cursor, start, &mut self.notify);\n\n                // TODO: Consider concatenating end into contents then just call\n                // insert_at_iter once.\n                self.list.insert_at_iter(&mut self.cursor, &mut contents, &mut self.notify);\n\n                self.dbg_check_cursor_at(start_userpos, num_inserted_items);\n\n                self.list.insert_at_iter(&mut self.cursor, &mut iter::once(end), &mut self.notify);"]]`
)

// outboxTable is the table that init makes, and two columns more.
const outboxTable = `
CREATE TABLE outbox (
  id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL,
  counter bigint NOT NULL,
  seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20,
  '0')) STORED,
  payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(), event_type text);
CREATE TABLE note (id int PRIMARY KEY, body text);`

// inserts gives one statement with a row for each payload, the counters counting from first; actor is one
// digit.
func inserts(doc, actor string, first int, payloads ...string) string {
	var rows []string
	for i, p := range payloads {
		rows = append(rows, fmt.Sprintf("('00000000-0000-4000-800%s-%012d', '%s', '%s', %d, $op$%s$op$, "+
			"'2024-05-01 12:00:00.25+02', 'edit')",
			actor, first+i, doc, actor, first+i, p))
	}
	return "INSERT INTO outbox (id, doc_id, actor_id, counter, payload, created_at, event_type) VALUES " +
		strings.Join(rows, ", ")
}

func repeat(n int, s string) (all []string) {
	for range n {
		all = append(all, s)
	}
	return all
}

var scenarios = []scenario{
	{
		name: "table", events: "table", setup: outboxTable, steps: tableSteps, config: tableConfig,
	},
	{
		name: "table-published-key", events: "table", since: 18,
		publish: "publish_generated_columns = stored",
		setup:   outboxTable, steps: tableSteps, config: tableConfig,
	},
	{
		name: "changes", events: "changes",
		setup: `CREATE TABLE outbox (topic text, message bytea, obsolete int, partition_key varchar(40),
			seq int, event_type text);
			ALTER TABLE outbox REPLICA IDENTITY FULL`,
		steps: changeSteps,
		config: Config{
			ID: "seq", Extra: []string{"event_type"}, Slot: "outflow",
			Mapping: relay.Mapping{Table: "public.outbox", Doc: "partition_key", Actor: "topic",
				Counter: "seq", Payload: "message"},
		},
	},
	{
		name: "partitions", events: "partitions",
		setup: `
CREATE TABLE outbox (doc_id text, actor_id int, counter int, payload json,
note text) PARTITION BY HASH (doc_id);
CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE outbox_1 (note text, extra int, payload json, counter int, actor_id int, doc_id text);
ALTER TABLE outbox_1 DROP COLUMN extra;
ALTER TABLE outbox ATTACH PARTITION outbox_1 FOR VALUES WITH (MODULUS 2, REMAINDER 1);
ALTER TABLE outbox REPLICA IDENTITY FULL; ALTER TABLE outbox_0 REPLICA IDENTITY FULL;
ALTER TABLE outbox_1 REPLICA IDENTITY FULL`,
		steps: []string{
			`INSERT INTO outbox SELECT 'document ' || n % 5, n % 2, n, json_build_array(n, 0, 'a'), NULL
				FROM generate_series(1, 20) n`,
			`INSERT INTO outbox_0 SELECT 'document ' || n, 0, n, '[[1,0," "]]', 'by hand'
				FROM generate_series(1, 20) n
			 WHERE satisfies_hash_partition('outbox'::regclass, 2, 0, 'document ' || n)`,
			`UPDATE outbox SET note = 'seen'`,
			`TRUNCATE outbox_0`,
			"COPY outbox (doc_id, actor_id, counter, payload) FROM STDIN\ndocument " +
				"1\t7\t21\t[[0,1,\"\"]]\ndocument 2\t7\t22\t[[0,2,\"\"]]\n",
		},
		config: Config{
			Extra: []string{"note"}, Slot: "outflow",
			Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Actor: "actor_id",
				Counter: "counter", Key: "seq_key", Payload: "payload"},
		},
	},
	{
		name: "edits-200", setup: outboxTable, config: editsConfig,
		steps: []string{inserts("rustcode", "0", 1, repeat(20, edit200)...)},
	},
	{
		name: "edits-1k", setup: outboxTable, config: editsConfig,
		steps: []string{inserts("rustcode", "0", 1, repeat(20, edit1K)...)},
	},
}

var tableConfig = Config{
	ID: "id", Extra: []string{"created_at", "event_type"}, Slot: "outflow",
	Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Actor: "actor_id", Counter: "counter",
		Key: "seq_key", Payload: "payload"},
}

var editsConfig = Config{ID: "id", Extra: []string{"event_type"}, Slot: "outflow",
	Mapping: tableConfig.Mapping}

var tableSteps = []string{
	inserts("friendsforever", "0", 1, `[[0,0,"A"]]`),
	inserts("friendsforever", "0", 2, `[[1,0," "]]`, `[[2,0,"s"]]`, `[[3,0,"y"]]`),
	"COPY outbox (id, doc_id, actor_id, counter, payload, created_at) FROM STDIN\n" +
		"00000000-0000-4000-8000-000000000101\trustcode\t0\t4326\t" +
		"[[1094,0,\"÷\"]]\t2020-09-10 06:20:54+00\n" +
		"00000000-0000-4000-8000-000000000102\trustcode\t0\t-5\t[[15870,0,\"¿\"]]\t0044-03-15 00:00:00+00 " +
		"BC\n" +
		"00000000-0000-4000-8000-000000000103\t\t\t0\t[[31703,125,\"÷\"]]\tinfinity\n",
	`BEGIN`,
	inserts("friendsforever", "1", 1, `[[1,0,"n"]]`),
	`SAVEPOINT a`,
	inserts("friendsforever", "1", 900, `[["rolled back"]]`),
	`SAVEPOINT b`,
	inserts("friendsforever", "1", 901, `[["rolled back with a"]]`),
	`RELEASE SAVEPOINT b; ROLLBACK TO SAVEPOINT a`,
	inserts("friendsforever", "1", 2, `[[3,0," "]]`),
	`SAVEPOINT c`,
	inserts("friendsforever", "1", 3, `[[3,0,"e"]]`),
	`RELEASE SAVEPOINT c; COMMIT`,
	`BEGIN`, inserts("friendsforever", "1", 902, `[["rolled back"]]`), `ROLLBACK`,
	`INSERT INTO note VALUES (1, 'no event')`,
	`BEGIN; INSERT INTO note VALUES (2, 'beside an event')`, inserts("friendsforever", "1", 4, `[[4,0,"p"]]`),
	`DELETE FROM note; COMMIT`,
	// gone again in its own transaction: an event all the same
	`BEGIN`, inserts("friendsforever", "1", 5, `[[5,0,"i"]]`),
	`DELETE FROM outbox WHERE counter = 5 AND actor_id = '1'; COMMIT`,
	`UPDATE outbox SET payload = '[]' WHERE counter = 1; DELETE FROM outbox WHERE counter = 2`,
	`ALTER TABLE note REPLICA IDENTITY FULL; UPDATE note SET body = 'seen'; UPDATE outbox
		SET event_type = 'seen'; DELETE FROM outbox;
	 TRUNCATE outbox, note`,
	// a value that is stored out of line
	`INSERT INTO outbox (id, doc_id, actor_id, counter, payload, created_at)
	 SELECT '00000000-0000-4000-8000-000000000104', 'large', '0', 1, json_agg(md5(n::text)), '2024-02-29'
	 FROM generate_series(1, 150) n`,
	// a transaction that is spilled or has many subtransactions comes as any other
	`DO $$ BEGIN FOR n IN 1..12 LOOP
	   BEGIN INSERT INTO outbox (id, doc_id, actor_id, counter, payload, created_at)
	     VALUES ('00000000-0000-4000-8000-000000000105', 'subtransactions', '0', n, to_jsonb(n),
	     '2024-02-29 23:59:59.999999+00');
	   EXCEPTION WHEN unique_violation THEN NULL; END;
	 END LOOP; END $$`,
	`SELECT pg_logical_emit_message(true, 'outflow.tick', 'tick')`,
	`SELECT pg_logical_emit_message(false, 'outflow.tick', 'not an input')`,
	`SELECT pg_logical_emit_message(true, 'heartbeat', 'not an input')`,
	`SELECT pg_logical_emit_message(true, 'outflow.settings',
		'v=1 slot=outflow horizon=5ms sort=commit max_events=512 max_bytes=1048576')`,
	`SELECT pg_logical_emit_message(true, 'outflow.settings',
		'v=1 slot=another horizon=5ms sort=commit max_events=512 max_bytes=1048576')`,
	`SELECT pg_logical_emit_message(true, 'outflow.settings', 'v=1 slot=outflow horizon=soon')`,
	`BEGIN; SELECT pg_logical_emit_message(true, 'outflow.tick', '')`,
	inserts("friendsforever", "1", 6, `[[6,0,"c"]]`), `COMMIT`,
	`BEGIN; SELECT pg_logical_emit_message(false, 'outflow.tick', 'survives')`,
	inserts("friendsforever", "1", 903, `[["rolled back"]]`), `ROLLBACK`,
	// NULL where the table allows it
	`ALTER TABLE outbox ALTER payload DROP NOT NULL, ALTER doc_id DROP NOT NULL, ALTER actor_id DROP NOT NULL,
		ALTER seq_key DROP NOT NULL`,
	`INSERT INTO outbox (id, counter, created_at) VALUES ('00000000-0000-4000-8000-000000000106', 7,
		'-infinity')`,
}

// changeSteps alter the table between rows and inside a transaction.
var changeSteps = []string{
	`INSERT INTO outbox VALUES ('edits', '\x00ff', 1, 'sveltecomponent', 1, 'edit')`,
	`ALTER TABLE outbox DROP COLUMN obsolete`,
	`INSERT INTO outbox VALUES ('edits', ' ', 'sveltecomponent', 2, 'edit')`,
	`BEGIN; ALTER TABLE outbox ADD COLUMN seen bool DEFAULT true`,
	`INSERT INTO outbox VALUES ('edits', '\x5b5b372c302c2220225d5d', 'sveltecomponent', 3, 'edit')`,
	`ALTER TABLE outbox ALTER event_type TYPE varchar(20), ALTER seq TYPE bigint, ALTER message TYPE text
		USING encode(message, 'escape')`,
	`INSERT INTO outbox VALUES ('edits', '[[8,0,"l"]]', 'sveltecomponent', 4, 'edit', false); COMMIT`,
	`ALTER TABLE outbox ADD COLUMN event_type_2 text; UPDATE outbox SET event_type_2 = 'changed';
		ALTER TABLE outbox DROP COLUMN event_type;
	 ALTER TABLE outbox RENAME COLUMN event_type_2 TO event_type`,
	`INSERT INTO outbox VALUES ('edits', '[[9,0,"a"]]', 'sveltecomponent', 5, false, 'renamed')`,
	`ALTER TABLE outbox RENAME TO outbox_renamed`,
	`INSERT INTO outbox_renamed VALUES ('edits', '[[10,0,"n"]]', 'sveltecomponent', 6, true, 'renamed')`,
	`TRUNCATE outbox_renamed`,
	`INSERT INTO outbox_renamed VALUES (NULL, '', '', NULL, NULL, NULL)`,
}
