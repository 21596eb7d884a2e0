package e2e

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// replicate makes a transaction as the apply worker of a subscription does: with an origin, and the commit time of the origin's clock.
func replicate(t *testing.T, conn *pgx.Conn, at time.Time, sql string, args ...any) {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	must(t, err)
	for _, sql := range []string{"SELECT pg_replication_origin_session_setup('elsewhere')", fmt.Sprintf("SELECT pg_replication_origin_xact_setup('0/1', '%s')", at.Format(time.RFC3339))} {
		_, err := tx.Exec(t.Context(), sql)
		must(t, err)
	}
	_, err = tx.Exec(t.Context(), sql, args...)
	must(t, err)
	must(t, tx.Commit(t.Context()))
	mustExec(t, conn, "SELECT pg_replication_origin_session_reset()")
}

// sameBytes compares two streams.
func sameBytes(t *testing.T, a, b []*oracle.Message) {
	t.Helper()
	if len(a) != len(b) {
		t.Fatalf("%d messages, the twin has %d", len(a), len(b))
	}
	for i, m := range a {
		if o := b[i]; m.Subject != o.Subject || !bytes.Equal(m.Data, o.Data) || !maps.EqualFunc(m.Header, o.Header, slices.Equal) {
			t.Errorf("message %d: %s %v %s, the twin has %s %v %s", i+1, m.Subject, m.Header, m.Data, o.Subject, o.Header, o.Data)
		}
	}
}

func ids(all []*oracle.Message) (ids []string) {
	for _, m := range all {
		ids = append(ids, m.Outflow.ID)
	}
	return ids
}

// TestForeignTransactions: what was replicated from elsewhere is published only where replication.origin is any, and neither its rows and
// messages nor its commit times have a part in the order otherwise. Two slots make the same of it. A record that is older than the
// setting goes on as it was, and init changes it.
func TestForeignTransactions(t *testing.T) {
	t.Parallel()
	ns, twinNATS := natstest.Server(t), natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		settings := []string{"REORDER_HORIZON=24h", "REORDER_TICK=off", "SOURCE=both"}
		o, conn, url := installation(t, pg, ns.URL(), "origin", settings...)
		twin := newOutflow(t, url, twinNATS.URL(), o.slot+"twin", settings...)
		twin.named(o.stream)
		mustExec(t, conn, "CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, payload text)")
		mustExec(t, conn, "SELECT pg_replication_origin_create('elsewhere') WHERE pg_replication_origin_oid('elsewhere') IS NULL")
		o.init()
		twin.init()
		o.start()
		row := func(id string, counter int) (sql string) {
			return fmt.Sprintf("INSERT INTO outbox VALUES ('%s', 'doc', 'ann', %d, '{}')", id, counter)
		}
		const emitSettings = "SELECT pg_logical_emit_message(true, 'outflow.settings', $1)"
		atOnce := relay.Settings{Sort: outbox.BySeqKey, MaxEvents: 1000, MaxBytes: 1 << 20}
		late := time.Now().Add(48 * time.Hour).UTC() // later than the horizon
		other := db(t, url)
		mustExec(t, conn, row("second", 2))
		replicate(t, other, late, row("foreign", 3))
		replicate(t, other, late, emitEvent, `{"id":"foreign message","doc_id":"doc","actor_id":"ann","counter":4,"payload":1}`)
		replicate(t, other, late, "SELECT pg_logical_emit_message(true, 'outflow.tick', '')")
		replicate(t, other, late, emitSettings, atOnce.Content(o.slot))
		replicate(t, other, late, emitSettings, atOnce.Content(twin.slot))
		mustExec(t, conn, row("first", 1))
		mustExec(t, conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', $1), pg_logical_emit_message(true, 'outflow.settings', $2)",
			atOnce.Content(o.slot), atOnce.Content(twin.slot))
		awaitMessages(t, js(t, ns.URL()), o.stream, 2)
		all := messages(t, js(t, ns.URL()), o.stream)
		if got := ids(all); !slices.Equal(got, []string{"first", "second"}) || all[0].Outflow.Of != 2 {
			t.Fatalf("messages %v, the first of %d in its window", got, all[0].Outflow.Of)
		}
		out, errOut, code := twin.exec("inspect", "--limit", "0")
		if code != 0 || strings.Contains(out, "foreign") || !strings.Contains(out, "first") {
			t.Errorf("inspect: exit code %d\n%s%s", code, out, errOut)
		}
		twin.start()
		awaitMessages(t, js(t, twinNATS.URL()), twin.stream, 2)
		sameBytes(t, all, messages(t, js(t, twinNATS.URL()), twin.stream))

		// Another value is another order: init takes it, once everything is published.
		if code := o.term(); code != 0 {
			t.Fatalf("stop: exit code %d", code)
		}
		o.set("REPLICATION_ORIGIN=any", "REORDER_HORIZON=0s")
		o.fails(3, []string{"run"}, "replication.origin", "origin=own", "outflow init")
		o.init()
		o.start()
		o.ready()
		replicate(t, other, late, row("replicated", 5))
		awaitMessages(t, js(t, ns.URL()), o.stream, 3)

		// As an Outflow left it that did not know the setting: its record has no such field. Nobody has to say anything for it to go on.
		if code := o.term(); code != 0 {
			t.Fatalf("stop: exit code %d", code)
		}
		if rec := recordOf(t, js(t, ns.URL()), o); strings.Contains(rec, "own_only") {
			t.Errorf("record: %s", rec)
		}
		o.env = slices.DeleteFunc(o.env, func(v string) bool { return strings.HasPrefix(v, "OUTFLOW_REPLICATION_ORIGIN=") })
		o.init() // changes nothing
		o.start()
		o.ready()
		replicate(t, other, late, row("as before", 6))
		awaitMessages(t, js(t, ns.URL()), o.stream, 4)
		if !strings.Contains(o.log.String(), "replication.origin is not set") {
			t.Error("it does not say that it goes on as before")
		}
		if code := o.term(); code != 0 {
			t.Fatalf("stop: exit code %d", code)
		}
		o.set("REPLICATION_ORIGIN=own")
		o.fails(3, []string{"run"}, "replication.origin", "origin=any")
		o.init()
		o.start()
		o.ready()
		replicate(t, other, late, row("not any more", 7))
		mustExec(t, conn, row("ours", 8))
		awaitMessages(t, js(t, ns.URL()), o.stream, 5)
		if got, want := ids(messages(t, js(t, ns.URL()), o.stream)), []string{"first", "second", "replicated", "as before", "ours"}; !slices.Equal(got, want) {
			t.Errorf("messages %v, want %v", got, want)
		}
		for _, o := range []*outflow{o, twin} {
			if code := o.term(); code != 0 {
				t.Errorf("stop: exit code %d", code)
			}
		}
	})
}

