package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestRowsWithoutAColumn: a mapped column had another name while rows were written. The rows are poison like any other: outflow run stops
// with exit code 5 or leaves dead letters in their places, inspect shows them and what follows. Two slots make the same of it, whether
// their sessions began before, or between; and while the table lacks the column still, nothing is made of its rows.
func TestRowsWithoutAColumn(t *testing.T) {
	t.Parallel()
	ns, twinNATS := natstest.Server(t), natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		settings := []string{"REORDER_HORIZON=0s", "HEADERS=Note=note"}
		o, conn, url := installation(t, pg, ns.URL(), "without", settings...)
		twin := newOutflow(t, url, twinNATS.URL(), o.slot+"twin", settings...)
		twin.named(o.stream)
		mustExec(t, conn, "CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, payload jsonb, note text)")
		o.init()
		twin.init()
		n := 0
		add := func() {
			t.Helper()
			n++
			mustExec(t, conn, "INSERT INTO outbox VALUES ($1, 'doc', 'ann', $2, '{}', 'note')", fmt.Sprint("row ", n), n)
		}
		want := map[string]string{}
		renamed := func(column string, f func()) {
			t.Helper()
			mustExec(t, conn, fmt.Sprintf("ALTER TABLE outbox RENAME COLUMN %s TO was", column))
			want[fmt.Sprint("row ", n+1)] = column
			add()
			f()
			mustExec(t, conn, fmt.Sprintf("ALTER TABLE outbox RENAME COLUMN was TO %s", column))
		}
		add()
		renamed("payload", func() {})
		add()

		o.start()
		o.ends(5, "public.outbox", `id "row 2"`, `column "payload"`, "dead_letter")
		if all := messages(t, js(t, ns.URL()), o.stream); len(all) != 1 {
			t.Fatalf("%d messages, want the one before", len(all))
		}
		out, errOut, code := o.exec("inspect", "--limit", "0")
		if code != 0 || !strings.Contains(out, `id="row 2" 0 bytes bad: column "payload"`) || !strings.Contains(out, `id="row 3"`) {
			t.Errorf("inspect: exit code %d\n%s%s", code, out, errOut)
		}

		o.set("SINK_ON_POISON=dead_letter")
		twin.set("SINK_ON_POISON=dead_letter")
		o.log.Reset()
		o.start()
		awaitMessages(t, js(t, ns.URL()), o.stream, n)
		for _, column := range []string{"doc_id", "actor_id", "counter", "note"} {
			renamed(column, func() {
				// Not one dead letter as long as somebody may yet say what the column is called.
				o.ends(3, column)
				if s, err := js(t, ns.URL()).Stream(t.Context(), o.stream); err != nil || s.CachedInfo().State.LastSeq != uint64(n-1) {
					t.Errorf("%s: %+v, %v", column, s.CachedInfo().State, err)
				}
				o.fails(3, []string{"run"}, column)
			})
			add()
			o.log.Reset()
			o.start()
			awaitMessages(t, js(t, ns.URL()), o.stream, n)
		}
		renamed("id", func() { // a row may have none
			o.ends(3, `"id"`)
		})
		delete(want, fmt.Sprint("row ", n))
		o.start()
		add()
		awaitMessages(t, js(t, ns.URL()), o.stream, n)
		twin.start() // it reads all of it at once
		awaitMessages(t, js(t, twinNATS.URL()), twin.stream, n)

		all, others := messages(t, js(t, ns.URL()), o.stream), messages(t, js(t, twinNATS.URL()), twin.stream)
		got := map[string]string{}
		sameBytes(t, all, others)
		for _, m := range all {
			if m.Header.Get("Outflow-Dead-Letter") == "" {
				continue
			}
			var body struct{ Reason, Detail, ID, Table string }
			must(t, json.Unmarshal(m.Data, &body))
			_, column, _ := strings.Cut(body.Detail, `"`)
			got[body.ID], _, _ = strings.Cut(column, `"`)
			if body.Reason != "undecodable" || body.Table != "public.outbox" {
				t.Errorf("dead letter %s", m.Data)
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("dead letters: %v, want %v", got, want)
		}
		for _, o := range []*outflow{o, twin} {
			if code := o.term(); code != 0 {
				t.Errorf("stop: exit code %d", code)
			}
		}
	})
}

// TestKeyColumnTakenAway: a key column that is not generated has another name from some row on. Its rows are not published with keys made
// of actor and counter instead.
func TestKeyColumnTakenAway(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "keyless", "REORDER_HORIZON=0s")
	mustExec(t, conn, "CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, seq_key text NOT NULL, payload jsonb)")
	o.init()
	o.start()
	mustExec(t, conn, "INSERT INTO outbox VALUES ('row 1', 'doc', 'ann', 1, 'z', '{}')")
	awaitMessages(t, js(t, ns.URL()), o.stream, 1)
	mustExec(t, conn, "ALTER TABLE outbox RENAME COLUMN seq_key TO was")
	mustExec(t, conn, "INSERT INTO outbox VALUES ('row 2', 'doc', 'ann', 2, 'y', '{}')")
	o.ends(3, `"seq_key"`)
	if all := messages(t, js(t, ns.URL()), o.stream); len(all) != 1 {
		t.Fatalf("%d messages, want the one with a key of its own: %v", len(all), all[1].Header)
	}
}
