package maintenance

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// waits looks that what it is waited for stays through some more rounds of outflow maintain.
func (r *retained) waits(m *maintainer, days string, rounds func() int) {
	r.t.Helper()
	before := rounds()
	harness.Eventually(r.t, "further rounds", func() error {
		if rounds() < before+2 {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
	if got := r.left(); got != days {
		r.t.Fatalf("left: %q, want %q\n%s", got, days, m.log.String())
	}
}

// rounds counts how often outflow maintain has done all of its parts.
func (r *retained) rounds(at *harness.Outflow) func() int {
	n, last := 0, 0.
	return func() int {
		if now, ok := at.Series("outflow_maintain_reported_timestamp_seconds"); ok && now != last {
			n, last = n+1, now
		}
		return n
	}
}

// TestMaintainOutlastsASlotAndNATS: nobody reads the slot, then NATS is away. Nothing goes meanwhile, what is
// wrong is said, and when they are back it goes on by itself.
func TestMaintainOutlastsASlotAndNATS(t *testing.T) {
	t.Parallel()
	ns := natstest.Process(t)
	r := newRetainedAt(t, pgtest.Server(t), ns.URL(), "outlasts", "ARCHIVE_URL=file://"+t.TempDir(),
		"ARCHIVE_SEGMENT_AGE=0s", "MAINTAIN_EVERY=1s")
	r.Init()
	r.write(1, 10)
	m, at := r.pages()
	rounds := r.rounds(at)
	r.waits(m, "day_1 day_2 day_3", rounds) // outflow run was not started yet
	r.showsAfter(func() {}, at, "/metrics", 200,
		`outflow_rows_blocked_since_timestamp_seconds{by="`+r.Slot+`",.*} \d`)
	r.Start()
	r.goes(m)

	r.day(10)
	harness.Must(t, ns.Kill())
	harness.Eventually(t, "it says so", func() error {
		if code, page := at.Get("/readyz"); code != 503 || !strings.Contains(page, "archive fails since") {
			return fmt.Errorf("%d %s", code, page)
		}
		return nil
	}, m.child)
	if code, page := at.Get("/healthz"); code != 200 {
		t.Errorf("a restart would not bring NATS back: %d %s", code, page)
	}
	r.waits(m, "day_1", rounds)
	harness.Must(t, ns.Start())
	r.goes(m)
	harness.Eventually(t, "it is ready", func() error {
		r.beat()
		if code, page := at.Get("/readyz"); code != 200 {
			return fmt.Errorf("%d %s", code, page)
		}
		return nil
	}, m.child)
	r.MustStop(t)
}

// TestOneOfTwoMaintainsSleepsBetweenArchiveAndDrop: the second one takes over when the first one's session is
// ended, and drops the partition. When the first one wakes up it does nothing that it had in mind, and stands
// by.
func TestOneOfTwoMaintainsSleepsBetweenArchiveAndDrop(t *testing.T) {
	t.Parallel()
	r := newMaintained(t, "sleeper")
	r.oneIsOld()
	sleeper := r.stopsAt("partition.archived")
	second := r.maintain()
	second.says("standing by")
	if got := harness.Value[int](t, r.Conn, "SELECT count(*) FROM "+r.detached()); got != 10 {
		t.Fatalf("%d rows", got)
	}
	// as PostgreSQL does by itself where the host is gone
	harness.Exec(t, r.Conn, `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'
		AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		AND pid <> pg_backend_pid()`)
	second.says("this one goes on")
	r.goes(second)
	// a table of that name that is somebody else's by now
	harness.Exec(t, r.Conn, "CREATE TABLE day_1 (LIKE outbox INCLUDING GENERATED INCLUDING DEFAULTS)")
	harness.Exec(t, r.Conn, "INSERT INTO day_1 (doc_id, actor_id, counter, payload) VALUES ('late', 'a', 1, "+
		"'{}')")
	harness.Must(t, sleeper.child.Signal(syscall.SIGCONT))
	sleeper.says("standing by")
	if got := harness.Value[int](t, r.Conn, "SELECT count(*) FROM day_1"); got != 1 {
		t.Errorf("%d rows of the other table", got)
	}
	harness.AwaitMessages(t, r.JS, r.Stream, ends(r.Installation))
	r.MustStop(t)
}

// TestAMaintainThatIsStoppedInADropIsOutlived: the partition is locked, and to be dropped by a transaction
// that does not end. PostgreSQL ends it, nothing is dropped by that, and another one that had stood by
// verifies and drops the partition. The one that was stopped stands by when it wakes up.
func TestAMaintainThatIsStoppedInADropIsOutlived(t *testing.T) {
	t.Parallel()
	tier.OnlyLong(t, "it waits for a minute")
	r := newMaintained(t, "frozen")
	frozen := r.stopsAt("partition.dropping")
	if n := harness.Value[int](t, r.Conn, "SELECT count(*) FROM outflow_partitions WHERE state = "+
		"'dropped'"); n != 0 {
		t.Fatalf("%d are dropped", n)
	}
	second := r.maintain()
	second.says("standing by")
	r.goes(second)
	harness.Must(t, frozen.child.Signal(syscall.SIGCONT))
	frozen.says("standing by")
	r.day(10)
	r.goes(second)
	harness.AwaitMessages(t, r.JS, r.Stream, ends(r.Installation))
	r.MustRun("archive", "verify")
	r.MustStop(t)
}

// detached is the one partition that is detached.
func (r *retained) detached() string {
	r.t.Helper()
	return harness.Value[string](r.t, r.Conn, "SELECT name FROM outflow_partitions WHERE state IN "+
		"('sealed', 'durable', 'archived', 'verified')")
}

// TestTheStreamIsDeletedAfterPartitionsWereDropped: the archive has what neither has any more. outflow
// maintain lets nothing further go, the archive and a repair bring back every message, byte for byte, and it
// goes on.
func TestTheStreamIsDeletedAfterPartitionsWereDropped(t *testing.T) {
	t.Parallel()
	r := newMaintained(t, "deleted", "RETAIN_STREAM_MESSAGES=5")
	m, at := r.pages()
	rounds := r.rounds(at)
	r.goes(m)
	for range 3 {
		r.day(40)
		r.goes(m)
	}
	harness.Eventually(t, "messages leave the stream", func() error {
		r.beat()
		s, err := r.JS.Stream(t.Context(), r.Stream)
		if err != nil || s.CachedInfo().State.FirstSeq < 100 {
			return fmt.Errorf("%v: %s", err, m.log.String())
		}
		return nil
	}, m.child)
	r.MustStop(t)
	want := r.Replay("--from", "stream")
	if len(want) < 120 || want[0].Sequence != 1 {
		t.Fatalf("%d events, from %d on", len(want), want[0].Sequence)
	}
	harness.AwaitSlotFree(t, r.Conn, r.Slot)
	harness.Must(t, r.JS.DeleteStream(t.Context(), r.Stream))
	harness.Exec(t, r.Conn, "CREATE TABLE IF NOT EXISTS day_1 PARTITION OF outbox FOR VALUES FROM "+
		"('2024-05-01') TO ('2024-05-02')")
	m.says("stream_missing")
	r.waits(m, "day_1", rounds)
	r.MustContain("restore", r.MustRun("archive", "restore"), "restored ")
	if report, stderr, code := r.Repair("--accept", "stream_recreated"); code != 0 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	r.Start()
	r.AwaitReady()
	// by ids: behind the archive's end a repair has another order between documents
	ids := map[string]string{}
	harness.Eventually(t, "all is back", func() error {
		ids = map[string]string{}
		for _, e := range r.Replay("--from", "stream") {
			if ids[e.ID] != "" {
				t.Fatalf("event %s is there twice", e.ID)
			}
			ids[e.ID] = said(e)
		}
		for _, e := range want {
			if ids[e.ID] != said(e) {
				return fmt.Errorf("event %d was %s, and is %q", e.Sequence, said(e), ids[e.ID])
			}
		}
		return nil
	})
	r.goes(m)
	r.MustStop(t)
}

// said is what an event says to consumers.
func said(e harness.ReplayedEvent) string {
	h := maps.Clone(e.Headers)
	maps.DeleteFunc(h, func(name string, _ []string) bool { return strings.HasPrefix(name, "Nats-") })
	var b bytes.Buffer
	fmt.Fprint(&b, e.Subject, " ", string(e.Data))
	for _, name := range slices.Sorted(maps.Keys(h)) {
		if name != "Outflow" { // the position of a repair's is its own
			fmt.Fprint(&b, " ", name, h[name])
		}
	}
	return b.String()
}

// TestMaintainStopsAtAFenceInTheFuture: the database is an older copy than its fences. Nothing goes, the part
// says so by name, and the archive goes on.
func TestMaintainStopsAtAFenceInTheFuture(t *testing.T) {
	t.Parallel()
	r := newMaintained(t, "future")
	harness.Exec(t, r.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", r.Slot+"_other")
	harness.Exec(t, r.Conn, "CREATE TABLE day_9 PARTITION OF outbox FOR VALUES FROM ('2024-05-09') TO "+
		"('2024-05-10')")
	r.write(9, 10)
	m, at := r.pages()
	rounds := r.rounds(at)
	// the one that the other slot holds: what others are sealed, outflow maintain may be at
	const held = "state = 'sealed' AND name LIKE '%day_9%'"
	harness.Eventually(t, "the partition is sealed", func() error {
		r.beat()
		if harness.Value[int](t, r.Conn, "SELECT count(*) FROM outflow_partitions WHERE "+held) == 0 {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
	harness.Exec(t, r.Conn, "UPDATE outflow_partitions SET fence = 'FFFF/0' WHERE "+held)
	harness.Exec(t, r.Conn, "SELECT pg_drop_replication_slot($1)", r.Slot+"_other")
	m.says("before the fence of")
	before := harness.Metric(t, at, "outflow_archive_sequence")
	harness.Eventually(t, "the archive goes on", func() error {
		r.beat()
		if now := harness.Metric(t, at, "outflow_archive_sequence"); now <= before {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
	left := r.left()
	if !strings.Contains(left, "day_9") {
		t.Fatalf("left: %q", left)
	}
	r.waits(m, left, rounds)
	r.shows(at, "/metrics", 200, `outflow_maintain_part_fault{code="server_behind",part="partition",.*} 1`)
	// as its hint says
	harness.Exec(t, r.Conn, "UPDATE outflow_partitions SET state = 'detaching', fence = NULL WHERE fence = "+
		"'FFFF/0'")
	r.goes(m)
	r.MustStop(t)
}

// TestMaintainLetsNoRowGoThatWasNeverPublished: a partition is attached with rows of its own. They are
// counted and named, and stay until somebody accepts exactly so many, beside outflow maintain.
func TestMaintainLetsNoRowGoThatWasNeverPublished(t *testing.T) {
	t.Parallel()
	r := newMaintained(t, "attached")
	m := r.maintain()
	r.goes(m)
	harness.Exec(t, r.Conn, "CREATE TABLE day_1 (LIKE outbox INCLUDING GENERATED INCLUDING DEFAULTS)")
	harness.Exec(t, r.Conn, "INSERT INTO day_1 (doc_id, actor_id, counter, payload, created_at) SELECT "+
		"'old', 'a', n, '{}', '2024-05-01 12:00Z' FROM generate_series(1, 12) n")
	harness.Exec(t, r.Conn, "ALTER TABLE outbox ATTACH PARTITION day_1 FOR VALUES FROM ('2024-05-01') TO "+
		"('2024-05-02')")
	harness.Eventually(t, "the rows are refused", func() error {
		r.beat()
		if !strings.Contains(m.log.String(), "12 rows of partition ") {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
	if n := harness.Value[int](t, r.Conn, "SELECT count(*) FROM day_1"); n != 12 {
		t.Fatalf("%d rows are left", n)
	}
	accept := func(n string) error {
		_, said, code := r.Run("partition", "apply", "--accept-unpublished", n)
		if code == 1 { // outflow maintain is at it
			return errors.New(said)
		}
		return nil
	}
	harness.Eventually(t, "another number is refused", func() error { return accept("11") })
	if n := harness.Value[int](t, r.Conn, "SELECT count(*) FROM day_1"); n != 12 {
		t.Fatalf("%d rows are left", n)
	}
	harness.Eventually(t, "they go when exactly so many are accepted", func() error {
		if err := accept("12"); err != nil || r.left() != "" {
			return fmt.Errorf("%v; left: %q", err, r.left())
		}
		return nil
	})
	r.MustStop(t)
}
