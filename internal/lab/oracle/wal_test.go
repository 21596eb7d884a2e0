package oracle

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Close(t.Context()) }) //nolint:errcheck // the test is over
	return conn
}

func run(t *testing.T, conn *pgx.Conn, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%.300s: %v", sql, err)
		}
	}
}

// slotFor makes a slot of a name that no other test uses.
func slotFor(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	var slot string
	must.Succeed(t, conn.QueryRow(t.Context(), "SELECT 'judge_' || current_database()").Scan(&slot))
	must.Succeed(t, CreateSlot(t.Context(), conn, slot))
	return slot
}

const defaultTable = `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
	doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
	seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20,
	'0')) STORED, payload jsonb NOT NULL)`

// What a server prints is read for what it is: what was committed, once, in pieces as small as can be, with
// the generated column.
func TestWhatWasCommittedIsReadOnce(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, s *pgserver.Server) {
		t.Parallel()
		conn := connect(t, pgtest.Database(t, s))
		run(t, conn, defaultTable, "CREATE TABLE other (LIKE outbox INCLUDING ALL)")
		slot := slotFor(t, conn)
		r := NewReader(Source{Slot: slot})
		r.atOnce = 3
		insert := func(table, doc string, n int, payload string) string {
			return fmt.Sprintf("INSERT INTO %s (doc_id, actor_id, counter, payload) VALUES ('%s', 'it''s "+
				"÷', %d, '%s')", table, doc, n, payload)
		}
		// nothing of this shows
		run(t, conn, "SET bytea_output = 'escape'", "SET DateStyle = 'German'",
			"SET TimeZone = 'Asia/Kolkata'",
			insert("outbox", "one", 1, `{"a" :9007199254740993, "b": 1.10, "c": "''\\ \u00e9"}`),
			"BEGIN;"+insert("outbox", "gone", 2, `1`)+";ROLLBACK",
			"BEGIN;"+insert("outbox", "two\nlines", 3, `2`)+"; SAVEPOINT s;"+insert("outbox", "gone", 4, `3`)+
				";ROLLBACK TO s;"+insert("outbox", "", -5, `null`)+";COMMIT",
			"INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'many', 'x', n, "+
				"to_jsonb(repeat('x', n * n)) FROM generate_series(1, 1000, 111) n",
			"UPDATE outbox SET payload = '{}' WHERE counter = -5",
			"UPDATE outbox SET doc_id = 'other' WHERE counter = 1000",
			"SELECT pg_logical_emit_message(true, 'outflow.tick', '')",
			"SELECT pg_logical_emit_message(false, 'outflow.tick', '')",
			"SELECT pg_logical_emit_message(true, 'outflow.settings', 'v=1 slot=a horizon=0s sort=commit "+
				"max_events=1 max_bytes=1')",
			"SELECT pg_logical_emit_message(true, 'outflow.settings', 'v=1')",
			insert("other", "other", 1, `{}`),
		)
		read := func() {
			t.Helper()
			must.Succeed(t, r.Read(t.Context(), conn))
		}
		read()
		// the end of the WAL, and more than a piece
		run(t, conn, "SELECT pg_logical_emit_message(false, 'none', '') FROM generate_series(1, 20)")
		read()
		run(t, conn, insert("outbox", "three", 6, `"last"`), "DELETE FROM outbox WHERE doc_id = 'three'")
		read()
		read()
		truth := r.Truth()
		if truth.Events != 3+10+1 || truth.Ticks != 1 || truth.Changes != 1 || truth.Malformed != 1 ||
			len(truth.commits) != 6 {
			t.Fatalf("%+v", truth)
		}
		e := truth.commits[1].events[1]
		if e.Doc != "" || e.Actor != "it's ÷" || e.Key != "it's ÷:000000000000000000-5" ||
			!e.hasPayload([]byte("null")) || e.Pos.Index != 1 || e.Pos.LSN != truth.commits[1].lsn {
			t.Errorf("got %v", e)
		}
		if e := truth.commits[0].events[0]; !e.hasPayload(
			[]byte(`{"a": 9007199254740993, "b": 1.10, "c": "'\\ é"}`)) &&
			!e.hasPayload([]byte(`{"a": 9007199254740993, "b": 1.10, "c": "'\\\\ é"}`)) {
			t.Errorf("payload %q", e.Head)
		}
		check, err := truth.CheckTable(t.Context(), conn, "outbox", DefaultColumns)
		if err != nil || check.OK(true) || check.Different != 2 || check.Gone != 1 || check.Unseen != 0 ||
			check.Rows != 13 {
			t.Errorf("two rows were changed and one deleted: %+v, %v", check, err)
		}
		run(t, conn, "UPDATE outbox SET payload = 'null' WHERE counter = -5",
			"UPDATE outbox SET doc_id = 'many' WHERE counter = 1000")
		check, err = truth.CheckTable(t.Context(), conn, "outbox", DefaultColumns)
		if err != nil || !check.OK(true) || check.OK(false) {
			t.Errorf("one row was deleted: %+v, %v", check, err)
		}
		run(t, conn, insert("outbox", "unread", 7, `{}`))
		if check, err = truth.CheckTable(t.Context(), conn, "outbox", DefaultColumns); err != nil ||
			check.OK(true) || check.Unseen != 1 {
			t.Errorf("one row was not read: %+v, %v", check, err)
		}
		if _, err := truth.expect(Config{Slot: "a", Settings: DefaultSettings}); err != nil {
			t.Error(err)
		}
		if err := DropSlot(t.Context(), conn, slot); err != nil {
			t.Error(err)
		}
		if err := r.Read(t.Context(), conn); err == nil || !strings.Contains(err.Error(), slot) {
			t.Errorf("no slot: %v", err)
		}
	})
}

