package operate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// filterSince is the first major that has row filters.
const filterSince = 15

// shards are the n installations of one table, none of which is initialised yet.
type shards struct {
	all  []*harness.Installation
	conn *pgx.Conn
	url  string
	js   jetstream.JetStream
}

func sharded(t testing.TB, pg *pgserver.Server, natsURL, name string, n int, settings ...string) *shards {
	t.Helper()
	if pg.Installation.Major < filterSince {
		t.Skipf("%v has no row filters", pg.Installation)
	}
	return shardsOn(t, pgtest.Database(t, pg), natsURL, name, n, settings...)
}

func shardsOn(t testing.TB, url, natsURL, name string, n int, settings ...string) *shards {
	t.Helper()
	s := &shards{url: url, conn: harness.Connect(t, url), js: harness.JetStream(t, natsURL)}
	name = harness.SlotName(name)
	for k := range n {
		o := harness.New(t, s.url, natsURL, fmt.Sprintf("%s_%d", name, k),
			append([]string{fmt.Sprintf("SHARD=%d/%d", k, n)}, settings...)...)
		o.UseStream(strings.ToUpper(o.Slot))
		s.all = append(s.all, &harness.Installation{Outflow: o, Conn: s.conn, JS: s.js, URL: s.url})
	}
	return s
}

func (s *shards) init() *shards {
	for _, f := range s.all {
		f.Init()
	}
	return s
}

func (s *shards) start() *shards {
	for _, f := range s.all {
		f.Start()
	}
	return s
}

// published is how many messages all streams have.
func (s *shards) published(t testing.TB) (n int, err error) {
	t.Helper()
	for _, f := range s.all {
		stream, err := s.js.Stream(t.Context(), f.Stream)
		if err != nil {
			return 0, err
		}
		n += int(stream.CachedInfo().State.Msgs)
	}
	return n, nil
}

func (s *shards) await(t testing.TB, n int) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("%d messages in all streams", n), func() error {
		got, err := s.published(t)
		if err == nil && got < n {
			err = fmt.Errorf("%d", got)
		}
		return err
	})
}

// complete waits until as many messages as rows are there, and makes sure that each row is in one stream,
// once, and each document in one alone. It returns the documents of each stream.
func (s *shards) complete(t *testing.T) []map[string]bool {
	t.Helper()
	rows, err := oracle.Table(t.Context(), s.conn, "outbox")
	harness.Must(t, err)
	s.await(t, len(rows))
	c, docs, at := oracle.NewChecker(rows), make([]map[string]bool, len(s.all)), map[string]int{}
	for k, f := range s.all {
		docs[k] = map[string]bool{}
		for _, m := range harness.Messages(t, s.js, f.Stream) {
			c.Add(m)
			doc := rows[m.Outflow.ID].Doc
			docs[k][doc] = true
			if before, there := at[doc]; there && before != k {
				t.Fatalf("document %q is in the streams of shards %d and %d", doc, before, k)
			}
			at[doc] = k
		}
	}
	if v := c.Verdict(0); !v.OK() {
		t.Errorf("the streams together and the table differ: %s", v.String())
	}
	return docs
}

// spread gives each actor's fifty operations in a row a document of their own, so that there are documents
// for every shard.
func spread(ops []recording.Op) []recording.Op {
	ops = slices.Clone(ops)
	for i := range ops {
		ops[i].Doc = fmt.Sprintf("%s %s/%d", ops[i].Doc, ops[i].Actor, ops[i].Counter/50)
	}
	return ops
}

// TestEachEventIsInTheStreamOfOneShardOnce: three shards of one table, under writers, one of them killed
// twice, the second time until all is written. Each event is in one stream, once; each document is in one
// stream alone; and each stream is byte by byte what a second implementation of the rules makes of these
// documents' part of the WAL. The last shard is in gap mode, the others have a horizon.
func TestEachEventIsInTheStreamOfOneShardOnce(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		const n = 3
		ops := spread(harness.RecordedOps(t, harness.EnvInt(t, "OUTFLOW_TEST_OPS", 2000)))
		ns := natstest.Server(t)
		s := sharded(t, pg, ns.URL(), "shard", n)
		s.all[n-1].Set("REORDER_MODE=gap")
		s.init()
		gap := oracle.DefaultSettings
		gap.Horizon, gap.Sort, gap.Gap = 0, oracle.ByGap, oracle.DefaultGap
		slot := s.all[0].Slot + "_judge"
		harness.Must(t, oracle.CreateSlot(t.Context(), s.conn, slot))
		truth := oracle.NewReader(oracle.Source{Slot: slot})
		s.start()
		l := harness.StartLoad(t, s.url, ops, 6, 1500, 5)
		victim := s.all[rand.IntN(n)]
		s.await(t, len(ops)/5)
		victim.Kill()
		victim.Start()
		s.await(t, len(ops)/3)
		victim.Kill()
		l.Wait(t)
		victim.Start()
		docs := s.complete(t)
		harness.Must(t, truth.Read(t.Context(), s.conn))
		for k, f := range s.all {
			part := truth.Truth().Only(func(e *oracle.Event) bool { return docs[k][e.Doc] })
			cfg := oracle.Config{Slot: f.Slot}
			if k == n-1 {
				cfg.Settings = gap
			}
			v, err := oracle.Judge(t.Context(), s.js, f.Stream, part, cfg)
			harness.Must(t, err)
			t.Logf("shard %d: %d documents, %s", k, len(docs[k]), v.String())
			if !v.OK() || v.Published != v.Events || v.Events == 0 {
				t.Errorf("shard %d: stream and WAL differ: %s", k, v.String())
			}
		}
	})
}

