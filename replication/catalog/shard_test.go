package catalog

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// Only the row filter of the shard is taken, and none where there is no shard.
func TestOnlyTheRowFilterOfTheShardIsTaken(t *testing.T) {
	t.Parallel()
	outboxdb.EachWithRowFilters(t, func(t *testing.T, srv *pgserver.Server) {
		d := newDatabase(t, srv)
		d.Exec("SET client_min_messages = error")
		half := relay.Shard{Index: 1, Of: 2}
		const filtered = "CREATE PUBLICATION outflow FOR TABLE outbox WHERE (%s) WITH (publish = 'insert')"
		for name, c := range map[string]struct {
			make  string
			shard relay.Shard
			says  string // "": it is right
		}{
			"as init makes it": {fmt.Sprintf(filtered, rowfilter.Condition(half, "doc_id")), half, ""},
			"written by hand": {fmt.Sprintf(filtered,
				`(hash_array(array[ outbox."doc_id" ])&2147483647)  % 2=1`), half, ""},
			"without a filter": {"CREATE PUBLICATION outflow FOR TABLE outbox", half,
				"publishes all rows of public.outbox, the configuration says shard 1/2 by column doc_id. " +
					"Each shard has"},
			"another shard": {fmt.Sprintf(filtered,
				rowfilter.Condition(relay.Shard{Index: 0, Of: 2}, "doc_id")), half,
				"publishes shard 0/2 by column doc_id"},
			"another number": {fmt.Sprintf(filtered,
				rowfilter.Condition(relay.Shard{Index: 1, Of: 3}, "doc_id")), half, "publishes shard 1/3"},
			"another column": {fmt.Sprintf(filtered, rowfilter.Condition(half, "actor_id")), half,
				"by column actor_id"},
			"another function": {fmt.Sprintf(filtered, "(hashtext(doc_id) & 2147483647) % 2 = 1"),
				half, "a filter lets through"},
			"a part of it": {fmt.Sprintf(filtered, rowfilter.Condition(half, "doc_id")+
				" AND counter > 0"), half, "a filter lets through"},
			"all tables": {"CREATE PUBLICATION outflow FOR ALL TABLES", half, "publishes all tables whole"},
			"its schema": {"CREATE PUBLICATION outflow FOR TABLES IN SCHEMA public", half,
				"publishes all rows"},
			"updates, too": {strings.Replace(fmt.Sprintf(filtered, rowfilter.Condition(half,
				"doc_id")), "'insert'", "'insert, update'", 1), half, "publishes updates"},
			"its schema beside it": {"CREATE PUBLICATION outflow FOR TABLES IN SCHEMA public, TABLE " +
				"outbox WHERE (" + rowfilter.Condition(half, "doc_id") + ")", half, "publishes all rows"},
			"a shard, and none set": {fmt.Sprintf(filtered, rowfilter.Condition(half, "doc_id")),
				relay.Shard{}, "Set shard to 1/2, or publication to"},
			"another filter, no shard": {fmt.Sprintf(filtered, "counter > 0"), relay.Shard{},
				"without a WHERE clause"},
			"its own column, renamed": {fmt.Sprintf(filtered, rowfilter.Condition(half, "doc_id")) +
				"; ALTER TABLE outbox RENAME doc_id TO x; ALTER TABLE outbox RENAME actor_id TO doc_id", half,
				"by column x"},
			"another table has a filter": {"CREATE TABLE other (n int); CREATE PUBLICATION outflow FOR " +
				"TABLE outbox, TABLE other WHERE (n > 0)", relay.Shard{}, ""},
		} {
			t.Run(name, func(t *testing.T) {
				const anew = "DROP PUBLICATION IF EXISTS outflow; DROP SCHEMA public CASCADE; CREATE " +
					"SCHEMA public; "
				if _, err := d.Conn.PgConn().Exec(within(t), anew+outboxdb.PlainTable+"; "+
					c.make).ReadAll(); err != nil {
					t.Fatal(err)
				}
				cfg := d.cfg
				cfg.Shard, cfg.ShardBy, cfg.Columns = c.shard, "doc_id", nil
				s, err := OpenSetup(within(t), cfg)
				must.Succeed(t, err)
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
func TestAColumnThatNoRowFilterCanTakeIsRefused(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := newDatabase(t, srv)
		d.cfg.Shard, d.cfg.ShardBy = relay.Shard{Index: 0, Of: 2}, "doc_id"
		if srv.Installation.Major < rowfilter.MinVersion/10000 {
			d.Exec(outboxdb.PlainTable)
			s := d.setup()
			defer s.Close()
			_, _, err := s.EnsurePublication(within(t))
			wantFault(t, err, outbox.Fatal, "shard_version")
			d.Exec("CREATE PUBLICATION outflow FOR TABLE outbox")
			_, err = s.Publication(within(t))
			wantFault(t, err, outbox.Fatal, "shard_version")
			return
		}
		d.Exec("CREATE DOMAIN name_of AS text")
		d.Exec("CREATE TYPE kind_of AS ENUM ('a', 'b')")
		for _, kind := range []string{"public.name_of", "public.kind_of", "json", "text COLLATE deaf"} {
			d.Exec("DROP TABLE IF EXISTS outbox")
			d.Exec("DROP COLLATION IF EXISTS deaf")
			if strings.Contains(kind, "COLLATE") {
				if _, err := d.Conn.Exec(within(t), "CREATE COLLATION deaf (provider = icu, locale = "+
					"'und-u-ks-level2', deterministic = false)"); err != nil {
					continue // built without ICU
				}
			}
			d.Exec("CREATE TABLE outbox (id uuid, doc_id " + kind +
				", actor_id text, counter bigint, seq_key text, payload jsonb)")
			s := d.setup()
			_, _, err := s.EnsurePublication(within(t))
			s.Close()
			if f := wantFault(t, err, outbox.Fatal, "shard_column"); !strings.Contains(f.Error(),
				`by column "doc_id" of type `+strings.Fields(kind)[0]) {
				t.Error(f)
			}
			if n := d.Text("SELECT count(*)::text FROM pg_publication"); n != "0" {
				t.Errorf("%s publications were made for a column of type %s", n, kind)
			}
		}
	})
}
