package publish

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// awaitMetric waits until a counter has reached a value. What is read again, by another session, is counted
// again.
func awaitMetric(o *harness.Outflow, name string, least float64) {
	o.T.Helper()
	harness.Eventually(o.T, name, func() error {
		if got := harness.Metric(o.T, o, name); got < least {
			return fmt.Errorf("%v, want %v", got, least)
		}
		return nil
	})
}

// TestRowsWithoutAMappedColumnArePoison: a mapped column had another name while rows were written. The rows
// are poison like any other: outflow run stops with exit code 5 or leaves dead letters in their places,
// inspect shows them and what follows. Two slots make the same of it, whether their sessions began before, or
// between; and while the table lacks the column still, nothing is made of its rows.
func TestRowsWithoutAMappedColumnArePoison(t *testing.T) {
	t.Parallel()
	ns, twinNATS := natstest.Server(t), natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		settings := []string{"REORDER_HORIZON=0s", "HEADERS=Note=note"}
		o, conn, url := harness.Install(t, pg, ns.URL(), "without", settings...)
		twin := harness.New(t, url, twinNATS.URL(), o.Slot+"twin", settings...)
		twin.UseStream(o.Stream)
		harness.Exec(t, conn, "CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, "+
			"payload jsonb, note text)")
		o.Init()
		twin.Init()
		n := 0
		add := func() {
			t.Helper()
			n++
			harness.Exec(t, conn, "INSERT INTO outbox VALUES ($1, 'doc', 'ann', $2, '{}', 'note')",
				fmt.Sprint("row ", n), n)
		}
		want := map[string]string{}
		renamed := func(column string, f func()) {
			t.Helper()
			harness.Exec(t, conn, fmt.Sprintf("ALTER TABLE outbox RENAME COLUMN %s TO was", column))
			want[fmt.Sprint("row ", n+1)] = column
			add()
			f()
			harness.Exec(t, conn, fmt.Sprintf("ALTER TABLE outbox RENAME COLUMN was TO %s", column))
		}
		add()
		renamed("payload", func() {})
		add()

		o.Start()
		o.MustEnd(5, "public.outbox", `id "row 2"`, `column "payload"`, "dead_letter")
		if all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream); len(all) != 1 {
			t.Fatalf("%d messages, want the one before", len(all))
		}
		out, errOut, code := o.Run("inspect", "--limit", "0")
		if code != 0 || !strings.Contains(out, `id="row 2" 0 bytes bad: column "payload"`) ||
			!strings.Contains(out, `id="row 3"`) {
			t.Errorf("inspect: exit code %d\n%s%s", code, out, errOut)
		}

		o.Set("SINK_ON_POISON=dead_letter")
		twin.Set("SINK_ON_POISON=dead_letter")
		o.Start()
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n)
		for _, column := range []string{"doc_id", "actor_id", "counter", "note"} {
			renamed(column, func() {
				// Not one dead letter as long as somebody may yet say what the column is called.
				o.MustEnd(3, column)
				if s, err := harness.JetStream(t, ns.URL()).Stream(t.Context(), o.Stream); err != nil ||
					s.CachedInfo().State.LastSeq != uint64(n-1) {
					t.Errorf("%s: %+v, %v", column, s.CachedInfo().State, err)
				}
				o.MustFail(3, []string{"run"}, column)
			})
			add()
			o.Start()
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n)
		}
		renamed("id", func() { // a row may have none
			o.MustEnd(3, `"id"`)
		})
		delete(want, fmt.Sprint("row ", n))
		o.Start()
		add()
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n)
		twin.Start() // it reads all of it at once
		harness.AwaitMessages(t, harness.JetStream(t, twinNATS.URL()), twin.Stream, n)

		all, others := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream), harness.Messages(t,
			harness.JetStream(t, twinNATS.URL()), twin.Stream)
		got := map[string]string{}
		sameBytes(t, all, others)
		for _, m := range all {
			if m.Header.Get("Outflow-Dead-Letter") == "" {
				continue
			}
			var body struct{ Reason, Detail, ID, Table string }
			harness.Must(t, json.Unmarshal(m.Data, &body))
			_, column, _ := strings.Cut(body.Detail, `"`)
			got[body.ID], _, _ = strings.Cut(column, `"`)
			if body.Reason != "undecodable" || body.Table != "public.outbox" {
				t.Errorf("dead letter %s", m.Data)
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("dead letters: %v, want %v", got, want)
		}
		for _, o := range []*harness.Outflow{o, twin} {
			o.MustStop(t)
		}
	})
}

// TestRowsWithoutTheirKeyColumnGetNoOtherKey: a key column that is not generated has another name from some
// row on. Its rows are not published with keys made of actor and counter instead.
func TestRowsWithoutTheirKeyColumnGetNoOtherKey(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "keyless", "REORDER_HORIZON=0s")
	harness.Exec(t, conn, "CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, "+
		"seq_key text NOT NULL, payload jsonb)")
	o.Init()
	o.Start()
	harness.Exec(t, conn, "INSERT INTO outbox VALUES ('row 1', 'doc', 'ann', 1, 'z', '{}')")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
	harness.Exec(t, conn, "ALTER TABLE outbox RENAME COLUMN seq_key TO was")
	harness.Exec(t, conn, "INSERT INTO outbox VALUES ('row 2', 'doc', 'ann', 2, 'y', '{}')")
	o.MustEnd(3, `"seq_key"`)
	if all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream); len(all) != 1 {
		t.Fatalf("%d messages, want the one with a key of its own: %v", len(all), all[1].Header)
	}
}
