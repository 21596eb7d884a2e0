package partition

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

// look makes a survey.
func (w *world) look() Survey {
	w.T.Helper()
	m := w.manager()
	defer m.Close()
	s, err := Look(outboxdb.Within(w.T), w.Conn, m.root.Table, w.cfg.OtherSlots)
	must.Succeed(w.T, err)
	return s
}

// TestARangeThatIsMissingIsMade: a partition that lies far ahead does not hide that none takes the rows of
// now, and what is made meets it without a gap. Until then the survey says so.
func TestARangeThatIsMissingIsMade(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.cfg.Slack, w.cfg.Ahead = 1000000*time.Hour, 4
	now := time.Now().UTC()
	for _, days := range []int{2, 3, 30, 31} { // none takes tomorrow's rows
		lower := now.Truncate(24*time.Hour).Add(time.Hour).AddDate(0, 0, days)
		w.Exec("CREATE TABLE far" + lower.Format("0102") + " PARTITION OF outbox FOR VALUES FROM (" +
			catalog.PartitionBound(lower) + ") TO (" + catalog.PartitionBound(lower.AddDate(0, 0, 1)) + ")")
	}
	if s := w.look(); s.Ahead != 0 || s.Until.After(now.Add(24*time.Hour)) {
		t.Errorf("no partition takes the rows of now, and %d lie ahead, until %v", s.Ahead, s.Until)
	}
	w.apply()
	for hours := range 4 * 24 {
		w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ('d', 'a', 1, "+
			"'{}', now() + $1 * interval '1 hour')", hours)
	}
	if s := w.look(); s.Ahead < 4 || s.Ahead > 6 || s.Until.After(now.AddDate(0, 0, 6)) {
		t.Errorf("afterwards %d lie ahead, until %v", s.Ahead, s.Until)
	}
	for _, s := range w.apply() {
		if s.Action.does() {
			t.Errorf("the second run: %v", s)
		}
	}
}

// TestARangeWithoutATimeZoneEndsWhereClocksAreLast: a service whose sessions have another time zone than UTC
// still writes to the range of a timestamp or date that is over by UTC.
func TestARangeWithoutATimeZoneEndsWhereClocksAreLast(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kind string
		over time.Duration
		goes bool
	}{
		{"timestamp", 3 * time.Hour, false},
		{"timestamp", 13 * time.Hour, true},
		{"timestamptz", 3 * time.Hour, true},
	} {
		w := newWorld(t, pgtest.Server(t), 0)
		w.Exec("DROP TABLE outbox")
		w.Exec("CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), doc_id text, actor_id text, " +
			"counter bigint, payload jsonb, at " + c.kind + " NOT NULL DEFAULT now()) " +
			"PARTITION BY RANGE (at)")
		upper := time.Now().UTC().Add(-c.over)
		w.Exec("CREATE TABLE " + old(0) + " PARTITION OF outbox FOR VALUES FROM (" +
			catalog.PartitionBound(upper.Add(-48*time.Hour)) + ") TO (" + catalog.PartitionBound(upper) + ")")
		w.cfg.Every = time.Hour
		if got := strings.HasPrefix(of(w.apply(), 0), "detach"); got != c.goes {
			t.Errorf("the range of a %s is over since %v by UTC: detached: %v", c.kind, c.over, got)
		}
		for _, zone := range []string{"Etc/GMT+12", "Etc/GMT-14"} { // west of UTC, and east
			w.Exec("SET TimeZone = '" + zone + "'")
			w.Exec("INSERT INTO outbox (doc_id) VALUES ('d')")
		}
	}
}