// TestReshardingKeepsTheOrderOfEachDocument: a table that was not divided is divided into two, and then into
// three, as docs/upgrades.md says. All streams together have each event once, and each document's events in
// their order, the old streams before the new ones.
func TestReshardingKeepsTheOrderOfEachDocument(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	var s *shards
	var old []*oracle.Message
	const rows = 120
	for i, n := range []int{1, 2, 3} {
		next := s
		if next == nil {
			next = sharded(t, pgtest.Server(t), ns.URL(), "reshard", 1)
			next.all[0].Set("SHARD=")
		} else {
			next = shardsOn(t, s.url, ns.URL(), "reshard", n)
		}
		next.init()
		if s != nil {
			for _, f := range s.all {
				f.DropSlot(t)
			}
		}
		s = next.start()
		harness.Exec(t, s.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc' || n "+
			"% 20, 'anna', $2::int * $1::int + n, '{}' FROM generate_series(1, $1::int) n", rows, i)
		s.await(t, rows)
		for _, f := range s.all {
			f.MustStop(t)
			f.Drain()
			old = append(old, harness.Messages(t, s.js, f.Stream)...)
		}
	}
	all, err := oracle.Table(t.Context(), s.conn, "outbox")
	harness.Must(t, err)
	c := oracle.NewChecker(all)
	for _, m := range old {
		c.Add(m)
	}
	if v := c.Verdict(0); !v.OK() || v.OutOfOrder != 0 || v.Written != 3*rows {
		t.Errorf("all streams and the table differ: %s", v.String())
	}
}

// TestInitSettlesWhichShardItIs: which part it is of is settled when slot, publication and stream are made.
func TestInitSettlesWhichShardItIs(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	s := sharded(t, pgtest.Server(t), ns.URL(), "settled", 2)
	a, b := s.all[0], s.all[1]
	if out, _, _ := a.Run("init", "--print"); !strings.Contains(out,
		`WHERE ((((hash_array(ARRAY["doc_id"]) & 2147483647) % 2) = 0))`) {
		t.Errorf("init --print: %s", out)
	}
	a.Init()
	was := a.Publication()
	b.Set("PUBLICATION=" + was)
	b.MustFail(3, []string{"init"}, "publication", "publishes shard 0/2", "the configuration says shard 1/2",
		"Each shard has a publication, a slot and a stream of its own")
	b.Set("PUBLICATION=" + b.Slot)
	b.Init()
	if out, _, code := a.Run("status"); code != 0 && code != 1 || !strings.Contains(out, "0/2") {
		t.Errorf("status: exit code %d, %s", code, out)
	}

	other := func(shard string, code int, says ...string) {
		t.Helper()
		a.Set("SHARD=" + shard)
		for _, args := range [][]string{{"init"}, {"run"}, {"init", "--snapshot"}, {"repair"}, {"drain"}} {
			a.MustFail(code, args, says...)
		}
	}
	other("1/2", 3, "publishes shard 0/2", "the configuration says shard 1/2")
	other("0/3", 3, "publishes shard 0/2", "the configuration says shard 0/3")
	other("", 3, "publishes shard 0/2", "Set shard to 0/2")
	// The publication is made to fit: what is in stream and slot is of the old part all the same.
	filtered := func(shard string, k, n int) {
		t.Helper()
		harness.Exec(t, s.conn, fmt.Sprintf("ALTER PUBLICATION %s SET TABLE outbox WHERE "+
			"((hash_array(ARRAY[doc_id]) & 2147483647) %% %d = %d)", was, n, k))
		a.Set("SHARD=" + shard)
	}
	filtered("1/2", 1, 2)
	for _, args := range [][]string{{"init"}, {"run"}, {"drain"}} {
		a.MustFail(3, args, "shard is 1/2, the checkpoint record", "has 0/2", "docs/upgrades.md")
	}
	// And back: meanwhile it left out rows.
	filtered("0/2", 0, 2)
	a.MustFailInGap("publication_changed", "run")

	for _, source := range []string{"message", "both"} {
		b.Set("SOURCE=" + source)
		b.MustFail(2, []string{"run"}, "shard", "set source to table")
	}
}

