package publish

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

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// replicate makes a transaction as the apply worker of a subscription does: with an origin, and the commit
// time of the origin's clock.
func replicate(t *testing.T, conn *pgx.Conn, at time.Time, sql string, args ...any) {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	harness.Must(t, err)
	for _, sql := range []string{"SELECT pg_replication_origin_session_setup('elsewhere')",
		fmt.Sprintf("SELECT pg_replication_origin_xact_setup('0/1', '%s')", at.Format(time.RFC3339))} {
		_, err := tx.Exec(t.Context(), sql)
		harness.Must(t, err)
	}
	_, err = tx.Exec(t.Context(), sql, args...)
	harness.Must(t, err)
	harness.Must(t, tx.Commit(t.Context()))
	harness.Exec(t, conn, "SELECT pg_replication_origin_session_reset()")
}

// sameBytes compares two streams.
func sameBytes(t *testing.T, a, b []*oracle.Message) {
	t.Helper()
	if len(a) != len(b) {
		t.Fatalf("%d messages, the twin has %d", len(a), len(b))
	}
	for i, m := range a {
		if o := b[i]; m.Subject != o.Subject || !bytes.Equal(m.Data, o.Data) ||
			!maps.EqualFunc(m.Header, o.Header, slices.Equal) {
			t.Errorf("message %d: %s %v %s, the twin has %s %v %s", i+1, m.Subject, m.Header, m.Data,
				o.Subject, o.Header, o.Data)
		}
	}
}

func ids(all []*oracle.Message) (ids []string) {
	for _, m := range all {
		ids = append(ids, m.Outflow.ID)
	}
	return ids
}