// TestWhatLiesAheadIsCountedAsItIsMade: where the column has no time zone, what lies ahead by UTC may not for
// who writes with another one. But pg_partman makes four that lie ahead by its own clock: that is no alarm.
func TestWhatLiesAheadIsCountedAsItIsMade(t *testing.T) {
	t.Parallel()
	for kind, ahead := range map[string]int{"timestamp": 0, "timestamptz": 4} {
		w := newWorld(t, pgtest.Server(t), 0)
		w.cfg.Every, w.cfg.Ahead = 3*time.Hour, 4
		w.Exec("DROP TABLE outbox")
		w.Exec("CREATE TABLE outbox (id uuid, doc_id text, at " + kind + " NOT NULL DEFAULT now()) " +
			"PARTITION BY RANGE (at)")
		at := time.Now().UTC().Add(-30 * time.Minute)
		for i := range 5 {
			w.Exec(fmt.Sprintf("CREATE TABLE %s PARTITION OF outbox FOR VALUES FROM (%s) TO (%s)", old(i),
				catalog.PartitionBound(at), catalog.PartitionBound(at.Add(w.cfg.Every))))
			at = at.Add(w.cfg.Every)
		}
		theirs := func(ahead int) {
			t.Helper()
			if s := w.look(); s.Ahead != ahead || !s.Until.Equal(at.Truncate(time.Microsecond)) {
				t.Errorf("of %s %d lie ahead until %v, not %d until %v", kind, s.Ahead, s.Until, ahead, at)
			}
		}
		theirs(4)
		w.apply()
		if s := w.look(); s.Ahead < 4 || s.Ahead > 5 {
			t.Errorf("of %s then %d lie ahead until %v", kind, s.Ahead, s.Until)
		}
		w.Exec("DO $$ DECLARE p text; BEGIN FOR p IN SELECT name FROM outflow_partitions WHERE made LOOP " +
			"EXECUTE 'DROP TABLE ' || p; END LOOP; END $$")
		theirs(ahead)
	}
}

// TestPartitionsAreMadeAlthoughNothingMayGo: while NATS is away, or outflow run could not start because of a
// gap, the services go on writing.
func TestPartitionsAreMadeAlthoughNothingMayGo(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 2)
	w.confirm(w.Slot)
	w.Exec("DROP TABLE " + w.Text("SELECT string_agg(name, ', ') FROM outflow_partitions WHERE made"))
	w.o.Outside = func(context.Context) (Outside, error) {
		return Outside{}, &outbox.Fault{Class: outbox.Gap, Code: "slot_lost", Message: "a gap"}
	}
	steps, err := w.try()
	wantFault(t, err, outbox.Gap, "slot_lost")
	for _, s := range steps {
		if s.Action != Create {
			t.Errorf("nothing may go: %v", s)
		}
	}
	w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', 1, '{}')")
	w.want(0, Sealed)
}

// TestAPartitionWithoutAnEndCountsAndStays: what it has counts for how large the table is, and it does not
// stand for those that can go.
func TestAPartitionWithoutAnEndCountsAndStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.insert(0, 100, true)
	w.insert(1, 100, true)
	w.Exec("CREATE TABLE endless PARTITION OF outbox FOR VALUES FROM (" +
		catalog.PartitionBound(day.AddDate(0, 0, 2)) + ") TO (MAXVALUE)")
	w.insert(2, 500, true)
	w.Exec("ANALYZE outbox")
	w.cfg.Rows = 600
	steps := w.apply()
	if got := of(steps, 0); !strings.HasPrefix(got, "detach seal") {
		t.Errorf("700 rows, of which 600 are to stay: %s, because %s", got, why(steps, 0))
	}
	wantWhy(t, steps, 1, "within retain.table")
}

// TestARangeThatIsTakenKeepsNoOtherOneAway: somebody has detached a partition, and kept it.
func TestARangeThatIsTakenKeepsNoOtherOneAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.cfg.Ahead = 4
	var made []string
	for _, s := range w.apply() {
		if s.Action == Create {
			made = append(made, s.Partition)
		}
	}
	w.Exec("ALTER TABLE outbox DETACH PARTITION " + made[1])
	w.Exec("DROP TABLE " + made[3])
	_, err := w.try()
	wantFault(t, err, outbox.Fatal, codeTaken)
	w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ('d', 'a', 1, '{}', " +
		"now() + interval '3 days')")
}

