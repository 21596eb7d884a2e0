package publish

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// The three shapes of tables that the documentation has sample files for, by mapping alone: the tables exist,
// with their own names, and the relay's habits (marking rows as published, deleting them) publish nothing.

func TestTheSampleMappingOfATableOfOperationsWorks(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	url := pgtest.Database(t, pgtest.Server(t))
	conn := harness.Connect(t, url)
	harness.Exec(t, conn, `CREATE TABLE outbox (id bigint GENERATED ALWAYS
		AS IDENTITY PRIMARY KEY, doc_id text NOT NULL, actor_id text NOT NULL,
		counter bigint NOT NULL, seq_key text NOT NULL, payload jsonb NOT NULL,
		created_at timestamptz NOT NULL DEFAULT now(),
		published_at timestamptz)`)
	o := harness.New(t, url, ns.URL(), harness.SlotName("crdt"))
	useSample(o, t, "crdt", "OPS")
	o.Init()
	o.Start()
	o.AwaitReady()

	ops, err := recording.Load(recording.FriendsForever)
	harness.Must(t, err)
	ops = ops[:600]
	written := writeReversed(t, conn, ops, 5)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, len(ops))
	texts := column(t, conn, "SELECT id::text, payload::text FROM outbox")
	ids := column(t, conn, "SELECT seq_key, id::text FROM outbox")

	// What an ordinary relay does with its table.
	harness.Exec(t, conn, "UPDATE outbox SET published_at = now()")
	harness.Exec(t, conn, "DELETE FROM outbox WHERE counter % 2 = 0")
	harness.Exec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, seq_key, payload) VALUES ('the "+
		"end', 'x', 1, 'x:1', '{}')")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, len(ops)+1)
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
	if len(all) != len(ops)+1 || all[len(ops)].Subject != "ops.the=20end" {
		t.Fatalf("%d messages, the last on %s; want %d and the row that was written last", len(all),
			all[len(all)-1].Subject, len(ops)+1)
	}
	// sort: commit. The places are those of the commits, and each actor's own operations ascend in the places
	// that they occupy.
	next := map[string]int64{}
	for i, op := range written {
		m := all[i]
		next[op.Actor]++
		key := fmt.Sprintf("%s:%020d", op.Actor, next[op.Actor])
		if m.Outflow.Key != key || m.Subject != "ops."+op.Doc || m.Outflow.ID != ids[key] ||
			string(m.Data) != texts[ids[key]] {
			t.Fatalf("message %d: subject %s, header %v, data %s; want key %s of row %s", i, m.Subject,
				&m.Outflow, m.Data, key, ids[key])
		}
	}
}

// writeReversed writes operations in transactions of n, each transaction's in reverse, and returns them in
// the order of the table.
func writeReversed(t *testing.T, conn *pgx.Conn, ops []recording.Op, n int) (written []recording.Op) {
	t.Helper()
	for chunk := range slices.Chunk(ops, n) {
		chunk = slices.Clone(chunk)
		slices.Reverse(chunk)
		batch := &pgx.Batch{} // one implicit transaction
		for _, op := range chunk {
			batch.Queue("INSERT INTO outbox (doc_id, actor_id, counter, seq_key, payload) VALUES ($1, $2, "+
				"$3, $4, $5)",
				op.Doc, op.Actor, op.Counter, fmt.Sprintf("%s:%020d", op.Actor, op.Counter),
				string(op.Payload))
		}
		harness.Must(t, conn.SendBatch(t.Context(), batch).Close())
		written = append(written, chunk...)
	}
	return written
}