// Rows of all kinds of types are read as the table prints them, also from partitions.
func TestRowsOfAllTypesAreReadAsPrinted(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t, pgtest.Server(t)))
	run(t, conn, "CREATE DOMAIN small AS text", `CREATE TYPE "odd]:type" AS ENUM ('it''s', 'b')`, `CREATE TABLE "Out box" (
		"No" int GENERATED ALWAYS AS IDENTITY, "do""c" "odd]:type", who bool,
		"key [text]:'" numeric, body bytea, f float8, a text[], b bit(3), n name, s small,
		t timestamptz, c char(4)) PARTITION BY LIST (who)`,
		`CREATE TABLE "P 1" PARTITION OF "Out box" FOR VALUES IN (true)`,
		`CREATE TABLE p2 (gone int, LIKE "Out box")`, "ALTER TABLE p2 DROP COLUMN gone",
		`ALTER TABLE "Out box" ATTACH PARTITION p2 DEFAULT`)
	slot := slotFor(t, conn)
	tables, err := Partitions(t.Context(), conn, `"Out box"`)
	if slices.Sort(tables); err != nil || !slices.Equal(tables, []string{`public."P 1"`, "public.p2"}) {
		t.Fatalf("partitions %q, %v", tables, err)
	}
	if plain, err := Partitions(t.Context(), conn, `public.p2`); err != nil ||
		!slices.Equal(plain, []string{"public.p2"}) {
		t.Errorf("partitions of a leaf: %q, %v", plain, err)
	}
	columns := `("do""c", who, "key [text]:'", body, f, a, b, n, s, t, c)`
	run(t, conn, `INSERT INTO "Out box" `+columns+` VALUES
		('it''s', true, 1.50, '\x00ff2720', 0.1::float8 + 0.2, '{a,"b c]:","it''s",NULL}', '101', 'x', ' ',
		'infinity', 'ab'),
		('b', false, 'NaN', '', 'Infinity', '{}', NULL, '', 'null', '2026-11-21 17:40:26.5+00', '')`,
		`INSERT INTO "Out box" `+columns+
			` VALUES ('b', NULL, 1e25, decode(repeat('00ff', 300000), 'hex'), NULL, NULL, NULL, NULL, NULL,
				NULL, NULL)`)
	c := Columns{ID: "No", Doc: `do"c`, Actor: "who", Key: "key [text]:'", Payload: "body"}
	var printed []string
	r := NewReader(Source{Slot: slot, Tables: tables, Columns: c, Subject: func(r Row) string {
		for _, name := range []string{"f", "a", "b", "n", "s", "t", "c"} {
			v, there := r.Get(name)
			printed = append(printed, fmt.Sprintf("%v %v %s", there, v.Null, v.Value))
		}
		return "x"
	}})
	err = r.Read(t.Context(), conn)
	truth := r.Truth()
	if err != nil || truth.Events != 3 {
		t.Fatalf("%+v, %v", truth, err)
	}
	want := []string{
		"true false 0.30000000000000004", `true false {a,"b c]:",it's,NULL}`, "true false 101",
		"true false x", "true false  ", "true false infinity", "true false ab  ",
		"true false Infinity", "true false {}", "true true ", "true false ", "true false null",
		"true false 2026-11-21 17:40:26.5+00", "true false     ",
		"true true ", "true true ", "true true ", "true true ", "true true ", "true true ", "true true ",
	}
	if !slices.Equal(printed, want) {
		t.Errorf("got  %q\nwant %q", printed, want)
	}
	check, err := truth.CheckTable(t.Context(), conn, `"Out box"`, c)
	if err != nil || !check.OK(false) || check.Rows != 3 {
		t.Errorf("%+v, %v", check, err)
	}
}

func TestAServerWithoutTestDecodingIsNamed(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t, pgtest.Server(t)))
	run(t, conn, "SET dynamic_library_path = '/nowhere'")
	if err := CreateSlot(t.Context(), conn, "judge_without"); err == nil ||
		!strings.Contains(err.Error(), "lacks the output plugin test_decoding") {
		t.Errorf("got %v", err)
	}
}

func TestTimelinesOfAServer(t *testing.T) {
	t.Parallel()
	at, err := Timelines(t.Context(), pgtest.Database(t, pgtest.Server(t)))
	if err != nil || at(1) != 1 || at(1<<40) != 1 {
		t.Errorf("%v", err)
	}
}
