package replication

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// filtering is pgtest.Each on the majors that can filter rows.
func filtering(t *testing.T, test func(t *testing.T, srv *pgserver.Server)) {
	t.Helper()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		if srv.Installation.Major < shardVersion/10000 {
			t.Skip("no row filters")
		}
		t.Parallel()
		test(t, srv)
	})
}

// shards are n configurations on one table, each with names of its own.
func (d *database) shards(n int, column string) []SetupConfig {
	all := make([]SetupConfig, n)
	for k := range all {
		c := d.cfg
		c.Slot, c.Publication = fmt.Sprintf("%s_%d", c.Slot, k), fmt.Sprintf("shard_%d", k)
		c.Shard, c.ShardBy, c.Columns = relay.Shard{Index: k, Of: n}, column, nil
		all[k] = c
	}
	return all
}

// Each row is in exactly one shard, in the stream of changes as in the table, and the rows of a document are in the same one: whatever the
// type of the column, NULL and partitions included.
func TestShardsDivideTheTable(t *testing.T) {
	t.Parallel()
	filtering(t, func(t *testing.T, srv *pgserver.Server) {
		const n = 3
		d := newDatabase(t, srv)
		d.exec("SET client_min_messages = error")
		for i, c := range []struct {
			column, kind string
			value        string // of the g-th document
			partitioned  bool
		}{
			{"doc_id", "text", "'doc ' || g || ' ö''\"\\'", false},
			{"Do c\"", "varchar(40)", "g::text", false},
			{"order", "char(8)", "g::text", false},
			{"doc_id", `text COLLATE "C"`, "repeat('long', 5000) || g", false},
			{"doc_id", "uuid", "md5(g::text)::uuid", false},
			{"doc_id", "int", "g", false},
			{"doc_id", "bigint", "g::bigint << 33", false},
			{"doc_id", "numeric", "g + 0.50", false},
			{"doc_id", "bytea", "decode(md5(g::text), 'hex')", false},
			{"doc_id", "timestamptz", "'2026-01-01'::timestamptz + g * interval '1 s'", false},
			{"doc_id", "text", "g::text", true},
		} {
			t.Run(fmt.Sprintf("%s,partitioned=%v", c.kind, c.partitioned), func(t *testing.T) {
				table := fmt.Sprintf("t%d", i)
				shape := fmt.Sprintf("CREATE TABLE %s (no serial, id uuid DEFAULT gen_random_uuid(), %s %s)", table, quote(c.column), c.kind)
				if c.partitioned {
					shape += " PARTITION BY RANGE (no)"
				}
				d.exec(shape)
				if c.partitioned {
					d.exec(fmt.Sprintf("CREATE TABLE %s_a PARTITION OF %[1]s FOR VALUES FROM (0) TO (50)", table))
					d.exec(fmt.Sprintf("CREATE TABLE %s_b (%s %s, id uuid, no int NOT NULL)", table, quote(c.column), c.kind)) // in another order
					d.exec(fmt.Sprintf("ALTER TABLE %s ATTACH PARTITION %[1]s_b FOR VALUES FROM (50) TO (1000)", table))
				}
				all := d.shards(n, c.column)
				for k := range all {
					all[k].Table, all[k].Publication = "public."+table, table+all[k].Publication
					all[k].Slot += table
					s, err := OpenSetup(within(t), all[k])
					if err != nil {
						t.Fatal(err)
					}
					defer s.Close()
					for _, created := range []bool{true, false} {
						if got, id, err := s.EnsurePublication(within(t)); err != nil || got != created || id.RelOID == 0 {
							t.Fatal(got, id, err)
						}
					}
					if _, err := s.CreateSlot(within(t)); err != nil {
						t.Fatal(err)
					}
				}
				const rows = 90 // three of each document, and some of none
				d.exec(fmt.Sprintf("INSERT INTO %s (id, %s) SELECT gen_random_uuid(), CASE WHEN g > 0 THEN %s END FROM generate_series(1, %d) n, LATERAL (SELECT n %% 30) x(g)",
					table, quote(c.column), c.value, rows))
				shardOf, documents := map[string]int{}, map[string]int{}
				for k := range all {
					snap, err := OpenSnapshot(within(t), all[k].Config, "")
					if err != nil {
						t.Fatal(err)
					}
					q := RowQuery{Mapping: relay.Mapping{Doc: c.column}, ID: "id", Columns: []string{"id", SortDoc}, Sorted: true}
					var ids []string
					err = snap.Rows(within(t), q, func(v [][]byte) error {
						ids = append(ids, string(v[0]))
						if before, there := documents[string(v[1])]; there && before != k {
							t.Errorf("document %q is in shards %d and %d", v[1], before, k)
						}
						documents[string(v[1])] = k
						return nil
					})
					if err != nil {
						t.Fatal(err)
					}
					if got, err := snap.Count(within(t), q); err != nil || got != len(ids) {
						t.Errorf("shard %d: %d rows, counted %d, %v", k, len(ids), got, err)
					}
					snap.Close()
					for _, id := range ids {
						if before, there := shardOf[id]; there {
							t.Errorf("row %s is in shards %d and %d", id, before, k)
						}
						shardOf[id] = k
					}
					if len(ids) < 5 {
						t.Errorf("shard %d has %d rows of %d", k, len(ids), rows)
					}
					streamed := 0
					err = Peek(within(t), all[k].Config, 0, false, func(m Message) error {
						if m.Data[0] != 'I' {
							return nil
						}
						streamed++
						if !slices.ContainsFunc(ids, func(id string) bool { return bytes.Contains(m.Data, []byte(id)) }) {
							t.Errorf("shard %d: the stream has a row that its part of the table has not: %.80q", k, m.Data)
						}
						return nil
					})
					if err != nil || streamed != len(ids) {
						t.Errorf("shard %d: %d rows in the stream, %d in the table; %v", k, streamed, len(ids), err)
					}
					d.exec("SELECT pg_drop_replication_slot($1)", all[k].Slot)
				}
				if len(shardOf) != rows || len(documents) != 30 {
					t.Errorf("%d rows and %d documents in all shards, want %d and 30", len(shardOf), len(documents), rows)
				}
			})
		}
	})
}

