package catalog

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
)

func TestASampleReadsAndCallsNoMoreThanItSays(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := newDatabase(t, srv)
		// Whoever may create objects tries to have his own called in place of PostgreSQL's, by search_path
		// and by the types of the columns.
		d.Exec(`CREATE SCHEMA evil;
			CREATE TABLE evil.called (n int);
			CREATE FUNCTION evil.format(text, VARIADIC "any") RETURNS text LANGUAGE internal AS 'text_format';
			CREATE FUNCTION evil.hashtextextended(text, bigint) RETURNS bigint LANGUAGE sql
				AS 'INSERT INTO evil.called VALUES (1) RETURNING 0::bigint';
			CREATE FUNCTION evil.pg_relation_size(oid) RETURNS bigint LANGUAGE sql
				AS 'INSERT INTO evil.called VALUES (2) RETURNING 0::bigint';
			CREATE TYPE evil.doc AS ENUM ('note', 'list');
			CREATE FUNCTION evil.print(evil.doc) RETURNS text LANGUAGE sql
				AS 'INSERT INTO evil.called VALUES (3) RETURNING ''note''';
			CREATE CAST (evil.doc AS text) WITH FUNCTION evil.print(evil.doc) AS IMPLICIT;
			CREATE TABLE outbox (doc_id evil.doc, actor_id text, counter numeric, len smallint,
				payload text NOT NULL);
			ALTER TABLE outbox ALTER payload SET STORAGE PLAIN;
			DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = evil, public, pg_catalog',
				current_database()); END $$`)
		// one row in a page
		d.Exec(`INSERT INTO outbox SELECT CASE WHEN n % 2 = 0 THEN 'note' ELSE 'list' END::evil.doc,
			NULL, nullif(n, 299), 1, repeat('x', 7000) FROM generate_series(1, 300) n`)
		s := d.setup()
		defer s.Close()
		must.Succeed(t, s.DryRun(within(t)))
		table, err := s.Table(within(t))
		must.Succeed(t, err)
		m := relay.Mapping{Doc: "doc_id", Actor: "actor_id", Counter: "counter"}
		sample := func(rows int, blocks int64) CounterSample {
			t.Helper()
			got, err := s.SampleCounters(within(t), table, m, []string{"len"},
				SampleLimits{rows, blocks, time.Minute})
			if err != nil || got.Refused != "" {
				t.Fatal(got.Refused, err)
			}
			return got
		}
		for _, c := range []struct {
			rows   int
			blocks int64
			want   int
			cut    bool
			edges  int
		}{
			{1000, 16, 16, true, 8}, {40, 1000, 40, true, 20}, {1000, 1000, 300, false, 75},
		} {
			got := sample(c.rows, c.blocks)
			edges := 0
			for _, r := range got.Rows {
				if r.Edge {
					edges++
				}
			}
			if len(got.Rows) != c.want || got.Cut != c.cut || edges != c.edges {
				t.Fatalf("%+v: %d rows, cut %v, %d edges", c, len(got.Rows), got.Cut, edges)
			}
			last := got.Rows[c.want-3:]
			if *last[0].Counter != "298" || last[1].Counter != nil || *last[2].Counter != "300" ||
				*last[0].Spans[0] != "1" || last[0].Sequence != last[2].Sequence ||
				last[0].Sequence == last[1].Sequence {
				t.Fatalf("%+v: the last rows are %+v", c, last)
			}
		}
		plan, err := d.Conn.Query(within(t), "EXPLAIN "+sampleQuery(relay.Shard{}, "",
			part{"public", "outbox", 300}, m, nil, 290, 10))
		must.Succeed(t, err)
		var text strings.Builder
		for plan.Next() {
			var line string
			must.Succeed(t, plan.Scan(&line))
			text.WriteString(line + "\n")
		}
		if must.Succeed(t, plan.Err()); !strings.Contains(text.String(), "Tid Range Scan") {
			t.Errorf("more is read than the end of the table:\n%s", &text)
		}

		// What the server refuses ends the sample, and nothing else.
		d.Exec("BEGIN; LOCK TABLE outbox")
		got, err := s.SampleCounters(within(t), table, m, nil, SampleLimits{10, 10, time.Millisecond})
		if err != nil || got.Refused == "" || len(got.Rows) > 0 {
			t.Errorf("%+v, %v", got, err)
		}
		d.Exec("ROLLBACK")
		var setting string
		must.Succeed(t, s.conn.QueryRow(context.Background(),
			"SELECT current_setting('statement_timeout') || current_setting('transaction_read_only')").Scan(
			&setting))
		if setting != "0off" {
			t.Errorf("the sample's settings are in force after it: %s", setting)
		}
		if n := d.Text("SELECT count(*)::text FROM evil.called"); n != "0" {
			t.Errorf("%s calls of somebody else's functions", n)
		}
	})
}

// A partitioned table has no file of its own: those of its partitions are read, the newest first.
func TestASampleReadsTheNewestPartitions(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.Exec(`CREATE TABLE outbox (doc_id text, actor_id text, counter bigint) PARTITION BY RANGE (counter);
		CREATE TABLE first PARTITION OF outbox FOR VALUES FROM (0) TO (100);
		CREATE TABLE second PARTITION OF outbox FOR VALUES FROM (100) TO (200);
		CREATE TABLE future PARTITION OF outbox FOR VALUES FROM (200) TO (300);
		INSERT INTO outbox SELECT 'note', 'alice', n FROM generate_series(1, 150) n`)
	s := d.setup()
	defer s.Close()
	table, err := s.Table(within(t))
	must.Succeed(t, err)
	for rows, want := range map[int]struct {
		rows   int
		cut    bool
		lowest string
	}{60: {60, true, "91"}, 1000: {150, false, "1"}} {
		got, err := s.SampleCounters(within(t), table,
			relay.Mapping{Doc: "doc_id", Actor: "actor_id", Counter: "counter"}, nil,
			SampleLimits{rows, 100, time.Minute})
		if err != nil || got.Refused != "" || len(got.Rows) != want.rows || got.Cut != want.cut ||
			*got.Rows[51].Counter != want.lowest {
			t.Errorf("%d rows at most: %d, cut %v, %s, %v", rows, len(got.Rows), got.Cut, got.Refused, err)
		}
	}
}
