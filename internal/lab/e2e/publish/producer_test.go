package publish

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/producer"
)

// produced is an event that was enqueued and must be in the stream.
type produced struct {
	id string
	producer.Event
}

// write enqueues operations in calls of up to 7, by turns over pgx and database/sql, and rolls back a call of
// each kind in between.
func write(t *testing.T, url string, o *producer.Outbox, ops []recording.Op) (all []produced) {
	t.Helper()
	conn := harness.Connect(t, url)
	std, err := sql.Open("pgx", url)
	harness.Must(t, err)
	defer std.Close() //nolint:errcheck // the test is over
	for turn := 0; len(ops) > 0; turn++ {
		n := min(len(ops), turn%7+1)
		events := make([]producer.Event, n)
		for i, op := range ops[:n] {
			events[i] = producer.Event{Document: op.Doc, Actor: op.Actor, Counter: op.Counter,
				Payload: op.Payload}
		}
		keep := turn%10 > 1
		receipts, err := call(t.Context(), conn, std, o, events, turn%2 == 0, keep)
		harness.Must(t, err)
		if !keep {
			continue
		}
		for i, r := range receipts {
			events[i].Counter = r.Counter
			all = append(all, produced{r.ID, events[i]})
		}
		ops = ops[n:]
	}
	return all
}

// call is one transaction of a service.
func call(ctx context.Context, conn *pgx.Conn, std *sql.DB, o *producer.Outbox, events []producer.Event,
	native, keep bool) (receipts []producer.Receipt, err error) {
	if native {
		tx, err := conn.Begin(ctx)
		if err != nil {
			return nil, err
		}
		receipts, err = o.Enqueue(ctx, tx, events...)
		if err != nil || !keep {
			return receipts, joined(err, tx.Rollback(ctx))
		}
		return receipts, tx.Commit(ctx)
	}
	tx, err := std.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	receipts, err = o.EnqueueSQL(ctx, tx, events...)
	if err != nil || !keep {
		return receipts, joined(err, tx.Rollback())
	}
	return receipts, tx.Commit()
}

func joined(err, after error) error {
	if err != nil {
		return err
	}
	return after
}

// mustHave compares the stream with what was produced, in the order of the calls: subject, id, key and data.
// The trace's operations of one actor are written in the order of their counters, so `sort: commit` changes
// no place.
func mustHave(o *harness.Outflow, t *testing.T, natsURL string, want []produced) {
	t.Helper()
	harness.AwaitMessages(t, harness.JetStream(t, natsURL), o.Stream, len(want))
	all := harness.Messages(t, harness.JetStream(t, natsURL), o.Stream)
	if len(all) != len(want) {
		t.Fatalf("%d messages, want %d", len(all), len(want))
	}
	for i, w := range want {
		m, key := all[i], fmt.Sprintf("%s:%020d", w.Actor, w.Counter)
		if m.Outflow.ID != w.id || m.Outflow.Key != key || m.Subject != "outbox."+w.Document ||
			string(m.Data) != string(w.Payload) {
			t.Fatalf("message %d: %s %v %.200q; want id %s, key %s and %.200q", i, m.Subject, &m.Outflow,
				m.Data, w.id, key, w.Payload)
		}
	}
}

