package decoder

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
)

// truthTypes are the types with a binary reader; bytea is compared as payload.
var truthTypes = []string{
	"bool", "name", "int8", "int2", "int4", "text", "oid", "json", "char(12)", "varchar", "date", "timestamp",
	"timestamptz", "uuid", "jsonb",
}

const truthSetup = `
CREATE TABLE outbox (id serial, payload bytea, %s);
CREATE FUNCTION fill() RETURNS void LANGUAGE sql AS $$
  INSERT INTO outbox (c_date, c_timestamp, c_timestamptz)
    SELECT t::date, t, t AT TIME ZONE 'UTC' FROM unnest(ARRAY['infinity', '-infinity',
    '4714-11-24 00:00:00 BC', '0001-12-31 23:59:59.9 BC',
      '0001-01-01', '0099-03-01 01:02:03.000001', '1582-10-15', '1899-12-31 23:59:59.999999',
      '1900-02-28 12:00', '1970-01-01', '1999-12-31',
      '2000-01-01', '2000-02-29 00:00:00.120000', '2100-03-01', '9999-12-31 23:59:59.5', '10000-01-01',
      '294276-12-31 23:59:59.999999']::timestamp[]) t;
  INSERT INTO outbox (c_date, c_timestamp, c_timestamptz)
    SELECT timestamp '0201-01-01 BC' + n * interval '37 days 1 hour 17 seconds',
    timestamp '0201-01-01 BC' + n * interval '37 days 1 hour 17 seconds 1 us',
      timestamptz '1960-01-01' + n * interval '31 hours 59.00123 seconds'
      FROM generate_series(1, 25000, 17) n;
  INSERT INTO outbox (c_date) VALUES ('5874897-12-31'), ('4714-11-24 BC'), ('infinity'), ('-infinity');
  INSERT INTO outbox (c_bool, c_name, c_int8, c_int2, c_int4, c_text, c_oid, c_json, c_char, c_varchar,
  c_uuid, c_jsonb, payload) VALUES
    (true, 'pg_class', -9223372036854775808, -32768, -2147483648, '', 0, '{"a" :1, "a":2}', 'ab', '',
    '00000000-0000-0000-0000-000000000000',
      '{"a" :1, "b":1.50e3}', ''),
    (false, '', 9223372036854775807, 32767, 2147483647,
    E'naïve\t\n"\\', 4294967295, ' 1.0 ', '', 'é ', 'FFFFFFFF-ffff-FFFF-ffff-012345678901',
      '"\u00f7\ud83d\ude00"', '\x00ff5c27'),
    (NULL, NULL, 0, 0, 0, repeat('x', 200000), NULL, to_json(repeat('y', 70000)), NULL, NULL, NULL, 'null',
    decode(repeat('00ff', 90000), 'hex'));
$$`

func short(typ string) string { return "c_" + strings.TrimSuffix(typ, "(12)") }

// What the decoder gives is what PostgreSQL itself prints, in both forms.
func TestLiveValuesAreAsPrinted(t *testing.T) {
	t.Parallel()
	var defs, prints, extra []string
	for _, typ := range truthTypes {
		c := short(typ)
		defs = append(defs, c+" "+typ)
		prints = append(prints, fmt.Sprintf("CASE WHEN %s IS NOT NULL THEN format('%%s', %s) END", c, c))
		extra = append(extra, c)
	}
	cfg := Config{Mapping: relay.Mapping{Payload: "payload"}, ID: "id", Extra: extra}
	pgtest.Each(t, func(t *testing.T, s *pgserver.Server) {
		t.Parallel()
		conn := connect(t, pgtest.Database(t, s))
		play(t, conn, scenario{setup: fmt.Sprintf(truthSetup, strings.Join(defs, ", ")),
			steps: []string{"SELECT fill()"}})
		want := rows(t, conn, "SELECT format('%s', id), encode(payload, 'hex'), "+strings.Join(prints, ", ")+
			" FROM outbox ORDER BY id")
		for _, binary := range []bool{false, true} {
			got := decodeLive(t, conn, cfg, binary)
			if len(got) != len(want) || len(got) < 1000 {
				t.Fatalf("%d events, %d rows", len(got), len(want))
			}
			for i, e := range got {
				if e.ID != *want[i][0] || e.Bad != "" {
					t.Fatalf("row %s, id %q, bad %q", *want[i][0], e.ID, e.Bad)
				}
				if p := want[i][1]; (p == nil) != (e.Null&relay.NullPayload != 0) || p != nil &&
					*p != fmt.Sprintf("%x", e.Payload) {
					t.Errorf("row %s, binary %v: payload of %d bytes differs", e.ID, binary, e.PayloadSize)
				}
				for n, w := range want[i][2:] {
					if (w == nil) != e.ExtraNull(n) || w != nil && *w != e.Extra[n] {
						t.Errorf("row %s, %s, binary %v: %.100q", e.ID, extra[n], binary, e.Extra[n])
					}
				}
			}
		}
	})
}

