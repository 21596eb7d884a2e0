package e2e

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestRemap: which columns are read is settled by init. run with another mapping stops; init changes it only when all that was
// written before is published; from there on the new one rules, and nothing is lost or comes twice.
func TestRemap(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "remap")
	mustExec(t, conn, `CREATE TABLE outbox (id int PRIMARY KEY, doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
		seq_key text NOT NULL, payload jsonb NOT NULL, body text NOT NULL, tenant text NOT NULL)`)
	insert := func(from, to int) {
		t.Helper()
		mustExec(t, conn, `INSERT INTO outbox SELECT n, 'doc', 'x', n, lpad(n::text, 20, '0'), to_jsonb(n), 'body of ' || n, 'tenant'
			FROM generate_series($1::int, $2) n`, from, to)
	}
	o.init()
	o.start()
	insert(1, 50)
	awaitMessages(t, js(t, ns.URL()), o.stream, 50)
	other := []string{"COLUMNS_PAYLOAD=body", "COLUMNS_DOC_ID=tenant", "SUBJECT=outbox.{tenant}"}
	old := []string{"COLUMNS_PAYLOAD=payload", "COLUMNS_DOC_ID=doc_id", "SUBJECT=outbox.{doc_id}"}

	o.set(other...)
	o.fails(3, []string{"init"}, "mapping of source and columns", "outflow is running", "Stop the writers")
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	insert(51, 60)
	o.fails(3, []string{"run"}, "payload=body", "payload=payload", "outflow init")
	o.fails(3, []string{"init"}, "cannot be changed yet", "10 events are not published")

	o.set(old...)
	o.start()
	awaitMessages(t, js(t, ns.URL()), o.stream, 60)
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	o.set(other...)
	o.init()
	o.init() // and again
	insert(61, 100)
	o.start()
	awaitMessages(t, js(t, ns.URL()), o.stream, 100)
	// A crash directly after: what is made again is made by the new mapping only.
	o.kill()
	insert(101, 110)
	o.start()
	awaitMessages(t, js(t, ns.URL()), o.stream, 110)
	all := messages(t, js(t, ns.URL()), o.stream)
	if len(all) != 110 {
		t.Errorf("%d messages, want 110", len(all))
	}
	for i, m := range all {
		n := i + 1
		subject, data := "outbox.doc", fmt.Sprint(n)
		if n > 60 {
			subject, data = "outbox.tenant", fmt.Sprintf("body of %d", n)
		}
		if m.Outflow.ID != fmt.Sprint(n) || m.Subject != subject || string(m.Data) != data {
			t.Errorf("message %d: row %s on %s: %s; want %s on %s", n, m.Outflow.ID, m.Subject, m.Data, data, subject)
		}
	}
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	o.set("TABLE=public.events")
	mustExec(t, conn, "CREATE TABLE events (LIKE outbox)")
	mustExec(t, conn, "ALTER PUBLICATION "+o.slot+" ADD TABLE events")
	o.fails(3, []string{"init"}, "public.outbox", "public.events", "slot")
}