// TestTheStreamIsWhatTheProducerEnqueued: what a service enqueues through package producer is the stream: in
// a table whose payload is json (byte for byte) and without a table, on each major; the counters that it does
// not have are taken for it.
func TestTheStreamIsWhatTheProducerEnqueued(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	ops, err := recording.Load(recording.FriendsForever)
	harness.Must(t, err)
	ops = slices.Clone(ops[:2000])
	payloads := documents(t)
	for i := range ops[:300] { // among them what a careless hand would change
		if p := payloads[i%len(payloads)]; len(p) < 10_000 {
			ops[i].Payload = []byte(p)
		}
	}
	ops[300].Payload = []byte(strings.Repeat("[", 999) + strings.Repeat("]", 999))
	ops[301].Payload = []byte(`"\u0000\ud834"`)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		ns := natstest.Server(t, natsserver.Options{MaxPayload: 8 << 20})
		t.Run("json", func(t *testing.T) {
			t.Parallel()
			o, conn, url := harness.Install(t, pg, ns.URL(), "producer_json", "REORDER_SORT=commit",
				"REORDER_HORIZON=0")
			harness.Exec(t, conn, `CREATE TABLE outbox (id bigint GENERATED ALWAYS
				AS IDENTITY PRIMARY KEY, doc_id text NOT NULL, actor_id text NOT NULL,
				counter bigint NOT NULL, seq_key text NOT NULL, payload json NOT NULL, UNIQUE (doc_id,
				actor_id, counter))`)
			o.Init()
			o.Start()
			p, err := producer.New(producer.Config{Publication: o.Slot})
			harness.Must(t, err)
			mustHave(o, t, ns.URL(), write(t, url, p, ops))
			o.MustBeComplete(conn, ns.URL())
		})
		t.Run("message", func(t *testing.T) {
			t.Parallel()
			o, _, url := harness.Install(t, pg, ns.URL(), "producer_message", "SOURCE=message",
				"REORDER_SORT=commit", "REORDER_HORIZON=0")
			o.Init()
			o.Start()
			p, err := producer.Message(producer.Config{})
			harness.Must(t, err)
			mustHave(o, t, ns.URL(), write(t, url, p, ops))
		})
		t.Run("counted", func(t *testing.T) {
			t.Parallel()
			o, conn, url := harness.Install(t, pg, ns.URL(), "producer_counted", "REORDER_SORT=commit",
				"REORDER_HORIZON=0")
			o.MustRun("init", "--sql-api")
			o.Start()
			p, err := producer.New(producer.Config{NextCounter: true})
			harness.Must(t, err)
			bare := make([]recording.Op, 300)
			for i, op := range ops[1000:1300] {
				bare[i] = recording.Op{Doc: op.Doc, Actor: op.Actor, Payload: op.Payload}
			}
			want := write(t, url, p, bare)
			next := map[string]int64{}
			printed := column(t, conn, "SELECT id::text, payload::text FROM outbox")
			for i := range want {
				next[want[i].Actor]++
				if want[i].Counter != next[want[i].Actor] {
					t.Errorf("the receipt of event %d says counter %d, want %d", i, want[i].Counter,
						next[want[i].Actor])
				}
				want[i].Payload = []byte(printed[want[i].id])
			}
			mustHave(o, t, ns.URL(), want)
		})
	})
}

// TestTheStreamIsWhatTheSQLFunctionEnqueued: init makes the function in an installation that is there, as
// often as it is run, and prints the SQL that makes the same; what it is called with is in the stream, from a
// table and as a message.
func TestTheStreamIsWhatTheSQLFunctionEnqueued(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	ns := natstest.Server(t)
	for _, source := range []string{"table", "message"} {
		t.Run(source, func(t *testing.T) {
			t.Parallel()
			o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "sql_api_"+source, "SOURCE="+source,
				"HEADERS=Event-Type=event_type", "REORDER_HORIZON=0")
			if source == "table" {
				harness.Exec(t, conn, `CREATE TABLE outbox (id text PRIMARY KEY, doc_id text NOT NULL,
					actor_id text NOT NULL, counter bigint NOT NULL,
					payload jsonb NOT NULL, event_type text)`)
			}
			printed, errOut, code := o.Run("init", "--print", "--sql-api")
			if code != 0 || !strings.Contains(printed, "CREATE OR REPLACE FUNCTION outflow.enqueue(") {
				t.Fatalf("outflow init --print --sql-api: exit code %d\n%s%s", code, printed, errOut)
			}
			o.Init()
			o.MustContain("outflow init --sql-api", o.MustRun("init", "--sql-api"), "outflow_counter\": made",
				"function outflow.enqueue: made")
			harness.Exec(t, conn,
				`SELECT outflow.enqueue('d', 'a', NULL, '{"n":   1.10}', '{"id": "1", "event_type": "made"}')`)
			o.MustContain("outflow init --sql-api", o.MustRun("init", "--sql-api"),
				"outflow_counter\": there",
				"function outflow.enqueue: made")
			harness.Exec(t, conn, "DROP FUNCTION outflow.enqueue")
			_, function, _ := strings.Cut(printed, "CREATE SCHEMA")
			harness.Exec(t, conn, "CREATE SCHEMA"+function)
			harness.Exec(t, conn,
				`SELECT outflow.enqueue('d', 'a', NULL, '9007199254740993', '{"id": "2", "event_type": null}')`)
			harness.Exec(t, conn, `SELECT outflow.enqueue('d', 'a', 9, '[]', '{"id": "3"}')`)
			o.Start()
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 3)
			var got []string
			for _, m := range harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream) {
				got = append(got, describe(m))
			}
			want := []string{
				`1 a:00000000000000000001 outbox.d {"n": 1.10} [made]`,
				"2 a:00000000000000000002 outbox.d 9007199254740993 []",
				"3 a:00000000000000000009 outbox.d [] []",
			}
			if !slices.Equal(got, want) {
				t.Errorf("the stream has\n%q, want\n%q", got, want)
			}
		})
	}
}

