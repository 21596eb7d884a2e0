package producer

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
)

// messages are what Message has emitted in transactions that committed, in the order of the WAL, and the
// number of transactions.
func (d *database) messages(slot string) (contents []string, commits int) {
	d.t.Helper()
	const query = `SELECT encode(data, 'hex') FROM pg_logical_slot_get_binary_changes($1, NULL, NULL,
		'proto_version', '1', 'publication_names', 'nobody', 'messages', 'true')`
	for _, text := range d.texts(query, slot) {
		b, err := hex.DecodeString(text)
		if err != nil {
			d.t.Fatal(err)
		}
		switch b[0] {
		case 'C':
			commits++
		case 'M': // flags, LSN, prefix and a byte 0, length, content
			prefix, rest, _ := strings.Cut(string(b[10:]), "\x00")
			if b[1] != 1 || prefix != "outflow.event" ||
				int(binary.BigEndian.Uint32([]byte(rest))) != len(rest)-4 {
				d.t.Errorf("message %q", b)
			}
			contents = append(contents, rest[4:])
		}
	}
	return contents, commits
}

// newSlot makes a slot that sees what comes after it.
func (d *database) newSlot() string {
	d.t.Helper()
	u, err := url.Parse(d.url)
	if err != nil {
		d.t.Fatal(err)
	}
	name := "producer_" + strings.Trim(u.Path, "/")
	d.exec("CREATE PUBLICATION nobody")
	d.exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", name)
	return name
}

