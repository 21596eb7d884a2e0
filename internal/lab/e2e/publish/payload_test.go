package publish

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// payloads are values of a payload column, as they are inserted.
type payloads struct {
	typ    string
	values []string
}

// documents are JSON texts that a careless hand would change.
func documents(t *testing.T) []string {
	t.Helper()
	ops, err := recording.Load(recording.FriendsForever)
	harness.Must(t, err)
	var large strings.Builder
	for large.Len() < 1_400_000 {
		for _, op := range ops {
			fmt.Fprintf(&large, ",%s", op.Payload)
		}
	}
	return []string{
		string(ops[0].Payload), string(ops[1].Payload),
		`{"n": 9007199254740993, "price": 1.10, "tiny": 1e-30, "b": 1, "a":  2, "a": 3}`,
		"{ \"odd\" :\t[ 1 ,2 ],\n\n  \"text\":\"\\u00e9 \\\"é\\\" \\\\ <>&\" }",
		`"☃ 𝄞"`, `null`, `[]`, `-0.0`,
		"[0" + large.String() + "]",
	}
}

// TestPayloadsArriveByteForByte is claim C5 on each major: committed rows only, however they were written,
// and the payload byte for byte.
func TestPayloadsArriveByteForByte(t *testing.T) {
	docs := documents(t)
	binary := []string{`\x`, `\x00ff0d0a5c`, `\x` +
		hex.EncodeToString(bytes.Repeat([]byte{0, 1, 0xFE, '\\', '\''}, 100_000))}
	text := append([]string{"", " \t\r\n\\N\\.", `\x00`, "'; DROP TABLE outbox; --"}, docs...)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		ns := natstest.Server(t, natsserver.Options{MaxPayload: 8 << 20})
		for _, p := range []payloads{{"jsonb", docs}, {"json", docs}, {"text", text}, {"bytea", binary}} {
			t.Run(p.typ, func(t *testing.T) { testPayloads(t, pg, ns.URL(), p) })
		}
	})
}

func testPayloads(t *testing.T, pg *pgserver.Server, natsURL string, p payloads) {
	o, conn, _ := harness.Install(t, pg, natsURL, "payload_"+p.typ, "SINK_MAX_PAYLOAD=4MiB")
	harness.Exec(t, conn, `CREATE TABLE outbox (id bigint GENERATED ALWAYS
		AS IDENTITY PRIMARY KEY, doc_id text NOT NULL, actor_id text NOT NULL,
		counter bigint NOT NULL, payload `+p.typ+` NOT NULL, note text)`)
	o.Init()
	o.Start()
	o.AwaitReady()

	w := &payloadWriter{t: t, conn: conn, p: p}
	w.insert("single rows")
	w.insertMany("one statement")
	w.copy("copied")
	// Savepoints: what is rolled back is not there, what is released or comes after is.
	harness.Exec(t, conn, "BEGIN")
	w.insert("before the savepoint")
	harness.Exec(t, conn, "SAVEPOINT a")
	w.insert("rolled back")
	harness.Exec(t, conn, "ROLLBACK TO a")
	harness.Exec(t, conn, "SAVEPOINT b")
	w.insert("in a savepoint")
	harness.Exec(t, conn, "RELEASE b")
	harness.Exec(t, conn, "COMMIT")
	harness.Exec(t, conn, "BEGIN")
	w.insert("rolled back")
	harness.Exec(t, conn, "ROLLBACK")
	// ALTER TABLE in the middle of the stream.
	harness.Exec(t, conn, "ALTER TABLE outbox ADD COLUMN added bytea DEFAULT '\\x01'")
	w.insert("with a new column")
	harness.Exec(t, conn, "ALTER TABLE outbox DROP COLUMN note")
	w.insert("without an old column")
	harness.Exec(t, conn, "BEGIN")
	w.insert("before the change in this transaction")
	harness.Exec(t, conn, "ALTER TABLE outbox ADD COLUMN more int")
	w.insert("after the change in this transaction")
	harness.Exec(t, conn, "COMMIT")

	want := w.rows()
	harness.Exec(t, conn, "UPDATE outbox SET doc_id = 'updated', counter = counter + 1000")
	harness.Exec(t, conn, "DELETE FROM outbox WHERE id % 2 = 0")
	harness.Exec(t, conn, "TRUNCATE outbox")
	w.insert("after all this")
	maps.Copy(want, w.rows())

	harness.AwaitMessages(t, harness.JetStream(t, natsURL), o.Stream, len(want))
	checkPayloads(t, harness.Messages(t, harness.JetStream(t, natsURL), o.Stream), want)

	harness.Exec(t, conn, "ALTER TABLE outbox RENAME COLUMN payload TO body")
	harness.Exec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, body) VALUES ('renamed', 'a', 1, "+
		"$1)", w.value(0))
	o.MustEnd(3, "public.outbox", `column "payload"`, "map another column")
	harness.Exec(t, conn, "ALTER TABLE outbox RENAME COLUMN body TO payload")
}