// The computed key is what SQL computes, whatever the types of actor and counter; numeric can be read as text
// only.
func TestTheComputedKeyIsWhatSQLComputes(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, s *pgserver.Server) {
		t.Parallel()
		for _, types := range [][2]string{
			{"text", "bigint"}, {"varchar(9)", "int"}, {"char(5)", "smallint"}, {"int", "text"},
			{"text", "char(30)"}, {"bool", "bool"},
			{"timestamptz", "date"}, {"name", "oid"}, {"text", "numeric"},
		} {
			t.Run(types[0]+" "+types[1], func(t *testing.T) {
				conn := connect(t, pgtest.Database(t, s))
				setup := fmt.Sprintf("CREATE TABLE outbox (actor %s, counter %s, doc text DEFAULT "+
					"'rustcode', payload text DEFAULT '')", types[0], types[1])
				samples := map[string]string{
					"text": `'', 'x', 'y ', 'a:b', 'é', '-12', '123456789012345678901', repeat('÷', 19), repeat('÷', 25)`, "bool": "true, false",
					"bigint": "0, 1, -5, 9223372036854775807, -9223372036854775808", "int": "0, -2147483648",
					"smallint": "7, -7", "oid": "4294967295",
					"timestamptz": "'infinity', '2024-05-01 10:00:00.5+00'",
					"date":        "'0044-03-15 BC', '2024-05-01'", "numeric": "1.50, -3, 1e25",
				}
				of := func(typ string) string {
					list, ok := samples[typ]
					if !ok {
						list, typ = "'x', 'y ', '12'", "text"
					}
					return "(SELECT unnest(ARRAY[" + list + ", NULL]::" + typ + "[])) "
				}
				play(t, conn, scenario{setup: setup, steps: []string{fmt.Sprintf(
					"INSERT INTO outbox (actor, counter) SELECT a::%s, c::%s FROM %s AS a(a), %s AS c(c)",
					types[0], types[1], of(types[0]), of(types[1]))}})
				want := rows(t, conn, "SELECT actor || ':' || lpad(counter::text, 20, '0') FROM outbox "+
					"ORDER BY ctid")
				cfg := Config{Mapping: relay.Mapping{Doc: "doc", Actor: "actor", Counter: "counter",
					Key: "seq_key", Payload: "payload"}}
				for _, binary := range []bool{false, true} {
					if binary && types[1] == "numeric" {
						continue
					}
					got := decodeLive(t, conn, cfg, binary)
					if len(got) != len(want) || len(got) < 4 {
						t.Fatalf("%d events, %d rows", len(got), len(want))
					}
					for i, e := range got {
						w := want[i][0]
						if (w == nil) != (e.Null&relay.NullKey != 0) || w != nil && *w != e.Key {
							t.Errorf("binary %v: key %q, null %v, of actor %q", binary, e.Key,
								e.Null&relay.NullKey != 0, e.Actor)
						}
					}
				}
			})
		}
	})
}

// A value far above any buffer comes whole, and a prepared transaction comes when it is committed.
func TestLiveLargeAndPrepared(t *testing.T) {
	t.Parallel()
	s := pgtest.Own(t, 0, "max_prepared_transactions=4")
	conn := connect(t, s.URL("postgres"))
	const insert = "INSERT INTO outbox VALUES (1, (SELECT json_agg(n || md5(n::text)) FROM " +
		"generate_series(1, 30000) n))"
	play(t, conn, scenario{
		setup: "CREATE TABLE outbox (id int, payload jsonb)",
		steps: []string{insert, "BEGIN; " + insert, "PREPARE TRANSACTION 'later'", insert,
			"COMMIT PREPARED 'later'", "BEGIN; " + insert,
			"PREPARE TRANSACTION 'never'", "ROLLBACK PREPARED 'never'"},
	})
	want := rows(t, conn, "SELECT DISTINCT encode(sha256(convert_to(payload::text, 'UTF8')), 'hex'), "+
		"length(payload::text)::text FROM outbox")
	cfg := Config{Mapping: relay.Mapping{Payload: "payload"}}
	for _, binary := range []bool{false, true} {
		got := decodeLive(t, conn, cfg, binary)
		if len(got) != 3 {
			t.Fatalf("%d events", len(got))
		}
		for _, e := range got {
			if sum := fmt.Sprintf("%x", sha256.Sum256(e.Payload)); sum != *want[0][0] ||
				e.PayloadSize < 1_000_000 {
				t.Errorf("binary %v: %d bytes with sum %s, want %s with %s", binary, e.PayloadSize, sum,
					*want[0][1], *want[0][0])
			}
		}
		limited := cfg
		limited.MaxPayload = 1_000_000
		for i, e := range decodeLive(t, conn, limited, binary) {
			if e.Payload != nil || e.PayloadSize != got[i].PayloadSize {
				t.Errorf("above the limit: %d bytes, size %d", len(e.Payload), e.PayloadSize)
			}
		}
	}
}

// rows gives what a query prints; nil is NULL.
func rows(t *testing.T, conn *pgx.Conn, sql string) (all [][]*string) {
	t.Helper()
	rs, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
	if err != nil {
		t.Fatalf("%.200s: %v", sql, err)
	}
	for _, r := range rs[0].Rows {
		var line []*string
		for _, v := range r {
			if v == nil {
				line = append(line, nil)
				continue
			}
			s := string(bytes.Clone(v))
			line = append(line, &s)
		}
		all = append(all, line)
	}
	return all
}

func decodeLive(t *testing.T, conn *pgx.Conn, cfg Config, binary bool) []relay.Event {
	t.Helper()
	cfg.TableOID = tableOf(t, conn)
	results, err := decodeAll(cfg, peek(t, conn, binary)...)
	must.Succeed(t, err)
	return events(results)
}
