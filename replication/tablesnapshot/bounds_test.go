package tablesnapshot

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
)

// Rows with one place can't be told apart by it: they are counted.
func TestRowsWithTheSamePlaceAreCounted(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.Exec("CREATE TABLE outbox (id bigint, doc_id text, seq_key text, payload text)")
	d.Exec("INSERT INTO outbox VALUES (1, 'a', 'k'), (1, 'a', 'k'), (2, 'a', 'k'), (NULL, 'a', 'k'), " +
		"(NULL, 'a', 'k'), (1, 'a', 'l')")
	s, err := Open(within(t), d.cfg, "")
	must.Succeed(t, err)
	defer s.Close()
	keyed, keyless := relay.Mapping{Doc: "doc_id", Key: "seq_key",
		Payload: "payload"}, relay.Mapping{Doc: "doc_id", Payload: "payload"}
	for _, c := range []struct {
		q    Query
		p    Cursor
		want int
	}{
		{Query{Mapping: keyed, ID: "id"}, Cursor{"a", "k", "1"}, 2},
		{Query{Mapping: keyed, ID: "id"}, Cursor{"a", "k", "2"}, 1},
		{Query{Mapping: keyed, ID: "id"}, Cursor{"a", "k", ""}, 2},
		{Query{Mapping: keyed, ID: "id"}, Cursor{"a", "k", "3"}, 0},
		{Query{Mapping: keyed}, Cursor{"a", "k", ""}, 5},
		{Query{Mapping: keyless, ID: "id"}, Cursor{"a", "", "1"}, 3},
		{Query{Mapping: keyless, ID: "id"}, Cursor{"a", "", ""}, 2},
	} {
		if n, err := s.CountAt(within(t), c.q, c.p); n != c.want || err != nil {
			t.Errorf("%+v of %+v: %d, want %d, %v", c.p, c.q, n, c.want, err)
		}
	}
}

// Whoever goes on behind any row of a sorted query reads exactly those that are behind it: in the order of
// the ids' own type where there is no key, as bytes where there is one.
func TestReadingGoesOnBehindAnyRow(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	keyed := relay.Mapping{Doc: "doc_id", Key: "seq_key", Payload: "payload"}
	for _, c := range []struct {
		kind    string
		values  string // of the ids
		mapping relay.Mapping
		want    string // the ids of document a; "": they are not looked at
	}{
		{"bigint", "(10), (9), (-1), (100), (2)", relay.Mapping{Doc: "doc_id", Payload: "payload"},
			"-1 2 9 10 100"},
		{"numeric", "(10), (9.5), (9.05), (100)", relay.Mapping{Doc: "doc_id", Payload: "payload"},
			"9.05 9.5 10 100"},
		{"timestamptz", "('2024-03-01 00:00:00.5+02'), ('2024-02-29 21:00+00'), ('10000-01-01 00:00+00'), " +
			"('infinity')",
			relay.Mapping{Doc: "doc_id", Payload: "payload"}, ""},
		{"bigint", "(10), (9), (NULL)", relay.Mapping{Doc: "doc_id", Payload: "payload"}, "9 10 "},
		{"text", "('10'), ('9'), (''), ('Ä'), ('a\"\\b''c')",
			relay.Mapping{Doc: "doc_id", Payload: "payload"}, ""},
		{"bigint", "(10), (9), (100)", keyed, "10 100 9"},
		{"uuid", "('00000000-0000-0000-0000-00000000000a'), ('00000000-0000-0000-0000-00000000000b')", keyed,
			""},
	} {
		d.Exec("DROP TABLE IF EXISTS outbox")
		d.Exec("CREATE TABLE outbox (id " + c.kind + ", doc_id text, seq_key text, payload text)")
		d.Exec(`INSERT INTO outbox (id, doc_id, seq_key) SELECT id, doc, key FROM (VALUES ` + c.values + `) v(raw),
				LATERAL (SELECT raw::text::` + c.kind + `) i(id), unnest(ARRAY['a', 'B', 'ä\''']) doc, unnest(ARRAY['k', 'K']) key WHERE ` +
			map[bool]string{true: "true", false: "key = 'k'"}[c.mapping.Keyed()])
		rows := func(after *Cursor) (all []Cursor) {
			s, err := Open(within(t), d.cfg, "")
			must.Succeed(t, err)
			defer s.Close()
			err = s.Rows(within(t), Query{Mapping: c.mapping, ID: "id", Columns: []string{SortDoc, SortKey,
				SortID}, Sorted: true, After: after}, func(v [][]byte) error {
				all = append(all, Cursor{string(v[0]), string(v[1]), string(v[2])})
				return nil
			})
			if err != nil {
				t.Fatalf("%s: behind %+v: %v", c.kind, after, err)
			}
			return all
		}
		whole := rows(nil)
		var ids []string
		for i, r := range whole {
			if r.Doc == "a" && r.Key != "K" {
				ids = append(ids, r.ID)
			}
			if got := rows(&r); !slices.Equal(got, whole[i+1:]) {
				t.Errorf("%s: behind %+v: %+v, want %+v", c.kind, r, got, whole[i+1:])
			}
		}
		if got := strings.Join(ids, " "); c.want != "" && got != c.want || len(whole) == 0 {
			t.Errorf("%s: %s, want %s", c.kind, got, c.want)
		}
	}
}
