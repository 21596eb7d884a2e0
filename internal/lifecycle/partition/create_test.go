package partition

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

// TestPartitionsAreMadeAhead: as many as are asked for lie ahead, rows of now and later find them, and a
// second run makes none. What is planned is what is made.
func TestPartitionsAreMadeAhead(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		w := newWorld(t, srv, 2)
		w.cfg.Slack, w.cfg.Ahead = 1000000*time.Hour, 4
		w.Exec("GRANT SELECT ON outbox TO pg_monitor")
		var planned []string
		for _, s := range w.plan() {
			if s.Action == Create {
				planned = append(planned, s.Partition)
			}
		}
		if len(planned) < 4 || len(planned) > 5 {
			t.Fatalf("it plans %v", planned)
		}
		if w.Text("SELECT count(*)::text FROM pg_inherits WHERE inhparent = 'outbox'::regclass") != "2" {
			t.Fatal("a plan made something")
		}
		var made []string
		for _, s := range w.apply() {
			if s.Action == Create {
				made = append(made, s.Partition)
			}
		}
		if strings.Join(made, " ") != strings.Join(planned, " ") {
			t.Errorf("it made %v, of %v", made, planned)
		}
		for _, at := range []string{"now()", "now() + interval '3 days 23 hours'"} {
			w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ('d', 'a', " +
				"1, '{}', " + at + ")")
		}
		if got := w.Text("SELECT has_table_privilege('pg_monitor', $1, "+
			"'SELECT')::text", made[0]); got != "true" {
			t.Error("who reads the outbox may not read the partition")
		}
		if got := w.Text("SELECT state FROM outflow_partitions WHERE name = $1", made[len(made)-1]); got !=
			string(Ahead) {
			t.Errorf("the last one is %s", got)
		}
		for _, s := range w.apply() {
			if s.Action.does() {
				t.Errorf("the second run: %v", s)
			}
		}
	})
}

// TestAPolicyIsNotGoneRoundByAPartition: a reader who is bound by the outbox's policies gets no right on a
// new partition, attached or detached. Who may read all of the outbox does.
func TestAPolicyIsNotGoneRoundByAPartition(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	bound := w.Text("SELECT quote_ident('bound_' || current_database())")
	free := w.Text("SELECT quote_ident('free_' || current_database())")
	w.Exec("CREATE ROLE " + bound + "; CREATE ROLE " + free + " BYPASSRLS")
	for _, role := range []string{bound, free} {
		t.Cleanup(func() { w.Exec("DROP OWNED BY " + role + "; DROP ROLE " + role) })
	}
	w.Exec("GRANT SELECT ON outbox TO PUBLIC, " + bound + ", " + free)
	w.Exec("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
	w.Exec("CREATE POLICY own ON outbox FOR SELECT USING (doc_id = current_user)")
	w.cfg.Slack = 1000000 * time.Hour
	w.apply()
	made := w.Text("SELECT name FROM outflow_partitions WHERE made ORDER BY lower LIMIT 1")
	may := func(role string) string {
		t.Helper()
		return w.Text("SELECT has_table_privilege($1::name, $2, 'SELECT')::text", strings.Trim(role, `"`), made)
	}
	if may(bound) != "false" || may(free) != "true" {
		t.Errorf("bound by policies: %s, not bound: %s", may(bound), may(free))
	}
	w.Exec("ALTER TABLE outbox DETACH PARTITION " + made)
	if may(bound) != "false" {
		t.Error("bound by policies, and may read it when it is detached")
	}
}

func TestWhatHasTheNameOfAPartitionIsNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	name := catalog.PartitionName("outbox", time.Now().UTC().Truncate(24*time.Hour), 24*time.Hour)
	w.Exec("CREATE TABLE " + name + " (x int)")
	_, err := w.try()
	if f := wantFault(t, err, outbox.Fatal, codeTaken); !strings.Contains(f.Message, name) {
		t.Error(f)
	}
}