func messageOf(t testing.TB, cfg Config) *Outbox {
	t.Helper()
	o, err := Message(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// TestAnEventIsOneMessageWithTheDocumentedContent: an event without a table is one logical message with the
// documented content, in the order of the call, and nothing if the transaction is rolled back.
func TestAnEventIsOneMessageWithTheDocumentedContent(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	slot := d.newSlot()
	odd := "\"\\\x01\n<>& é☃𝄞\u2028"
	d.both(t, func(t *testing.T, call inTx) {
		o := messageOf(t, Config{Headers: map[string]string{"Event-Type": "event_type"}})
		payload := "{ \"n\" : 1.10,\t\"big\":9007199254740993, \"u\":\"\\u00e9\\u0000\" }"
		receipts := mustCall(t, call, o,
			Event{Document: odd, Actor: odd, Counter: 1<<63 - 1, ID: odd, Key: odd, Payload: []byte(payload),
				Columns: map[string]any{"z": odd, "a": 3, "no": nil}},
			Event{Document: "d", Payload: []byte("1")}, Event{Document: "d", Payload: []byte("2")})
		ids := idsOf(receipts)
		if receipts[0].Counter != 1<<63-1 || receipts[1].Counter != 0 {
			t.Errorf("receipts %+v, want the events' own counters", receipts)
		}
		_, err := call(t.Context(), o, Event{Document: "d", Actor: "a", Counter: 3, Payload: []byte("3")},
			Event{Document: "d", Actor: "a", Counter: 3, Payload: []byte("4")})
		if !errors.Is(err, ErrTaken) {
			t.Errorf("a counter twice: %v", err)
		}
		tx, err := d.conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := o.Enqueue(t.Context(), tx, Event{Document: "gone", Payload: []byte("1")}); err != nil {
			t.Fatal(err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		contents, commits := d.messages(slot)
		if len(contents) != 3 || commits != 1 || len(ids) != 3 || ids[0] != odd || !isUUID(ids[1]) ||
			ids[1] == ids[2] {
			t.Fatalf("%d commits, ids %q, messages %q", commits, ids, contents)
		}
		var first struct {
			Doc     string            `json:"doc_id"`
			Actor   string            `json:"actor_id"`
			Counter json.Number       `json:"counter"`
			ID      string            `json:"id"`
			Key     string            `json:"seq_key"`
			Headers map[string]string `json:"headers"`
			Payload json.RawMessage   `json:"payload"`
		}
		if err := json.Unmarshal([]byte(contents[0]), &first); err != nil {
			t.Fatal(err)
		}
		if first.Doc != odd || first.Actor != odd || first.Counter != "9223372036854775807" ||
			first.ID != odd || first.Key != odd ||
			first.Headers["z"] != odd || first.Headers["a"] != "3" || len(first.Headers) != 2 ||
			string(first.Payload) != payload {
			t.Errorf("%s", contents[0])
		}
		for i, content := range contents[1:] {
			if want := fmt.Sprintf(`{"doc_id":"d","actor_id":"","counter":0,"id":%q,"payload":%d}`, ids[i+1],
				i+1); content != want {
				t.Errorf("got %s, want %s", content, want)
			}
		}
	})
}

// TestMessagesTakeTheirCountersFromTheSameTable: the counters stand in the messages, from the same table.
func TestMessagesTakeTheirCountersFromTheSameTable(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	slot := d.newSlot()
	o := messageOf(t, Config{NextCounter: true, CounterTable: "counters"})
	d.exec(o.Schema())
	d.both(t, func(t *testing.T, call inTx) {
		events := []Event{
			{Document: "d", Actor: "a", ID: "1", Payload: []byte("1")},
			{Document: "d", ID: "2", Payload: []byte("2")},
			{Document: "d", Actor: "a", ID: "3", Payload: []byte("3")},
		}
		told := mustCall(t, call, o, events...)
		got, _ := d.messages(slot)
		want := []string{
			`{"doc_id":"d","actor_id":"a","counter":1,"id":"1","payload":1}`,
			`{"doc_id":"d","actor_id":"","counter":1,"id":"2","payload":2}`,
			`{"doc_id":"d","actor_id":"a","counter":2,"id":"3","payload":3}`,
		}
		if !slices.Equal(got, want) || !slices.Equal(told, []Receipt{{"1", 1}, {"2", 1}, {"3", 2}}) {
			t.Errorf("got %q, told %+v", got, told)
		}
		d.exec("TRUNCATE counters")
	})
}

// TestMessagesAreUTF8InAnyDatabase: the content is UTF-8 also where the database is not.
func TestMessagesAreUTF8InAnyDatabase(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	u, err := url.Parse(d.url)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.Trim(u.Path, "/") + "_latin"
	d.exec("CREATE DATABASE " + name + " ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
	u.Path = name
	u.RawQuery += "&client_encoding=UTF8" // pgx leaves it to the database, lib/pq asks for it
	latin := connect(t, u.String())
	t.Cleanup(func() { d.exec("DROP DATABASE " + name + " WITH (FORCE)") })
	slot := latin.newSlot()
	t.Cleanup(func() { latin.exec("SELECT pg_drop_replication_slot($1)", slot) })
	mustCall(t, latin.pgx, messageOf(t, Config{}), Event{Document: "Grüße", Actor: "a", ID: "1",
		Payload: []byte(`"ß"`)})
	want := `{"doc_id":"Grüße","actor_id":"a","counter":0,"id":"1","payload":"ß"}`
	if got, _ := latin.messages(slot); !slices.Equal(got, []string{want}) {
		t.Errorf("got %q, want %s", got, want)
	}
	_, err = latin.pgx(t.Context(), messageOf(t, Config{}), Event{Document: "☃", Payload: []byte("1")})
	wantError(t, err, "enqueue 1 event into the WAL", "LATIN1")
}

// TestAMessageThatCannotHoldTheEventIsRefused: what the content cannot hold.
func TestAMessageThatCannotHoldTheEventIsRefused(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	for _, c := range []struct {
		event Event
		cfg   Config
		field string
		want  string
	}{
		{Event{Payload: []byte("1")}, Config{}, "Document", "empty"},
		{Event{Document: "d"}, Config{}, "Payload", "missing"},
		{Event{Document: "d", Payload: []byte("{")}, Config{}, "Payload", "not JSON"},
		{Event{Document: "d", Payload: []byte("1}")}, Config{}, "Payload", "goes on after its end"},
		{Event{Document: "d", Payload: nested(1000)}, Config{}, "Payload", "too deep"},
		{Event{Document: "d", Payload: []byte("1"), Columns: headers(257)}, Config{}, "Columns",
			"more than 256 headers"},
		{Event{Document: "d", Counter: -1, Payload: []byte("1")}, Config{}, "Counter", "below 0"},
		{Event{Document: "d", Counter: 1, Payload: []byte("1")}, Config{NextCounter: true}, "Counter",
			"NextCounter takes"},
		{Event{Document: "d", Key: "\x00", Payload: []byte("1")}, Config{}, "Key", "byte 0"},
		{Event{Document: "d", ID: "\xff", Payload: []byte("1")}, Config{}, "ID", "UTF-8"},
		{Event{Document: "d", Payload: []byte("1"), Columns: map[string]any{"a": []byte{0xFF}}}, Config{},
			`Columns["a"]`, "no text"},
		{Event{Document: "d", Payload: []byte("1"), Columns: map[string]any{"a": struct{}{}}}, Config{},
			`Columns["a"]`, "no text"},
		{Event{Document: "d", Payload: []byte("1"), Columns: map[string]any{"a\x00": 1}}, Config{},
			`Columns["a\x00"]`, "byte 0"},
		{Event{Document: "d", Payload: []byte(`"` + strings.Repeat("x", 800) + `"`)},
			Config{MaxPayload: 1024}, "Payload", "more than sink.max_payload"},
	} {
		_, err := d.pgx(t.Context(), messageOf(t, c.cfg), c.event)
		var bad *Invalid
		if !errors.As(err, &bad) || bad.Field != c.field || !strings.Contains(bad.Problem+bad.Hint, c.want) {
			t.Errorf("%+v: %v; want %s refused: %s", c.event, err, c.field, c.want)
		}
	}
}

// nested is a payload of that depth.
func nested(depth int) []byte { return []byte(strings.Repeat("[", depth) + strings.Repeat("]", depth)) }

func headers(n int) map[string]any {
	all := map[string]any{}
	for i := range n {
		all[fmt.Sprint("h", i)] = i
	}
	return all
}
