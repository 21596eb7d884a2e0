package publish

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestPoisonStopsOutflowUntilItIsCured: exit code 5 names the row; what comes before it is in the stream;
// with the cure it goes on where it was.
func TestPoisonStopsOutflowUntilItIsCured(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t, natsserver.Options{MaxPayload: 8 << 20})
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "poison", "REORDER_HORIZON=0s")
	o.Init()
	o.Start()
	o.AwaitReady()
	for i := range 20 {
		harness.Insert(t, conn, "before", i, "{}")
	}
	large := fmt.Sprintf(`"%s"`, strings.Repeat("☃", 400_000))
	harness.Insert(t, conn, "large", 100, large)
	harness.Insert(t, conn, "after", 101, "{}")
	id := harness.Value[string](t, conn, "SELECT id::text FROM outbox WHERE doc_id = 'large'")
	o.MustEnd(5, id, "1200002 bytes", "sink.max_payload", "1048576", "dead_letter")
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
	if len(all) != 20 {
		t.Errorf("%d messages before the row, want 20", len(all))
	}

	o.Start()
	o.MustEnd(5, id) // no way round it
	o.Set("SINK_MAX_PAYLOAD=2MiB")
	o.Start()
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 22)
	o.MustBeComplete(conn, ns.URL())
}

// TestADeadLetterTakesThePlaceOfAPoisonedRow: a message about the row in the row's place, and nothing else is
// held up.
func TestADeadLetterTakesThePlaceOfAPoisonedRow(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "letters", "REORDER_HORIZON=0s",
		"SINK_ON_POISON=dead_letter",
		"SINK_MAX_PAYLOAD=4KiB", "HEADERS=Note=note", "SUBJECT=docs.{doc_id}.{a}.{b}.{c}.{d}.{e}.{f}.{g}.{h}")
	harness.Exec(t, conn, `CREATE TABLE outbox (id int, doc_id text, actor_id text, counter bigint,
		seq_key text, payload text, note text,
		a text, b text, c text, d text, e text, f text, g text, h text)`)
	o.Init()
	o.Start()
	o.AwaitReady()
	insert := func(id int, column string, value any) {
		t.Helper()
		// One column of a good row is another value.
		harness.Exec(t, conn, fmt.Sprintf(`INSERT INTO outbox SELECT (jsonb_populate_record(NULL::outbox,
			'{"id": %d, "doc_id": "doc", "actor_id": "x", "counter": 1, "seq_key": "x:%d", "payload": "{}"}'::jsonb || jsonb_build_object($1::text, $2::text))).*`, id, id), column, value)
	}
	insert(1, "note", "fine")
	insert(2, "doc_id", nil)
	insert(3, "seq_key", nil)
	insert(4, "payload", nil)
	insert(5, "payload", strings.Repeat("x", 5000))
	insert(6, "note", strings.Repeat("y", 20_000))
	long := strings.Repeat("z", 180)
	harness.Exec(t, conn, "INSERT INTO outbox SELECT 7, 'doc', 'x', 1, 'x:7', '{}', NULL, $1, $1, $1, $1, "+
		"$1, $1, $1, $1", long)
	insert(8, "note", "fine too")
	insert(9, "actor_id", nil) // an actor may be NULL
	want := []string{"", "null_doc_id", "null_seq_key", "null_payload", "too_large", "headers_too_large",
		"subject_too_long", "", ""}
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, len(want))
	var got []string
	for i, m := range harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream) {
		reason := m.Header.Get("Outflow-Dead-Letter")
		got = append(got, reason)
		if m.Outflow.ID != fmt.Sprint(i+1) {
			t.Errorf("message %d is about row %s", i+1, m.Outflow.ID)
		}
		if reason == "" {
			if !strings.HasPrefix(m.Subject, "docs.doc.") || string(m.Data) != "{}" {
				t.Errorf("row %d: subject %s, data %s", i+1, m.Subject, m.Data)
			}
			continue
		}
		var body struct {
			Reason, Table, ID string
			Position          json.RawMessage
			Bytes             int `json:"payload_bytes"`
		}
		if err := json.Unmarshal(m.Data, &body); err != nil {
			t.Fatalf("dead letter %d: %v: %s", i+1, err, m.Data)
		}
		if m.Subject != o.Stream+".dead_letter" || body.Reason != reason || body.Table != "public.outbox" ||
			body.ID != m.Outflow.ID || len(body.Position) == 0 || strings.Contains(string(m.Data), "xxxxx") {
			t.Errorf("dead letter %d on %s: %s", i+1, m.Subject, m.Data)
		}
		if n := harness.Metric(t, o, fmt.Sprintf("outflow_dead_letters_total{reason=%q}", reason)); n < 1 {
			t.Errorf("the metric has %v dead letters with %s", n, reason)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("reasons %q, want %q", got, want)
	}
}

// TestANullThatTheMessageNeedsStopsOutflow: NULL where the message needs a value, and the table permits it.
func TestANullThatTheMessageNeedsStopsOutflow(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	for name, values := range map[string]string{"doc_id": "NULL, 'x:1', '{}'", "seq_key": "'doc', NULL, '{}'",
		"payload": "'doc', 'x:1', NULL"} {
		t.Run(name, func(t *testing.T) {
			o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "null", "REORDER_HORIZON=0s")
			harness.Exec(t, conn, "CREATE TABLE outbox (id int, doc_id text, seq_key text, payload jsonb)")
			o.Init()
			o.Start()
			harness.Exec(t, conn, "INSERT INTO outbox VALUES (1, 'doc', 'x:0', '{}')")
			harness.Exec(t, conn, "INSERT INTO outbox VALUES (2, "+values+")")
			o.MustEnd(5, `id "2"`, name+" is NULL", "NOT NULL", "public.outbox")
			if n := len(harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)); n != 1 {
				t.Errorf("%d messages, want the one before", n)
			}
		})
	}
}

// subjects returns the subjects of messages.
func subjects(all []*oracle.Message) []string {
	out := make([]string, len(all))
	for i, m := range all {
		out[i] = m.Subject
	}
	return out
}
