package replication

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// Each row is in exactly one shard, in the stream of changes as in the table, and the rows of a document are
// in the same one: whatever the type of the column, NULL and partitions included.
func TestShardsDivideTheTable(t *testing.T) {
	t.Parallel()
	outboxdb.EachWithRowFilters(t, func(t *testing.T, srv *pgserver.Server) {
		const n = 3
		d := newDatabase(t, srv)
		d.Exec("SET client_min_messages = error")
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
				shape := fmt.Sprintf("CREATE TABLE %s (no serial, id uuid DEFAULT gen_random_uuid(), %s %s)",
					table, postgres.Quote(c.column), c.kind)
				if c.partitioned {
					shape += " PARTITION BY RANGE (no)"
				}
				d.Exec(shape)
				if c.partitioned {
					d.Exec(fmt.Sprintf("CREATE TABLE %s_a PARTITION OF %[1]s FOR VALUES FROM (0) TO (50)",
						table))
					// in another order
					d.Exec(fmt.Sprintf("CREATE TABLE %s_b (%s %s, id uuid, no int NOT NULL)", table,
						postgres.Quote(c.column), c.kind))
					d.Exec(fmt.Sprintf("ALTER TABLE %s ATTACH PARTITION %[1]s_b FOR VALUES FROM (50) TO "+
						"(1000)", table))
				}
				all := d.shards(n, c.column)
				for k := range all {
					all[k].Table, all[k].Publication = "public."+table, table+all[k].Publication
					all[k].Slot += table
					s, err := catalog.OpenSetup(within(t), all[k])
					must.Succeed(t, err)
					defer s.Close()
					for _, created := range []bool{true, false} {
						if got, id, err := s.EnsurePublication(within(t)); err != nil || got != created ||
							id.RelOID == 0 {
							t.Fatal(got, id, err)
						}
					}
					if _, err := s.CreateSlot(within(t)); err != nil {
						t.Fatal(err)
					}
				}
				const rows = 90 // three of each document, and some of none
				d.Exec(fmt.Sprintf("INSERT INTO %s (id, %s) SELECT gen_random_uuid(), CASE WHEN g > 0 THEN "+
					"%s END FROM generate_series(1, %d) n, LATERAL (SELECT n %% 30) x(g)",
					table, postgres.Quote(c.column), c.value, rows))
				shardOf, documents := map[string]int{}, map[string]int{}
				for k := range all {
					snap, err := tablesnapshot.Open(within(t), all[k].Config, "")
					must.Succeed(t, err)
					q := tablesnapshot.Query{Mapping: relay.Mapping{Doc: c.column}, ID: "id",
						Columns: []string{"id", tablesnapshot.SortDoc}, Sorted: true}
					var ids []string
					err = snap.Rows(within(t), q, func(v [][]byte) error {
						ids = append(ids, string(v[0]))
						if before, there := documents[string(v[1])]; there && before != k {
							t.Errorf("document %q is in shards %d and %d", v[1], before, k)
						}
						documents[string(v[1])] = k
						return nil
					})
					must.Succeed(t, err)
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
					err = Peek(within(t), Config{Config: all[k].Config}, 0, func(m Message) error {
						if m.Data[0] != 'I' {
							return nil
						}
						streamed++
						if !slices.ContainsFunc(ids, func(id string) bool {
							return bytes.Contains(m.Data, []byte(id))
						}) {
							t.Errorf("shard %d: the stream has a row that its part of the table has not: "+
								"%.80q", k, m.Data)
						}
						return nil
					})
					if err != nil || streamed != len(ids) {
						t.Errorf("shard %d: %d rows in the stream, %d in the table; %v", k, streamed,
							len(ids), err)
					}
					d.Exec("SELECT pg_drop_replication_slot($1)", all[k].Slot)
				}
				if len(shardOf) != rows || len(documents) != 30 {
					t.Errorf("%d rows and %d documents in all shards, want %d and 30", len(shardOf),
						len(documents), rows)
				}
			})
		}
	})
}

// shards are n configurations on one table, each with names of its own.
func (d *database) shards(n int, column string) []catalog.SetupConfig {
	all := make([]catalog.SetupConfig, n)
	for k := range all {
		c := d.cfg
		c.Slot, c.Publication = fmt.Sprintf("%s_%d", c.Slot, k), fmt.Sprintf("shard_%d", k)
		c.Shard, c.ShardBy, c.Columns = relay.Shard{Index: k, Of: n}, column, nil
		all[k] = c
	}
	return all
}