// TestReplicatedTransactionsAreLeftOutUnlessOriginIsAny: what was replicated from elsewhere is published only
// where replication.origin is any, and neither its rows and messages nor its commit times have a part in the
// order otherwise. Two slots make the same of it. A record that is older than the setting goes on as it was,
// and init changes it.
func TestReplicatedTransactionsAreLeftOutUnlessOriginIsAny(t *testing.T) {
	t.Parallel()
	ns, twinNATS := natstest.Server(t), natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		settings := []string{"REORDER_HORIZON=24h", "REORDER_TICK=off", "SOURCE=both"}
		o, conn, url := harness.Install(t, pg, ns.URL(), "origin", settings...)
		twin := harness.New(t, url, twinNATS.URL(), o.Slot+"twin", settings...)
		twin.UseStream(o.Stream)
		harness.Exec(t, conn, "CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, "+
			"payload text)")
		harness.Exec(t, conn, "SELECT pg_replication_origin_create('elsewhere') WHERE "+
			"pg_replication_origin_oid('elsewhere') IS NULL")
		o.Init()
		twin.Init()
		o.Start()
		row := func(id string, counter int) (sql string) {
			return fmt.Sprintf("INSERT INTO outbox VALUES ('%s', 'doc', 'ann', %d, '{}')", id, counter)
		}
		const emitSettings = "SELECT pg_logical_emit_message(true, 'outflow.settings', $1)"
		atOnce := relay.Settings{Sort: outbox.BySeqKey, MaxEvents: 1000, MaxBytes: 1 << 20}
		late := time.Now().Add(48 * time.Hour).UTC() // later than the horizon
		other := harness.Connect(t, url)
		harness.Exec(t, conn, row("second", 2))
		replicate(t, other, late, row("foreign", 3))
		replicate(t, other, late, harness.EmitEvent,
			`{"id":"foreign message","doc_id":"doc","actor_id":"ann","counter":4,"payload":1}`)
		replicate(t, other, late, "SELECT pg_logical_emit_message(true, 'outflow.tick', '')")
		replicate(t, other, late, emitSettings, atOnce.Content(o.Slot))
		replicate(t, other, late, emitSettings, atOnce.Content(twin.Slot))
		harness.Exec(t, conn, row("first", 1))
		harness.Exec(t, conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', $1), "+
			"pg_logical_emit_message(true, 'outflow.settings', $2)",
			atOnce.Content(o.Slot), atOnce.Content(twin.Slot))
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 2)
		all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
		if got := ids(all); !slices.Equal(got, []string{"first", "second"}) || all[0].Outflow.Of != 2 {
			t.Fatalf("messages %v, the first of %d in its window", got, all[0].Outflow.Of)
		}
		out, errOut, code := twin.Run("inspect", "--limit", "0")
		if code != 0 || strings.Contains(out, "foreign") || !strings.Contains(out, "first") {
			t.Errorf("inspect: exit code %d\n%s%s", code, out, errOut)
		}
		twin.Start()
		harness.AwaitMessages(t, harness.JetStream(t, twinNATS.URL()), twin.Stream, 2)
		sameBytes(t, all, harness.Messages(t, harness.JetStream(t, twinNATS.URL()), twin.Stream))

		// Another value is another order: init takes it, once everything is published.
		o.MustStop(t)
		o.Set("REPLICATION_ORIGIN=any", "REORDER_HORIZON=0s")
		o.MustFail(3, []string{"run"}, "replication.origin", "origin=own", "outflow init")
		o.Init()
		o.Start()
		o.AwaitReady()
		replicate(t, other, late, row("replicated", 5))
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 3)

		// As an Outflow left it that did not know the setting: its record has no such field. Nobody has to
		// say anything for it to go on.
		o.MustStop(t)
		if rec := recordOf(t, harness.JetStream(t, ns.URL()), o); strings.Contains(rec, "own_only") {
			t.Errorf("record: %s", rec)
		}
		o.Env = slices.DeleteFunc(o.Env, func(v string) bool {
			return strings.HasPrefix(v, "OUTFLOW_REPLICATION_ORIGIN=")
		})
		o.Init() // changes nothing
		o.Start()
		o.AwaitReady()
		replicate(t, other, late, row("as before", 6))
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 4)
		if !strings.Contains(o.Log.String(), "replication.origin is not set") {
			t.Error("it does not say that it goes on as before")
		}
		o.MustStop(t)
		o.Set("REPLICATION_ORIGIN=own")
		o.MustFail(3, []string{"run"}, "replication.origin", "origin=any")
		o.Init()
		o.Start()
		o.AwaitReady()
		replicate(t, other, late, row("not any more", 7))
		harness.Exec(t, conn, row("ours", 8))
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 5)
		if got, want := ids(harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)), []string{"first",
			"second", "replicated", "as before", "ours"}; !slices.Equal(got, want) {
			t.Errorf("messages %v, want %v", got, want)
		}
		for _, o := range []*harness.Outflow{o, twin} {
			o.MustStop(t)
		}
	})
}

func recordOf(t *testing.T, js jetstream.JetStream, o *harness.Outflow) string {
	t.Helper()
	kv, err := js.KeyValue(t.Context(), "outflow-"+o.Stream)
	harness.Must(t, err)
	e, err := kv.Get(t.Context(), o.Slot)
	harness.Must(t, err)
	return string(e.Value())
}