func recordOf(t *testing.T, js jetstream.JetStream, o *outflow) string {
	t.Helper()
	kv, err := js.KeyValue(t.Context(), "outflow-"+o.stream)
	must(t, err)
	e, err := kv.Get(t.Context(), o.slot)
	must(t, err)
	return string(e.Value())
}

// TestReplicatedToEachOther: two servers replicate their outbox to each other. The outflow of each publishes its own rows and none of the
// other's, and its twin the same bytes.
func TestReplicatedToEachOther(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		if major < 16 { // a subscription there can't leave out what was replicated: it would go round for ever
			continue
		}
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			type side struct {
				pg      *pgserver.Server
				url     string
				conn    *pgx.Conn
				o, twin *outflow
			}
			var sides [2]*side
			for i, name := range []string{"east", "west"} {
				s := &side{pg: pgtest.Own(t, major)}
				sides[i] = s
				var err error
				s.url, err = s.pg.CreateDatabase(t.Context(), "app")
				must(t, err)
				s.conn = db(t, s.url)
				mustExec(t, s.conn, "CREATE TABLE outbox (id text PRIMARY KEY, doc_id text, actor_id text, counter bigint, payload text)")
				mustExec(t, s.conn, "CREATE PUBLICATION replicated FOR TABLE outbox")
				s.o = newOutflow(t, s.url, natstest.Server(t).URL(), name)
				s.twin = newOutflow(t, s.url, natstest.Server(t).URL(), name+"twin")
				for _, o := range []*outflow{s.o, s.twin} {
					o.init()
				}
				s.o.start()
			}
			for i, s := range sides {
				from := sides[1-i]
				mustExec(t, s.conn, fmt.Sprintf("CREATE SUBSCRIPTION replicated CONNECTION '%s' "+
					"PUBLICATION replicated WITH (origin = none, copy_data = false)", from.url))
			}
			const each = 200
			for n := range each {
				for i, s := range sides {
					mustExec(t, s.conn, "INSERT INTO outbox VALUES ($1, 'doc ' || $2 % 7, 'ann', $2, '{}')", fmt.Sprintf("%d-%d", i, n), n)
				}
			}
			for i, s := range sides {
				eventually(t, "all rows are on both sides", func() error {
					var n int
					if err := s.conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n); err != nil || n < 2*each {
						return fmt.Errorf("%d rows, %v", n, err)
					}
					return nil
				})
				// One more: what is before it would be in the stream.
				mustExec(t, s.conn, "INSERT INTO outbox VALUES ($1, 'last', 'ann', 0, '{}')", fmt.Sprintf("%d-last", i))
				s.twin.start()
				var streams [2][]*oracle.Message
				for k, o := range []*outflow{s.o, s.twin} {
					j := js(t, natsOf(o))
					awaitMessages(t, j, o.stream, each+1)
					if code := o.term(); code != 0 {
						t.Errorf("stop: exit code %d", code)
					}
					streams[k] = messages(t, j, o.stream)
				}
				sameBytes(t, streams[0], streams[1])
				seen := map[string]bool{}
				for _, id := range ids(streams[0]) {
					if !strings.HasPrefix(id, fmt.Sprint(i, "-")) || seen[id] {
						t.Errorf("side %d published %s", i, id)
					}
					seen[id] = true
				}
				if len(seen) != each+1 {
					t.Errorf("side %d published %d rows, want %d", i, len(seen), each+1)
				}
			}
		})
	}
}

// natsOf is where an installation publishes.
func natsOf(o *outflow) string {
	for _, v := range o.env {
		if url, ok := strings.CutPrefix(v, "OUTFLOW_NATS_URL="); ok {
			return url
		}
	}
	return ""
}