// Only the row filter of the shard is taken, and none where there is no shard.
func TestShardOfThePublication(t *testing.T) {
	t.Parallel()
	filtering(t, func(t *testing.T, srv *pgserver.Server) {
		d := newDatabase(t, srv)
		d.exec("SET client_min_messages = error")
		half := relay.Shard{Index: 1, Of: 2}
		const filtered = "CREATE PUBLICATION outflow FOR TABLE outbox WHERE (%s) WITH (publish = 'insert')"
		for name, c := range map[string]struct {
			make  string
			shard relay.Shard
			says  string // "": it is right
		}{
			"as init makes it":           {fmt.Sprintf(filtered, shardFilter(half, "doc_id")), half, ""},
			"written by hand":            {fmt.Sprintf(filtered, `(hash_array(array[ outbox."doc_id" ])&2147483647)  % 2=1`), half, ""},
			"without a filter":           {"CREATE PUBLICATION outflow FOR TABLE outbox", half, "publishes all rows of public.outbox, the configuration says shard 1/2 by column doc_id. Each shard has"},
			"another shard":              {fmt.Sprintf(filtered, shardFilter(relay.Shard{Index: 0, Of: 2}, "doc_id")), half, "publishes shard 0/2 by column doc_id"},
			"another number":             {fmt.Sprintf(filtered, shardFilter(relay.Shard{Index: 1, Of: 3}, "doc_id")), half, "publishes shard 1/3"},
			"another column":             {fmt.Sprintf(filtered, shardFilter(half, "actor_id")), half, "by column actor_id"},
			"another function":           {fmt.Sprintf(filtered, "(hashtext(doc_id) & 2147483647) % 2 = 1"), half, "a filter lets through"},
			"a part of it":               {fmt.Sprintf(filtered, shardFilter(half, "doc_id")+" AND counter > 0"), half, "a filter lets through"},
			"all tables":                 {"CREATE PUBLICATION outflow FOR ALL TABLES", half, "publishes all tables whole"},
			"its schema":                 {"CREATE PUBLICATION outflow FOR TABLES IN SCHEMA public", half, "publishes all rows"},
			"updates, too":               {strings.Replace(fmt.Sprintf(filtered, shardFilter(half, "doc_id")), "'insert'", "'insert, update'", 1), half, "publishes updates"},
			"its schema beside it":       {"CREATE PUBLICATION outflow FOR TABLES IN SCHEMA public, TABLE outbox WHERE (" + shardFilter(half, "doc_id") + ")", half, "publishes all rows"},
			"a shard, and none set":      {fmt.Sprintf(filtered, shardFilter(half, "doc_id")), relay.Shard{}, "Set shard to 1/2, or publication to"},
			"another filter, no shard":   {fmt.Sprintf(filtered, "counter > 0"), relay.Shard{}, "without a WHERE clause"},
			"its own column, renamed":    {fmt.Sprintf(filtered, shardFilter(half, "doc_id")) + "; ALTER TABLE outbox RENAME doc_id TO x; ALTER TABLE outbox RENAME actor_id TO doc_id", half, "by column x"},
			"another table has a filter": {"CREATE TABLE other (n int); CREATE PUBLICATION outflow FOR TABLE outbox, TABLE other WHERE (n > 0)", relay.Shard{}, ""},
		} {
			t.Run(name, func(t *testing.T) {
				const anew = "DROP PUBLICATION IF EXISTS outflow; DROP SCHEMA public CASCADE; CREATE SCHEMA public; "
				if _, err := d.conn.PgConn().Exec(within(t), anew+plainTable+"; "+c.make).ReadAll(); err != nil {
					t.Fatal(err)
				}
				cfg := d.cfg
				cfg.Shard, cfg.ShardBy, cfg.Columns = c.shard, "doc_id", nil
				s, err := OpenSetup(within(t), cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				_, err = s.Publication(within(t))
				if c.says == "" {
					if err != nil {
						t.Error(err)
					}
					return
				}
				code := "publication_filter"
				if c.says == "publishes updates" {
					code = "publication_update"
				}
				if f := wantFault(t, err, outbox.Fatal, code); !strings.Contains(f.Error(), c.says) {
					t.Errorf("%v; want it to say %q", f, c.says)
				}
			})
		}
	})
}

// What a row filter can't do is said before anything is made.
func TestShardRefused(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := newDatabase(t, srv)
		d.cfg.Shard, d.cfg.ShardBy = relay.Shard{Index: 0, Of: 2}, "doc_id"
		if srv.Installation.Major < shardVersion/10000 {
			d.exec(plainTable)
			s := d.setup()
			defer s.Close()
			_, _, err := s.EnsurePublication(within(t))
			wantFault(t, err, outbox.Fatal, "shard_version")
			d.exec("CREATE PUBLICATION outflow FOR TABLE outbox")
			_, err = s.Publication(within(t))
			wantFault(t, err, outbox.Fatal, "shard_version")
			return
		}
		d.exec("CREATE DOMAIN name_of AS text")
		d.exec("CREATE TYPE kind_of AS ENUM ('a', 'b')")
		for _, kind := range []string{"public.name_of", "public.kind_of", "json", "text COLLATE deaf"} {
			d.exec("DROP TABLE IF EXISTS outbox")
			d.exec("DROP COLLATION IF EXISTS deaf")
			if strings.Contains(kind, "COLLATE") {
				if _, err := d.conn.Exec(within(t), "CREATE COLLATION deaf (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"); err != nil {
					continue // built without ICU
				}
			}
			d.exec("CREATE TABLE outbox (id uuid, doc_id " + kind + ", actor_id text, counter bigint, seq_key text, payload jsonb)")
			s := d.setup()
			_, _, err := s.EnsurePublication(within(t))
			s.Close()
			if f := wantFault(t, err, outbox.Fatal, "shard_column"); !strings.Contains(f.Error(), `by column "doc_id" of type `+strings.Fields(kind)[0]) {
				t.Error(f)
			}
			if n := d.text("SELECT count(*)::text FROM pg_publication"); n != "0" {
				t.Errorf("%s publications were made for a column of type %s", n, kind)
			}
		}
	})
}

