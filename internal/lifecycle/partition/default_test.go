package partition

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// newRest makes one whose ranges have run out, so that rows of now go to the default partition. attached is
// how often it was tried to attach one.
func newRest(t *testing.T, srv *pgserver.Server) (w *world, attached *int) {
	t.Helper()
	w, attached = newWorld(t, srv, 1), new(int)
	w.Exec("CREATE TABLE rest PARTITION OF outbox DEFAULT")
	w.o.Hit = func(point string) {
		if point == "partition.made" {
			*attached++
		}
	}
	return w, attached
}

// in is the partition that a row goes to that is written a time from now.
func (w *world) in(after time.Duration) string {
	w.T.Helper()
	return w.Text("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ('d', 'a', 1, "+
		"'{}', $1::timestamptz) RETURNING tableoid::regclass::text", time.Now().Add(after))
}

// TestRowsInTheDefaultPartitionKeepNoOtherRangeAway: no partition can take the range of now any more, and it
// is not tried, because that would lock writers out. The next ranges have partitions from then on, and
// nothing is missing. The run that could not make it says so, and so does the survey until the next range.
func TestRowsInTheDefaultPartitionKeepNoOtherRangeAway(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		w, attached := newRest(t, srv)
		w.cfg.Every = 2400 * time.Hour // it does not end in the middle of the test
		today := day.AddDate(0, 0, 1)  // where the last range ends
		today = today.Add(time.Since(today).Truncate(w.cfg.Every))
		if got := w.in(0); got != "rest" {
			t.Fatalf("rows of now go to %s", got)
		}
		if s := w.plan()[0]; s.Action != Leave || !strings.Contains(s.Why, "from "+stamp(today)) {
			t.Errorf("it plans %v", s)
		}
		steps, err := w.try()
		f := wantFault(t, err, outbox.Fatal, codeRest)
		if !strings.Contains(f.Message, "rest") || !strings.Contains(f.Message, "from "+stamp(today)) {
			t.Error(f)
		}
		made := 0
		for _, s := range steps {
			if s.Action == Create {
				made++
			}
		}
		if made < 2 || *attached != made {
			t.Errorf("%d are made, %d were tried", made, *attached)
		}
		for n := range 2 {
			want := catalog.PartitionName("outbox", today.Add(time.Duration(n+1)*w.cfg.Every), w.cfg.Every)
			if got := w.in(time.Duration(n+1) * w.cfg.Every); got != want {
				t.Errorf("range %d goes to %s, not %s", n+1, got, want)
			}
		}
		if s := w.look(); !s.Default || !s.Hole.Equal(today.Add(w.cfg.Every)) || s.Ahead != made {
			t.Errorf("%+v", s)
		}
		for _, s := range w.apply() {
			if s.Action.does() && s.Action != Detach && s.Action != Seal {
				t.Errorf("the next run: %v", s)
			}
		}
	})
}

// TestALargeDefaultPartitionIsNotLookedThroughWhileItsWritersWait: nothing is attached then, whether there is
// an index by which a query would find out sooner, or not. Where rows of now have a range, nobody waits.
func TestALargeDefaultPartitionIsNotLookedThroughWhileItsWritersWait(t *testing.T) {
	t.Parallel()
	w, attached := newRest(t, pgtest.Server(t))
	w.Exec("CREATE INDEX ON outbox (created_at)")
	w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) SELECT 'd', 'a', n, '{}', " +
		"'2020-01-01' FROM generate_series(1, 100000) n")
	w.cfg.looked = time.Millisecond
	_, err := w.try()
	wantFault(t, err, outbox.Fatal, codeRestLarge)
	if *attached != 0 || !strings.Contains(err.Error(), "rows of now may go") {
		t.Errorf("tried %d times, %v", *attached, err)
	}
	now := time.Now()
	w.Exec("CREATE TABLE now PARTITION OF outbox FOR VALUES FROM (" +
		catalog.PartitionBound(now.AddDate(0, 0, -1)) + ") TO (" +
		catalog.PartitionBound(now.AddDate(0, 0, 1)) + ")")
	w.apply()
	if got := w.in(36 * time.Hour); got == "rest" || *attached == 0 {
		t.Errorf("rows of the next range go to %s", got)
	}
}

// TestPoliciesThatBindTheOwnerKeepNoPartitionAway: it may not read the default partition through the outbox.
// By its own name it may, so here, too, nothing is attached while writers would wait for long, until a CHECK
// says what is not there. Where it may not do that either, ATTACH looks through it all the same.
func TestPoliciesThatBindTheOwnerKeepNoPartitionAway(t *testing.T) {
	t.Parallel()
	w, attached := newRest(t, pgtest.Server(t))
	role := "owner_" + w.Text("SELECT current_database()::text")
	w.Exec("CREATE ROLE " + postgres.Quote(role) + " LOGIN")
	t.Cleanup(func() {
		w.Exec("DROP OWNED BY " + postgres.Quote(role) + " CASCADE; DROP ROLE " + postgres.Quote(role))
	})
	for _, table := range []string{"outbox", "rest", old(0)} {
		w.Exec("ALTER TABLE " + table + " OWNER TO " + postgres.Quote(role))
	}
	w.Exec("GRANT CREATE ON SCHEMA public TO " + postgres.Quote(role))
	w.Exec("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
	w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) SELECT 'd', 'a', n, '{}', " +
		"'2020-01-01' FROM generate_series(1, 100000) n")
	w.URL, w.cfg.Slack, w.cfg.looked = outboxdb.WithUser(t, w.URL, role), 1000000*time.Hour, time.Millisecond
	_, err := w.try()
	if wantFault(t, err, outbox.Fatal, codeRestLarge); *attached != 0 {
		t.Errorf("tried %d times", *attached)
	}
	w.Exec("ALTER TABLE rest ADD CHECK (created_at < '2021-01-01')")
	m := w.manager()
	s, err := m.look(t.Context())
	must.Succeed(t, err)
	await.Until(t, "it is found without reading", func() error {
		return m.vacant(t.Context(), s, &Partition{Lower: time.Now(), Upper: time.Now().AddDate(0, 0, 1)})
	})
	m.Close()
	w.cfg.looked = 10 * time.Minute
	w.apply()
	if got := w.in(24 * time.Hour); got == "rest" || *attached == 0 {
		t.Errorf("rows of tomorrow go to %s", got)
	}
	*attached = 0
	w.Exec("ALTER TABLE rest ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
	w.cfg.Ahead += 2
	if w.apply(); *attached == 0 {
		t.Error("nothing is attached")
	}
}