// TestAShardSnapshotsItsOwnRows: a shard's snapshot takes its own rows, also one that was killed in the
// middle and goes on.
func TestAShardSnapshotsItsOwnRows(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	s := sharded(t, pgtest.Server(t), ns.URL(), "shardsnap", 2)
	harness.Exec(t, s.conn, harness.GeneratedKey)
	const rows = 600
	harness.Exec(t, s.conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'd' || n % 97, 'anna', n, jsonb_build_object('n', n)
		FROM generate_series(1, $1) n ORDER BY random()`, rows)
	a, b := s.all[0], s.all[1]
	a.KillSnapshotAt(t, "snapshot.row:100")
	if r := a.MustSnapshot(); r.Already == 0 {
		t.Errorf("%+v: nothing was there of the snapshot that was killed", r)
	}
	b.MustSnapshot()
	s.start()
	for i := range 20 {
		harness.Insert(t, s.conn, fmt.Sprint("later ", i), i, "{}")
	}
	for k, docs := range s.complete(t) {
		if len(docs) < 20 {
			t.Errorf("shard %d has %d documents", k, len(docs))
		}
	}
}

// TestAShardReplaysItsOwnRows: what is replayed from the table are the shard's own rows.
func TestAShardReplaysItsOwnRows(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	s := sharded(t, pgtest.Server(t), ns.URL(), "shardreplay", 2).init().start()
	const rows = 60
	harness.Exec(t, s.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'd' || n % 20, "+
		"'anna', n, '{}' FROM generate_series(1, $1) n", rows)
	docs, seen := s.complete(t), map[string]bool{}
	for k, f := range s.all {
		for _, r := range f.Replay("--from", "table") {
			if seen[r.ID] || !docs[k][r.Document] {
				t.Errorf("shard %d: row %s of document %s is another shard's", k, r.ID, r.Document)
			}
			seen[r.ID] = true
		}
	}
	if len(seen) != rows {
		t.Errorf("%d rows were replayed, want %d", len(seen), rows)
	}
}

// TestAShardRepairsItsOwnRows: what a repair takes for missing, and publishes, are the shard's own rows.
func TestAShardRepairsItsOwnRows(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	for _, g := range []struct {
		code, mode string
		fills      int // whose rows the slot does not bring
		damage     func(t *testing.T, f *harness.Installation)
	}{
		{"slot_missing", "new-slot", 1, func(t *testing.T, f *harness.Installation) { f.DropSlot(t) }},
		{"stream_missing", "keep", 1, func(t *testing.T, f *harness.Installation) {
			harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
		}},
		{"record_missing", "new-slot", 1, func(t *testing.T, f *harness.Installation) {
			f.DeleteRecord(t)
			f.DropSlot(t)
		}},
		{"publication_changed", "new-slot", 2, func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Publication())
			fill(t, f.Conn, "unpublished")
			harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Publication()+` FOR TABLE outbox WHERE ((hash_array(ARRAY[doc_id]) & 2147483647) % 2 = 0)
				WITH (publish = 'insert', publish_via_partition_root = true)`)
		}},
	} {
		t.Run(g.code, func(t *testing.T) {
			t.Parallel()
			s := sharded(t, pgtest.Server(t), ns.URL(), "shardgap", 2).init().start()
			fill(t, s.conn, "before")
			docs := s.complete(t)
			f, other := s.all[0], s.all[1]
			f.T, other.T = t, t
			awaitAllConfirmed(f, t)
			f.MustStop(t)
			g.damage(t, f)
			fill(t, s.conn, "meanwhile")
			f.Start()
			f.MustEndInGap(g.code)
			r, stderr, code := f.Repair()
			want := g.fills * 2 * len(docs[0]) // each document has two rows of a fill
			if code != 4 || r.Mode != g.mode || r.Missing != want {
				t.Errorf("look: exit code %d, %+v, want %d rows missing\n%s", code, r, want, stderr)
			}
			if r, stderr, code = f.Repair("--accept", g.code); code != 0 || !r.Repaired {
				t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
			}
			f.Start()
			fill(t, s.conn, "after")
			for k, now := range s.complete(t) {
				for doc := range docs[k] {
					if !now[doc] {
						t.Errorf("document %s has left shard %d", doc, k)
					}
				}
			}
		})
	}
}

// fill writes 40 rows of twenty documents, with keys of their own.
func fill(t *testing.T, conn *pgx.Conn, actor string) {
	t.Helper()
	harness.Exec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc' || n % 20, "+
		"$1, n, '{}' FROM generate_series(1, 40) n", actor)
}

// awaitAllConfirmed waits until the slot brings nothing of what was written before.
func awaitAllConfirmed(f *harness.Installation, t *testing.T) {
	t.Helper()
	f.AwaitConfirmed(f.Conn, harness.LSN(t, f.Conn, "SELECT pg_current_wal_lsn()::text"))
}
