package publish

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestTimesArriveAsPostgreSQLPrintsThem: mapped columns with times that many a parser refuses. They arrive as
// PostgreSQL prints them, whatever zone and style the database is set to; binary and, where a column has a
// type without a binary reader, as text.
func TestTimesArriveAsPostgreSQLPrintsThem(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		for _, form := range []string{"binary", "text"} {
			t.Run(form, func(t *testing.T) {
				o, conn, _ := harness.Install(t, pg, ns.URL(), "times", harness.InCommitOrder...)
				name := harness.Value[string](t, conn, "SELECT current_database()")
				harness.Exec(t, conn, "ALTER DATABASE "+name+" SET timezone = 'Asia/Kathmandu'")
				harness.Exec(t, conn, "ALTER DATABASE "+name+" SET datestyle = 'German'")
				harness.Exec(t, conn, `CREATE TABLE outbox (id bigint GENERATED ALWAYS
					AS IDENTITY, doc_id text, payload jsonb, at timestamptz, local timestamp, day date,
					took interval, price numeric)`)
				headers := "HEADERS=At=at,Local=local,Day=day"
				if form == "text" {
					headers += ",Took=took,Price=price"
				}
				o.Set(headers)
				o.Init()
				o.Start()
				for _, v := range []string{
					"infinity", "-infinity", "2026-02-03 04:05:06.000001+05:45",
					"1883-11-18 12:00:00-04:56:02", "0044-03-15 12:00:00+00 BC", "294276-12-31 23:59:59+00",
				} {
					harness.Exec(t, conn, `INSERT INTO outbox (doc_id, payload, at, local, day, took, price)
						VALUES ('doc', '{"n": 9007199254740993, "price": 1.10}', $1::text::timestamptz,
						$1::text::timestamp, $1::text::timestamp::date,
							'1 year -3 days 04:05:06.7', 12345678901234567890.10)`, v)
				}
				harness.Exec(t, conn, "INSERT INTO outbox (doc_id, payload) VALUES ('doc', '[1.10, 1e400]')")
				harness.Exec(t, conn, "SET timezone = 'UTC'")
				harness.Exec(t, conn, "SET datestyle = 'ISO'")
				rows, err := conn.Query(t.Context(), `SELECT payload::text, coalesce(at::text, ''),
					coalesce(local::text, ''), coalesce(day::text, ''),
					coalesce(took::text, ''), coalesce(price::text, '') FROM outbox ORDER BY id`)
				harness.Must(t, err)
				var want [][6]string
				for rows.Next() {
					var w [6]string
					harness.Must(t, rows.Scan(&w[0], &w[1], &w[2], &w[3], &w[4], &w[5]))
					want = append(want, w)
				}
				harness.Must(t, rows.Err())
				harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, len(want))
				for i, m := range harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream) {
					got := [6]string{string(m.Data), m.Header.Get("At"), m.Header.Get("Local"),
						m.Header.Get("Day"), m.Header.Get("Took"), m.Header.Get("Price")}
					w := want[i]
					if form == "binary" {
						w[4], w[5] = "", ""
					}
					if got != w {
						t.Errorf("row %d: %q\nwant    %q", i+1, got, w)
					}
				}
			})
		}
	})
}

// TestADocumentIDMayHoldAnyByteButNUL: what can be in a text but looks like something else to NATS; in a
// database without an encoding, any byte but NUL.
func TestADocumentIDMayHoldAnyByteButNUL(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	var every []byte
	for b := 1; b < 256; b++ {
		every = append(every, byte(b))
	}
	var runes strings.Builder
	for _, r := range []rune{1, 0x7F, 0x80, 0xA0, 0x2028, 0xFEFF, 0xFFFD, 0xFFFF, 0x10FFFF} {
		runes.WriteRune(r)
	}
	long := strings.Repeat("a.b*>", 1000)
	ids := []string{"", "*", ">", "a.b", ".", "..", "a.", "a.>", "$SYS", "_INBOX.x", "a b", "\t",
		"\r\nPUB x 1\r\n", runes.String(), long, long + "!"}
	for _, encoding := range []string{"UTF8", "SQL_ASCII"} {
		t.Run(encoding, func(t *testing.T) {
			all := ids
			dsn := pgtest.Database(t, pg)
			if encoding == "SQL_ASCII" {
				all = append(ids[:len(ids):len(ids)], string(every), "\xff\xfe", "\xc3")
				dsn = asciiDatabase(t, pg, dsn)
			}
			o := harness.New(t, dsn, ns.URL(), harness.SlotName("bytes"), harness.InCommitOrder...)
			o.UseStream(strings.ToUpper(o.Slot))
			o.Init()
			o.Start()
			conn := harness.Connect(t, dsn)
			for i, id := range all {
				_, err := conn.Exec(t.Context(), "INSERT INTO outbox (doc_id, actor_id, counter, payload) "+
					"VALUES (convert_from($1, $2), 'a', $3, '{}')", []byte(id), encoding, i)
				if err != nil {
					t.Fatalf("%q: %v", id, err)
				}
			}
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, len(all))
			got := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
			if len(got) != len(all) {
				t.Fatalf("%d messages, want %d", len(got), len(all))
			}
			seen := map[string]bool{}
			for i, m := range got {
				token, ok := strings.CutPrefix(m.Subject, "outbox.")
				if !ok || seen[token] || strings.ContainsAny(token, ".*> \t\r\n") {
					t.Errorf("document %q: subject %q is not one token of its own", all[i], m.Subject)
				}
				seen[token] = true
				if m.Outflow.Key != fmt.Sprintf("a:%020d", i) {
					t.Errorf("document %q: key %s", all[i], m.Outflow.Key)
				}
				if len(all[i]) < 40 { // it can be read back
					name, err := url.PathUnescape(strings.ReplaceAll(strings.TrimSuffix(token, "="), "=",
						"%"))
					if all[i] == "" && token == "=" {
						continue
					}
					if err != nil || name != all[i] {
						t.Errorf("subject %s stands for %q, %v; want %q", m.Subject, name, err, all[i])
					}
				}
			}
			if encoding == "SQL_ASCII" {
				repairsBytes(t, o, conn, harness.JetStream(t, ns.URL()), all)
			}
		})
	}
}

// repairsBytes: what a repair reads from the table is what the stream of changes would have had.
func repairsBytes(t *testing.T, o *harness.Outflow, conn *pgx.Conn, stream jetstream.JetStream,
	ids []string) {
	t.Helper()
	o.MustStop(t)
	last := ids[len(ids)-1]
	harness.Exec(t, conn, "SELECT pg_drop_replication_slot($1)", o.Slot)
	harness.Exec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES "+
		"(convert_from($1, 'SQL_ASCII'), 'a', $2, '{}')", []byte(last), len(ids))
	o.MustRun("repair", "--accept", "slot_missing")
	got := harness.Messages(t, stream, o.Stream)
	if len(got) != len(ids)+1 || got[len(ids)].Subject != got[len(ids)-1].Subject {
		t.Errorf("%d messages after the repair, want %d", len(got), len(ids)+1)
	}
}

// asciiDatabase makes a database that knows no encoding beside another.
func asciiDatabase(t *testing.T, pg *pgserver.Server, beside string) string {
	t.Helper()
	u, err := url.Parse(beside)
	harness.Must(t, err)
	name := strings.TrimPrefix(u.Path, "/") + "_ascii"
	conn := harness.Connect(t, pg.URL("postgres"))
	harness.Exec(t, conn, "CREATE DATABASE "+name+
		" ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
	return pg.URL(name)
}