// TestTheSQLAPICanBePrintedBeforeTheTableIsMade: what is printed before the table is made is what is printed
// then, and a role that may not make it is told so.
func TestTheSQLAPICanBePrintedBeforeTheTableIsMade(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), "sql_api_before")
	before := o.MustRun("init", "--print", "--sql-api")
	o.Init()
	after, _, _ := o.Run("init", "--print", "--sql-api")
	_, want, _ := strings.Cut(before, "CREATE SCHEMA")
	if _, got, _ := strings.Cut(after, "CREATE SCHEMA"); got != want || want == "" {
		t.Errorf("before the table was made\n%s\nafter\n%s", before, after)
	}
	role := harness.SlotName("sql_api_role")
	harness.Exec(t, conn, "CREATE ROLE "+role+" LOGIN REPLICATION")
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
		defer cancel()
		admin, err := pgx.Connect(ctx, url)
		harness.Must(t, err)
		defer admin.Close(ctx) //nolint:errcheck // the test is over
		_, err = admin.Exec(ctx, "DROP OWNED BY "+role+"; DROP ROLE "+role)
		harness.Must(t, err)
	})
	harness.Exec(t, conn, "GRANT SELECT ON outbox TO "+role)
	o.Set("POSTGRES_URL=" + strings.Replace(url, "postgres@", role+"@", 1))
	o.MustFail(3, []string{"init", "--sql-api"}, "the role may not make function outflow.enqueue",
		"the right CREATE on the database", "outflow init --print")
}

func describe(m *oracle.Message) string {
	return fmt.Sprintf("%s %s %s %s %v", m.Outflow.ID, m.Outflow.Key, m.Subject, m.Data,
		m.Header["Event-Type"])
}

// TestTheLargestEventOfTheProducerIsPublished: the largest event that the producer takes is published, as a
// row and as a message, with the longest id and key, mapped headers, and a payload that jsonb prints longer
// than it was given.
func TestTheLargestEventOfTheProducerIsPublished(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	ns := natstest.Server(t)
	const limit = 2048
	for _, source := range []string{"table", "message"} {
		t.Run(source, func(t *testing.T) {
			t.Parallel()
			o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "largest_"+source, "SOURCE="+source,
				"HEADERS=Event-Type=event_type,Actor=actor_id", fmt.Sprintf("SINK_MAX_PAYLOAD=%d", limit))
			harness.Exec(t, conn, `CREATE TABLE outbox (id text PRIMARY KEY, doc_id text NOT NULL,
				actor_id text NOT NULL, counter bigint NOT NULL,
				payload jsonb NOT NULL, event_type text)`)
			o.Init()
			o.Start()
			cfg := producer.Config{MaxPayload: limit, Headers: map[string]string{"Event-Type": "event_type",
				"Actor": "actor_id"}}
			p, err := producer.New(cfg)
			if source == "message" {
				p, err = producer.Message(cfg)
			}
			harness.Must(t, err)
			tx, err := conn.Begin(t.Context())
			harness.Must(t, err)
			event := func(n int) producer.Event {
				return producer.Event{
					ID: strings.Repeat("é", 100), Document: strings.Repeat("ü", 3000),
					Actor: strings.Repeat(" a", 90), Counter: 1,
					Payload: []byte("[0" + strings.Repeat(",0", n) + "]"),
					Columns: map[string]any{"event_type": strings.Repeat("t", 200)},
				}
			}
			n := limit
			for ; n > 0; n-- {
				_, err = p.Enqueue(t.Context(), tx, event(n))
				if bad := (*producer.Invalid)(nil); errors.As(err, &bad) && bad.Field == "Payload" {
					continue
				}
				break
			}
			if err != nil || n < 50 {
				t.Fatalf("payload of %d: %v", n, err)
			}
			harness.Must(t, tx.Commit(t.Context()))
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
			m := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)[0]
			size := len(m.Data)
			for name, values := range m.Header {
				if name != "Nats-Expected-Last-Sequence" {
					size += len(name) + len(values[0]) + 4
				}
			}
			// Only what is not known before could have made it larger: numbers, and the counter of gap mode.
			if size += 128; size > limit || size < limit-185 || !strings.HasSuffix(string(m.Data), "0]") {
				t.Errorf("the message counts %d bytes of %d: %.100q", size, limit, m.Data)
			}
		})
	}
}