// TestWhatSomebodyDetachedIsKnownUnderAnotherName although nothing may go: its range gets a new partition by
// the name that it had.
func TestWhatSomebodyDetachedIsKnownUnderAnotherName(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 0)
	taken := w.apply()[0].Partition
	w.Exec("ALTER TABLE outbox DETACH PARTITION " + taken)
	_, err := w.try()
	wantFault(t, err, outbox.Fatal, codeTaken)
	w.Exec("ALTER TABLE " + taken + " RENAME TO saved")
	w.o.Outside = func(context.Context) (Outside, error) {
		return Outside{}, &outbox.Fault{Class: outbox.Gap, Code: "slot_lost", Message: "a gap"}
	}
	_, err = w.try()
	wantFault(t, err, outbox.Gap, "slot_lost")
	m := w.manager()
	defer m.Close()
	names, err := m.Theirs(outboxdb.Within(t))
	if err != nil || !slices.Equal(names, []string{"public.saved"}) || w.Text("SELECT count(*)::text FROM "+
		taken) != "0" {
		t.Errorf("what somebody else detached: %v, %v", names, err)
	}
}

// TestTheLengthOfARangeIsThatOfThoseOfNow, and not of one that lies far ahead, to take what no other does.
func TestTheLengthOfARangeIsThatOfThoseOfNow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 0)
	w.cfg.Every, w.cfg.Ahead = 0, 4
	now := time.Now().UTC()
	for name, years := range map[string][2]int{"today": {0, 0}, "rest": {10, 50}} {
		lower, upper := now.AddDate(years[0], 0, -1), now.AddDate(years[1], 0, 1)
		w.Exec("CREATE TABLE " + name + " PARTITION OF outbox FOR VALUES FROM (" +
			catalog.PartitionBound(lower) + ") TO (" + catalog.PartitionBound(upper) + ")")
	}
	made := 0
	for _, s := range w.apply() {
		if s.Action == Create {
			made++
		}
	}
	if _, err := w.Conn.Exec(outboxdb.Within(t), "INSERT INTO outbox (doc_id, actor_id, counter, payload, "+
		"created_at) VALUES ('d', 'a', 1, '{}', now() + interval '1 month')"); err == nil || made != 4 {
		t.Errorf("%d partitions are made as long as that of now: %v", made, err)
	}
}

// TestARangeUpToInfinityHasNoEnd: no partition is missing behind it.
func TestARangeUpToInfinityHasNoEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.cfg.Ahead = 4
	w.Exec("CREATE TABLE rest PARTITION OF outbox FOR VALUES FROM (" +
		catalog.PartitionBound(time.Now().AddDate(0, 0, 2)) + ") TO ('infinity')")
	w.Exec("CREATE TABLE past PARTITION OF outbox FOR VALUES FROM ('-infinity') TO ('2024-01-01')")
	w.apply()
	for _, at := range []string{"", " + interval '2 days'", " + interval '9 days'"} {
		w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ('d', 'a', 1, " +
			"'{}', now()" + at + ")")
	}
}

// TestATimeWithoutAZoneIsNotThatOfTheMessage: whose clock is nine hours ahead of UTC, its messages were
// stored so much earlier. They are found in the first period that is read, and are not missed where retention
// has removed them.
func TestATimeWithoutAZoneIsNotThatOfTheMessage(t *testing.T) {
	t.Parallel()
	for _, removed := range []bool{false, true} {
		w := newWorld(t, pgtest.Server(t), 0)
		w.Exec("DROP TABLE outbox")
		w.Exec("CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), doc_id text, actor_id text, " +
			"counter bigint, payload jsonb, created_at timestamp NOT NULL) PARTITION BY RANGE (created_at)")
		w.Exec("CREATE TABLE " + old(0) + " PARTITION OF outbox FOR VALUES FROM ('2024-05-01') TO " +
			"('2024-05-02')")
		w.Exec("SET TimeZone = 'UTC'")
		w.insert(0, 3, !removed) // at one o'clock
		w.stored = day.Add(-8 * time.Hour)
		w.apply()
		w.Exec("UPDATE outflow_partitions SET made = true WHERE name = $1", quoted("public", old(0)))
		w.seen.Oldest, w.seen.Removed = day.Add(-7*time.Hour), removed
		w.confirm(w.Slot)
		if w.apply(); w.exists(0) || !removed && len(w.reads) != 1 {
			t.Errorf("removed: %v: it is there: %v; read were %v", removed, w.exists(0), w.reads)
		}
	}
}