// Where rows of a shard are read from the table, those of the others are not there.
func TestShardOfSnapshot(t *testing.T) {
	t.Parallel()
	filtering(t, func(t *testing.T, srv *pgserver.Server) {
		d := newDatabase(t, srv)
		d.exec("CREATE TABLE outbox (id int, doc_id text, payload jsonb)") // ids may repeat, and be missing
		d.exec("INSERT INTO outbox SELECT n / 2, 'doc' || n % 7, '{}' FROM generate_series(2, 201) n")
		d.exec("INSERT INTO outbox SELECT NULL, 'doc' || n % 7, '{}' FROM generate_series(1, 70) n")
		var none, double, alike, known int
		for _, c := range d.shards(2, "doc_id") {
			r, err := OpenReader(within(t), c.Config)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Know(within(t), func(add func(IDSum) error) error { return add(IDSum(outbox.HeaderIDSum("v=1 id=7 key="))) }); err != nil {
				t.Fatal(err)
			}
			s, err := r.Snapshot(within(t), "")
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			q := RowQuery{Mapping: relay.Mapping{Doc: "doc_id"}, ID: "id", Unknown: true}
			without, err := s.Count(within(t), q)
			if err != nil {
				t.Fatal(err)
			}
			q.Unknown = false
			all, err := s.Count(within(t), q)
			if err != nil {
				t.Fatal(err)
			}
			known += all - without
			missing, twice, err := s.CheckIDs(within(t), "id")
			if err != nil || missing%10 != 0 {
				t.Error(missing, twice, err)
			}
			none, double = none+missing, double+twice
			for doc := range 7 {
				n, err := s.Alike(within(t), q, RowPlace{Doc: fmt.Sprint("doc", doc)})
				if err != nil || n != 0 && n != 10 {
					t.Error(n, err)
				}
				alike += n
			}
		}
		if none != 70 || alike != 70 || double > 100 || known != 2 {
			t.Errorf("%d rows without an id, %d found by place (want 70), %d ids twice, %d rows known (want 2)", none, alike, double, known)
		}
	})
}