func TestATableWithoutRangesOfTimeIsRefused(t *testing.T) {
	t.Parallel()
	for key, table := range map[string]string{
		"not partitioned":       "CREATE TABLE outbox (id uuid)",
		"by ranges of time":     "CREATE TABLE outbox (id uuid) PARTITION BY RANGE (id)",
		"not partitioned by ra": "CREATE TABLE outbox (id uuid, at timestamptz) PARTITION BY RANGE (id, at)",
		"partitioned by ranges": "CREATE TABLE outbox (id uuid, at timestamptz) PARTITION BY LIST (at)",
	} {
		w := &world{DB: outboxdb.New(t, pgtest.Server(t))}
		w.Exec(table)
		other := newWorld(t, pgtest.Server(t), 0)
		w.cfg, w.o = other.cfg, other.o
		_, err := w.try()
		if f := wantFault(t, err, outbox.Fatal, codeKey); !strings.Contains(f.Message, key) {
			t.Errorf("%s: %v", table, f)
		}
	}
}

func TestNamesOfPartitionsFit(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("ü", 31) // 62 bytes
	for _, c := range []struct {
		root  string
		lower time.Time
		every time.Duration
		want  string
	}{
		{"outbox", day, 24 * time.Hour, "outbox_p20240501"},
		{"outbox", day.Add(time.Hour), time.Hour, "outbox_p20240501_010000"},
		{"outbox", day.Add(time.Hour), 24 * time.Hour, "outbox_p20240501_010000"},
		{long, day, 24 * time.Hour, strings.Repeat("ü", 26) + "_p20240501"},
		{long, day, time.Minute, strings.Repeat("ü", 23) + "_p20240501_000000"},
	} {
		if got := catalog.PartitionName(c.root, c.lower, c.every); got != c.want || len(got) > 63 {
			t.Errorf("%s: got %s (%d bytes), want %s", c.root, got, len(got), c.want)
		}
	}
}

// TestASurveySaysWhatLiesAheadAndWhoIsInTheWay.
func TestASurveySaysWhatLiesAheadAndWhoIsInTheWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	if s := w.look(); !s.Ranges || s.Ahead != 0 || s.Managed || !s.Until.Equal(day.AddDate(0, 0, 2)) {
		t.Errorf("before the first run: %+v", s)
	}
	other := w.Slot + "_b"
	w.slot(other)
	w.insert(0, 3, true)
	w.apply()
	w.confirm(w.Slot)
	s := w.look()
	if !s.Managed || s.Ahead < 2 || len(s.Blocked) != 2 || s.Blocked[0].Slot != other ||
		s.Blocked[0].Fence == 0 {
		t.Errorf("then: %+v", s)
	}
	w.cfg.OtherSlots = []string{other}
	if s := w.look(); len(s.Blocked) != 0 {
		t.Errorf("without the slot: %+v", s)
	}
	w.Exec("CREATE TABLE rest PARTITION OF outbox FOR VALUES FROM ('2300-01-01') TO (MAXVALUE)")
	if s := w.look(); s.Ranges {
		t.Errorf("with one that never ends: %+v", s)
	}
}

// TestPartitionsAreMadeWhileIDsAreRead: that may take hours, and the services need the next one.
func TestPartitionsAreMadeWhileIDsAreRead(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.confirm(w.Slot)
	w.cfg.again, w.cfg.inMemory = 1, 1 // in memory it takes a beat
	ahead := func() string {
		return w.Text("SELECT count(*)::text FROM outflow_partitions WHERE lower > now()")
	}
	before, read := ahead(), w.o.Published
	w.o.Published = func(ctx context.Context, in Period, add func([16]byte) error) (Seen, error) {
		w.Exec("DROP TABLE " + w.Text("SELECT name FROM outflow_partitions WHERE lower > now() "+
			"ORDER BY lower DESC LIMIT 1"))
		for range 5000 { // as many as go to the server at a time
			must.Succeed(t, add([16]byte{}))
		}
		w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) SELECT 'd', 'a', 1, " +
			"'{}', max(lower) FROM outflow_partitions")
		return read(ctx, in, add)
	}
	if w.apply(); ahead() != before || w.exists(0) {
		t.Errorf("%s lie ahead, and before %s did; the old one is %s", ahead(), before, w.state(0))
	}
}