// checkPayloads compares messages with rows by id: document and payload.
func checkPayloads(t *testing.T, all []*oracle.Message, want map[string][2]string) {
	t.Helper()
	if len(all) != len(want) {
		t.Errorf("%d messages, want %d", len(all), len(want))
	}
	for _, m := range all {
		row, ok := want[m.Outflow.ID]
		switch {
		case !ok:
			t.Errorf("message %v on %s has no row, or came twice", &m.Outflow, m.Subject)
		case m.Subject != "outbox."+strings.ReplaceAll(row[0], " ", "=20"):
			t.Errorf("message %v: subject %s, document %q", &m.Outflow, m.Subject, row[0])
		case string(m.Data) != row[1]:
			t.Errorf("message %v of %q: payload %.200q, want %.200q (%d and %d bytes)", &m.Outflow, row[0],
				m.Data, row[1], len(m.Data), len(row[1]))
		}
		delete(want, m.Outflow.ID)
	}
	for id, row := range want {
		t.Errorf("row %s of document %q has no message", id, row[0])
	}
}

// payloadWriter writes rows with each of its values.
type payloadWriter struct {
	t    *testing.T
	conn *pgx.Conn
	p    payloads
}

// value is what pgx has to send for a value.
func (w *payloadWriter) value(i int) any {
	if w.p.typ != "bytea" {
		return w.p.values[i]
	}
	b, err := hex.DecodeString(w.p.values[i][2:])
	harness.Must(w.t, err)
	return b
}

func (w *payloadWriter) insert(doc string) {
	w.t.Helper()
	for i, v := range w.p.values {
		if len(v) > 1<<20 && doc != "single rows" {
			continue // once is enough, beside the COPY
		}
		harness.Exec(w.t, w.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, "+
			"'a', $2, $3)", doc, i, w.value(i))
	}
}

func (w *payloadWriter) insertMany(doc string) {
	w.t.Helper()
	var rows []string
	args := []any{doc}
	for i, v := range w.p.values {
		if len(v) > 1<<20 {
			continue
		}
		args = append(args, i, w.value(i))
		rows = append(rows, fmt.Sprintf("($1, 'a', $%d, $%d)", len(args)-1, len(args)))
	}
	harness.Exec(w.t, w.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES "+
		strings.Join(rows, ", "), args...)
}

func (w *payloadWriter) copy(doc string) {
	w.t.Helper()
	escape := strings.NewReplacer("\\", "\\\\", "\n", "\\n", "\t", "\\t", "\r", "\\r")
	var lines strings.Builder
	for i, v := range w.p.values {
		fmt.Fprintf(&lines, "%s\ta\t%d\t%s\n", doc, i, escape.Replace(v))
	}
	_, err := w.conn.PgConn().CopyFrom(w.t.Context(), strings.NewReader(lines.String()),
		"COPY outbox (doc_id, actor_id, counter, payload) FROM STDIN")
	harness.Must(w.t, err)
}

// rows returns document and payload of the rows that are in the table, by id.
func (w *payloadWriter) rows() map[string][2]string {
	w.t.Helper()
	payload := "convert_to(payload::text, 'UTF8')"
	if w.p.typ == "bytea" {
		payload = "payload"
	}
	rows, err := w.conn.Query(w.t.Context(), "SELECT id::text, doc_id, "+payload+" FROM outbox")
	harness.Must(w.t, err)
	all := map[string][2]string{}
	var id, doc string
	var data []byte
	if _, err := pgx.ForEachRow(rows, []any{&id, &doc, &data}, func() error {
		all[id] = [2]string{doc, string(data)}
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
	return all
}

// TestOddDocumentIDsHaveTheDocumentedSubjects holds the subjects of odd document ids against the format's own
// words.
func TestOddDocumentIDsHaveTheDocumentedSubjects(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "ids")
	o.Init()
	o.Start()
	o.AwaitReady()
	long, umlauts := strings.Repeat("x", 5000), strings.Repeat("ü", 100)
	sum := func(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s)))[:32] }
	ids := []string{"", "a b.*>", "Grüße", "=20", "plain-ID_9", "\r\n\t", long, umlauts}
	want := []string{
		"outbox.=", "outbox.a=20b=2E=2A=3E", "outbox.Gr=C3=BC=C3=9Fe", "outbox.=3D20", "outbox.plain-ID_9",
		"outbox.=0D=0A=09",
		"outbox." + long[:128] + "=~" + sum(long), "outbox." + strings.Repeat("=C3=BC", 21) + "=~" +
			sum(umlauts),
	}
	// 128 bytes hold 42 escapes of three bytes: 21 umlauts of two escapes each.
	for i, id := range ids {
		harness.Insert(t, conn, id, i, "[]")
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, i+1)
	}
	if got := subjects(harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)); !slices.Equal(got,
		want) {
		t.Errorf("subjects %q\nwant     %q", got, want)
	}
	o.MustBeComplete(conn, ns.URL())
}
