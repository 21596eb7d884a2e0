package producer

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// FuzzEnqueue: an event that passes is taken by PostgreSQL, and read back as it was given; one that is
// refused is refused by PostgreSQL as well, or is no event at all.
func FuzzEnqueue(f *testing.F) {
	d := newDatabase(f)
	types := []string{"json", "jsonb", "text", "bytea"}
	var boxes []*Outbox
	for _, typ := range types {
		d.exec("CREATE TABLE box_" + typ + " (id text, doc_id text, actor_id varchar(5), counter int, " +
			"seq_key text, payload " + typ + ", note " + typ + ")")
		boxes = append(boxes, outboxOf(f, Config{Table: "box_" + typ}))
	}
	odd := "\"\\{},NULL\n\r\t é☃𝄞\x01"
	for i := range types {
		f.Add(uint8(i), odd, "", int64(0), []byte(`{"a": 1.10}`), []byte(odd), "")
		f.Add(uint8(i), "d", odd[:5], int64(1<<31-1), []byte(odd), []byte("null"), odd)
		f.Add(uint8(i), "NULL", "NULL", int64(1<<31), []byte("\xff\x00"), []byte("\x00"), "\\")
		f.Add(uint8(i), "\xff", "ééééé", int64(1), []byte("\"\\u0000\""), []byte("9007199254740993"), `\x`)
	}
	f.Fuzz(func(t *testing.T, which uint8, doc, actor string, counter int64, payload, note []byte,
		id string) {
		o, typ := boxes[int(which)%len(types)], types[int(which)%len(types)]
		ctx := context.Background()
		tx, err := d.conn.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(ctx) //nolint:errcheck // nothing is kept
		e := Event{ID: "i" + id, Document: doc, Actor: actor, Counter: counter, Payload: payload,
			Columns: map[string]any{"note": note}}
		if note == nil {
			e.Columns["note"] = []byte{}
		}
		_, err = o.Enqueue(ctx, tx, e)
		var bad *Invalid
		switch {
		case errors.As(err, &bad):
			if e.Document == "" || e.Counter < 0 || e.Payload == nil ||
				strings.Contains(bad.Problem, "too deep") ||
				strings.Contains(bad.Problem, "sink.max_payload") ||
				strings.HasSuffix(actor, " ") { // which varchar(5) would cut
				return
			}
			if err := d.insert(ctx, tx, typ, e); err == nil {
				t.Fatalf("%s: %+v was refused (%v), PostgreSQL takes it", typ, e, bad)
			}
		case err != nil:
			t.Fatalf("%s: %+v passed: %v", typ, e, err)
		default:
			read := "convert_to(payload::text, 'UTF8'), convert_to(note::text, 'UTF8')"
			want := [][]byte{payload, e.Columns["note"].([]byte)}
			switch typ {
			case "bytea":
				read = "payload, note"
			case "jsonb":
				read = "convert_to((payload = $1::text::jsonb)::text, 'UTF8'), convert_to((note = " +
					"$2::text::jsonb)::text, 'UTF8')"
			}
			args := []any{}
			if typ == "jsonb" {
				args, want = []any{string(want[0]), string(want[1])}, [][]byte{[]byte("true"), []byte("true")}
			}
			got := make([][]byte, 2)
			var ids, docs, actors string
			var n int64
			err := tx.QueryRow(ctx, "SELECT id, doc_id, actor_id, counter, "+read+" FROM box_"+typ,
				args...).Scan(&ids, &docs, &actors, &n, &got[0], &got[1])
			if err != nil || ids != e.ID || docs != doc || actors != actor || n != counter ||
				!slices.EqualFunc(got, want, slices.Equal) {
				t.Fatalf("%s: read back %q %q %q %d %q, %v; want %+v", typ, ids, docs, actors, n, got, err, e)
			}
		}
	})
}

// insert writes the event without this package.
func (d *database) insert(ctx context.Context, tx pgx.Tx, typ string, e Event) error {
	payload, note := any(string(e.Payload)), any(string(e.Columns["note"].([]byte)))
	if typ == "bytea" {
		payload, note = e.Payload, e.Columns["note"]
	}
	_, err := tx.Exec(ctx, "INSERT INTO box_"+typ+
		" (id, doc_id, actor_id, counter, payload, note) VALUES ($1, $2, $3, $4, $5, $6)",
		e.ID, e.Document, e.Actor, e.Counter, payload, note)
	return err
}