// column reads a query of two text columns into a map.
func column(t *testing.T, conn *pgx.Conn, sql string) map[string]string {
	t.Helper()
	rows, err := conn.Query(t.Context(), sql)
	harness.Must(t, err)
	all := map[string]string{}
	var k, v string
	if _, err := pgx.ForEachRow(rows, []any{&k, &v}, func() error { all[k] = v; return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

func TestTheSampleMappingOfATableOfTopicsWorks(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	url := pgtest.Database(t, pgtest.Server(t))
	conn := harness.Connect(t, url)
	harness.Exec(t, conn, `CREATE TABLE outbox (id bigint GENERATED ALWAYS
		AS IDENTITY PRIMARY KEY, topic text NOT NULL, message jsonb NOT NULL,
		state text NOT NULL DEFAULT 'pending', created_at timestamptz NOT NULL DEFAULT now(),
		processed_at timestamptz)`)
	o := harness.New(t, url, ns.URL(), harness.SlotName("topic"))
	useSample(o, t, "topic", "EVENTS")
	o.Init()
	o.Start()
	o.AwaitReady()

	want := []string{
		"events.orders.created", "events.orders.created.eu", "events.orders=20paid.=2A.=3E", "events.=",
		"events.=.=", "events._outflow.x", "events.orders.created",
	}
	for i, topic := range []string{"orders.created", "orders.created.eu", "orders paid.*.>", "", ".",
		"_outflow.x", "orders.created"} {
		harness.Exec(t, conn, "INSERT INTO outbox (topic, message) VALUES ($1, $2)", topic,
			fmt.Sprintf(`{"total":  %d.10}`, i))
		harness.Exec(t, conn,
			"UPDATE outbox SET state = 'done', processed_at = now() WHERE state = 'pending'")
	}
	harness.Exec(t, conn, "DELETE FROM outbox WHERE id = 1")
	harness.Exec(t, conn, "INSERT INTO outbox (topic, message) VALUES ('the.end', '[]')")
	want = append(want, "events.the.end")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, len(want))
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
	if got := subjects(all); !slices.Equal(got, want) {
		t.Fatalf("subjects %q, want %q", got, want)
	}
	for i, m := range all[:len(all)-1] {
		if data := fmt.Sprintf(`{"total": %d.10}`, i); string(m.Data) != data ||
			m.Outflow.ID != fmt.Sprint(i+1) || m.Outflow.Key != "" {
			t.Errorf("message %d: %v %s, want id %d and %s", i, &m.Outflow, m.Data, i+1, data)
		}
	}
}

func TestTheSampleMappingOfAPartitionedTableWorks(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	url := pgtest.Database(t, pgtest.Server(t))
	conn := harness.Connect(t, url)
	harness.Exec(t, conn, `CREATE TABLE domain_events (event_id bigint NOT NULL, aggregate_type text NOT NULL,
		aggregate_id text NOT NULL,
		event_type text, payload jsonb NOT NULL, partition_key text NOT NULL, created_at timestamptz NOT NULL,
		PRIMARY KEY (event_id, created_at))
		PARTITION BY RANGE (created_at)`)
	harness.Exec(t, conn,
		`CREATE TABLE events_jan PARTITION OF domain_events FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')`)
	harness.Exec(t, conn,
		`CREATE TABLE events_feb PARTITION OF domain_events FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')`)
	o := harness.New(t, url, ns.URL(), harness.SlotName("partitioned"))
	useSample(o, t, "partitioned", "DOMAIN")
	o.Init()
	o.Start()
	o.AwaitReady()

	const columns = "(event_id, aggregate_type, aggregate_id, event_type, payload, partition_key, created_at)"
	insert := func(table string, id int, eventType any, at string) {
		t.Helper()
		harness.Exec(t, conn, "INSERT INTO "+table+" "+columns+
			" VALUES ($1, 'order', 'a1', $2, $3, 'k.1', $4)", id, eventType, fmt.Sprintf(`{"id": %d}`, id),
			at)
	}
	insert("domain_events", 1, "Order\r\nPlaced", "2026-01-05")
	insert("domain_events", 2, nil, "2026-02-05")
	insert("events_jan", 3, "OrderPaid", "2026-01-06") // into the partition itself
	harness.Exec(t, conn,
		`CREATE TABLE events_mar PARTITION OF domain_events FOR VALUES FROM ('2026-03-01') TO ('2026-04-01')`)
	insert("domain_events", 4, "OrderPaid", "2026-03-05")
	// A table with its columns in another order, and a row: that is older than its attachment, so it is not
	// published.
	harness.Exec(t, conn, `CREATE TABLE events_apr (payload jsonb NOT NULL, partition_key text NOT NULL,
		created_at timestamptz NOT NULL, event_type text,
		gone text, aggregate_id text NOT NULL, aggregate_type text NOT NULL, event_id bigint NOT NULL,
		PRIMARY KEY (event_id, created_at))`)
	harness.Exec(t, conn, "ALTER TABLE events_apr DROP COLUMN gone")
	insert("events_apr", 1000, "Older", "2026-04-01")
	harness.Exec(t, conn, `ALTER TABLE domain_events ATTACH PARTITION events_apr FOR VALUES
			FROM ('2026-04-01') TO ('2026-05-01')`)
	insert("domain_events", 5, "OrderSent", "2026-04-05")
	insert("events_apr", 6, "OrderSent", "2026-04-06")
	// (An UPDATE that moved a row to another partition would be an insert in the WAL, which nobody can tell
	// from a new row.)
	harness.Exec(t, conn, "UPDATE domain_events SET event_type = 'Changed', created_at = created_at + "+
		"interval '1 day'")
	harness.Exec(t, conn, "DELETE FROM domain_events WHERE event_id = 3")
	harness.Exec(t, conn, "ALTER TABLE domain_events DETACH PARTITION events_jan")
	harness.Exec(t, conn, "DROP TABLE events_jan")
	insert("domain_events", 7, "OrderClosed", "2026-02-07")

	types := []string{"Order  Placed", "", "OrderPaid", "OrderPaid", "OrderSent", "OrderSent", "OrderClosed"}
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, len(types))
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
	if len(all) != len(types) {
		t.Fatalf("%d messages on %q, want %d", len(all), subjects(all), len(types))
	}
	for i, m := range all {
		id := fmt.Sprint(i + 1)
		_, typed := m.Header["Event-Type"]
		if m.Subject != "domain.order.k=2E1" || m.Outflow.ID != id || m.Header.Get("Event-Id") != id ||
			string(m.Data) != `{"id": `+id+`}` ||
			m.Header.Get("Event-Type") != types[i] || typed != (types[i] != "") {
			t.Errorf("message %s: subject %s, headers %v, data %s; want type %q", id, m.Subject, m.Header,
				m.Data, types[i])
		}
	}
}

// useSample makes it use one of the documented configuration files.
func useSample(o *harness.Outflow, t *testing.T, name, stream string) {
	t.Helper()
	file, err := filepath.Abs(harness.Path("docs", "samples", name+".yaml"))
	harness.Must(t, err)
	o.Set("CONFIG=" + file)
	o.Stream = stream
}
