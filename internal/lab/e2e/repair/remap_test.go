package repair

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestTheMappingChangesOnlyByInit: which columns are read is settled by init. run with another mapping stops;
// init changes it only when all that was written before is published; from there on the new one rules, and
// nothing is lost or comes twice.
func TestTheMappingChangesOnlyByInit(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "remap")
	harness.Exec(t, conn, `CREATE TABLE outbox (id int PRIMARY KEY, doc_id text NOT NULL,
		actor_id text NOT NULL, counter bigint NOT NULL,
		seq_key text NOT NULL, payload jsonb NOT NULL, body text NOT NULL, tenant text NOT NULL)`)
	insert := func(from, to int) {
		t.Helper()
		harness.Exec(t, conn, `INSERT INTO outbox SELECT n, 'doc', 'x', n, lpad(n::text, 20, '0'),
			to_jsonb(n), 'body of ' || n, 'tenant'
			FROM generate_series($1::int, $2) n`, from, to)
	}
	o.Init()
	o.Start()
	insert(1, 50)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 50)
	other := []string{"COLUMNS_PAYLOAD=body", "COLUMNS_DOC_ID=tenant", "SUBJECT=outbox.{tenant}"}
	old := []string{"COLUMNS_PAYLOAD=payload", "COLUMNS_DOC_ID=doc_id", "SUBJECT=outbox.{doc_id}"}

	o.Set(other...)
	o.MustFail(3, []string{"init"}, "mapping of source and columns", "outflow is running", "Stop the writers")
	o.MustStop(t)
	insert(51, 60)
	o.MustFail(3, []string{"run"}, "payload=body", "payload=payload", "outflow init")
	o.MustFail(3, []string{"init"}, "cannot be changed yet", "10 events are not published")

	o.Set(old...)
	o.Start()
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 60)
	o.MustStop(t)
	o.Set(other...)
	o.Init()
	o.Init() // and again
	insert(61, 100)
	o.Start()
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 100)
	// A crash directly after: what is made again is made by the new mapping only.
	o.Kill()
	insert(101, 110)
	o.Start()
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 110)
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
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
			t.Errorf("message %d: row %s on %s: %s; want %s on %s", n, m.Outflow.ID, m.Subject, m.Data, data,
				subject)
		}
	}
	o.MustStop(t)
	o.Set("TABLE=public.events")
	harness.Exec(t, conn, "CREATE TABLE events (LIKE outbox)")
	harness.Exec(t, conn, "ALTER PUBLICATION "+o.Slot+" ADD TABLE events")
	o.MustFail(3, []string{"init"}, "public.outbox", "public.events", "slot")
}