// TestServersThatReplicateToEachOtherPublishTheirOwnRows: two servers replicate their outbox to each other.
// The outflow of each publishes its own rows and none of the other's, and its twin the same bytes. From 16 on
// subscriptions leave out what was replicated (origin = none), before that row filters do.
func TestServersThatReplicateToEachOtherPublishTheirOwnRows(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			if major < 15 {
				t.Skip("neither origin filters nor row filters: what is replicated would go round for ever")
			}
			const table = "CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, " +
				"payload text, cluster int, PRIMARY KEY (id, cluster))"
			filter, option := "", "origin = none, "
			type side struct {
				pg      *pgserver.Server
				url     string
				conn    *pgx.Conn
				o, twin *harness.Outflow
			}
			var sides [2]*side
			for i, name := range []string{"east", "west"} {
				s := &side{pg: pgtest.Own(t, major)}
				sides[i] = s
				var err error
				s.url, err = s.pg.CreateDatabase(t.Context(), "app")
				harness.Must(t, err)
				s.conn = harness.Connect(t, s.url)
				harness.Exec(t, s.conn, table)
				if major < 16 {
					filter, option = fmt.Sprintf(" WHERE (cluster = %d)", i), ""
				}
				harness.Exec(t, s.conn, "CREATE PUBLICATION replicated FOR TABLE outbox"+filter)
				cluster := []string{fmt.Sprint("CLUSTER_ID=", i+1), "CLUSTER_COUNT=2"}
				s.o = harness.New(t, s.url, natstest.Server(t).URL(), name, cluster...)
				s.twin = harness.New(t, s.url, natstest.Server(t).URL(), name+"twin", cluster...)
				for _, o := range []*harness.Outflow{s.o, s.twin} {
					o.Init()
				}
				s.o.Start()
			}
			for i, s := range sides {
				from := sides[1-i]
				harness.Exec(t, s.conn, fmt.Sprintf("CREATE SUBSCRIPTION replicated CONNECTION '%s' "+
					"PUBLICATION replicated WITH (%scopy_data = false)", from.url, option))
			}
			const each = 200
			for n := range each {
				for i, s := range sides {
					harness.Exec(t, s.conn, "INSERT INTO outbox VALUES ($1, 'doc ' || $2 % 7, 'ann', $2, "+
						"'{}', $3)", fmt.Sprintf("%d-%d", i, n), n, i)
				}
			}
			for i, s := range sides {
				harness.Eventually(t, "all rows are on both sides", func() error {
					var n int
					if err := s.conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(
						&n); err != nil || n < 2*each {
						return fmt.Errorf("%d rows, %v", n, err)
					}
					return nil
				})
				// One more: what is before it would be in the stream.
				harness.Exec(t, s.conn, "INSERT INTO outbox VALUES ($1, 'last', 'ann', 0, '{}', $2)",
					fmt.Sprintf("%d-last", i), i)
				s.twin.Start()
				var streams [2][]*oracle.Message
				for k, o := range []*harness.Outflow{s.o, s.twin} {
					j := harness.JetStream(t, natsOf(o))
					harness.AwaitMessages(t, j, o.Stream, each+1)
					o.MustStop(t)
					streams[k] = harness.Messages(t, j, o.Stream)
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
				whole := harness.New(t, s.url, natstest.Server(t).URL(), fmt.Sprint("whole", i),
					fmt.Sprint("CLUSTER_ID=", i+1), "CLUSTER_COUNT=2")
				whole.MustFail(3, []string{"init", "--snapshot"}, "rows_replicated", "replicated")
				// What is missing here are rows that were written here: a repair has to be told.
				harness.Exec(t, s.conn, "INSERT INTO outbox VALUES ($1, 'last', 'ann', 1, '{}', $2)",
					fmt.Sprintf("%d-missing", i), i)
				harness.Exec(t, s.conn, "SELECT pg_drop_replication_slot($1)", s.o.Slot)
				s.o.MustFail(3, []string{"repair", "--accept", "slot_missing"}, "rows_replicated",
					"replicated", "--where")
				s.o.MustRun("repair", "--accept", "slot_missing", "--where", fmt.Sprint("cluster = ", i))
				repaired := ids(harness.Messages(t, harness.JetStream(t, natsOf(s.o)), s.o.Stream))
				if len(repaired) != each+2 || repaired[each+1] != fmt.Sprintf("%d-missing", i) {
					t.Errorf("side %d has %d messages, the last ones %v", i, len(repaired), repaired[each:])
				}
			}
		})
	}
}

// natsOf is where an installation publishes.
func natsOf(o *harness.Outflow) string {
	for _, v := range o.Env {
		if url, ok := strings.CutPrefix(v, "OUTFLOW_NATS_URL="); ok {
			return url
		}
	}
	return ""
}
