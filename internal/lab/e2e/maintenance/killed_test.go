package maintenance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// maintainPoints are those at which outflow maintain can be killed in this test, beside the archive's and the
// partitions'.
var maintainPoints = []string{"stream.verified", "stream.checked", "stream.purged"}

// noPartition is the SQLSTATE of a row for which there is no partition.
const noPartition = "23514"

// TestMaintainIsKilledUnderLoad: services write, outflow runs, and outflow maintain is killed at each of its
// points and at random moments. Partitions last for seconds. Nothing is lost: each row that was ever written
// is once in archive and stream, read as one, and what was dropped from table and stream is in the archive.
// In the long form there are several hundred kills.
func TestMaintainIsKilledUnderLoad(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "loaded",
		"INIT_PARTITION_BY=written_at", "INIT_PARTITION_EVERY=2s", "RETAIN_TABLE_EVERY=2s",
		"RETAIN_TABLE_AHEAD=64", "RETAIN_TABLE_SLACK=0s", "RETAIN_STREAM_MESSAGES=20",
		"SINK_DURABLE_AFTER=0s", "ARCHIVE_URL=file://"+t.TempDir(), "ARCHIVE_SEGMENT_AGE=0s",
		"MAINTAIN_EVERY=1s")
	f.Init()
	harness.Exec(t, f.Conn, "CREATE TABLE written (id uuid PRIMARY KEY)")
	f.MustRun("maintain", "--once") // makes partitions of the minutes to come
	f.Start()
	r := &retained{t: t, Installation: f}

	var stopping atomic.Bool
	ended := make(chan error, 1)
	conn := harness.Connect(t, f.URL)
	var late atomic.Int64
	go func() {
		for n := 1; !stopping.Load(); n++ {
			_, err := conn.Exec(t.Context(), `WITH n AS (
				INSERT INTO outbox (doc_id, actor_id, counter, payload)
				VALUES ('doc' || $1 % 5, 'a', $1, '{}') RETURNING id)
				INSERT INTO written SELECT id FROM n`, n)
			var refused *pgconn.PgError
			switch {
			case errors.As(err, &refused) && refused.Code == noPartition:
				late.Add(1) // none was made in time: the machine stands still, and the service tries again
			case err != nil:
				ended <- err
				return
			}
			time.Sleep(20 * time.Millisecond) // the pace of the service, nothing waits for it
		}
		ended <- nil
	}()

	first := func() uint64 { // message of the stream
		s, err := f.JS.Stream(t.Context(), f.Stream)
		harness.Must(t, err)
		return s.CachedInfo().State.FirstSeq
	}
	dropped := func() int {
		return harness.Value[int](t, f.Conn, "SELECT count(*) FROM outflow_partitions WHERE state = "+
			"'dropped' AND rows > 0")
	}
	// A reader that is killed leaves its consumer, which holds the stream for as long as JetStream keeps it.
	forget := func() {
		t.Helper()
		s, err := f.JS.Stream(t.Context(), f.Stream)
		harness.Must(t, err)
		names := s.ConsumerNames(t.Context())
		for name := range names.Name() {
			_ = s.DeleteConsumer(t.Context(), name) // one that works makes another
		}
		harness.Must(t, names.Err())
	}
	// What it has done so far: as long as that goes on, it is waited for.
	done := func(m *maintainer) error {
		partitions := harness.Value[string](t, f.Conn, "SELECT string_agg(n || ' ' || state, ', ' ORDER BY "+
			"state) FROM (SELECT state, count(*) n FROM outflow_partitions GROUP BY state) s")
		return fmt.Errorf("the stream begins at %d, %s\n%s", first(), partitions, m.log.String())
	}
	works := func() {
		t.Helper()
		forget()
		m := r.maintain()
		partitions, seq := dropped(), first()
		harness.Eventually(t, "partitions and messages go", func() error {
			if dropped() <= partitions || first() <= seq {
				return done(m)
			}
			return nil
		}, m.child)
		harness.Must(t, m.child.Kill())
	}
	works()
	kills, at := 0, map[string]int{}
	points := append(append(append([]string{}, archivePoints...), points...), maintainPoints...)
	for range harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", harness.Sized(20, 1)) {
		for _, point := range points {
			forget()
			m := r.maintain("OUTFLOW_FAILPOINT=" + point + ":1")
			harness.Eventually(t, "outflow maintain comes to "+point, func() error {
				if m.child.Running() {
					return done(m)
				}
				return nil
			})
			if err := m.child.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("%s: %v\n%s", point, err, m.log.String())
			}
			kills, at[point] = kills+1, at[point]+1
		}
		for range 5 {
			m := r.maintain()
			time.Sleep(rand.N(3 * time.Second)) // any moment is right
			harness.Must(t, m.child.Kill())
			kills, at["at random"] = kills+1, at["at random"]+1
		}
		works()
	}
	stopping.Store(true)
	harness.Must(t, <-ended)
	t.Logf("%d kills: %v; %d rows had no partition in time", kills, at, late.Load())

	// what was written is in archive and stream, once each
	want := map[string]bool{}
	for _, id := range harness.Value[[]string](t, f.Conn, "SELECT array_agg(id::text) FROM written") {
		want[id] = true
	}
	var seen map[string]int
	harness.Eventually(t, "all is published", func() error {
		f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
		seen = map[string]int{}
		for _, e := range f.Replay("--from", "stream", "--seq", "1..") {
			seen[e.ID]++
		}
		for id := range want {
			if seen[id] == 0 {
				return fmt.Errorf("event %s is missing, of %d", id, len(want))
			}
		}
		return nil
	})
	for id, n := range seen {
		if n != 1 || !want[id] {
			t.Errorf("event %s was written: %v, and is there %d times", id, want[id], n)
		}
	}
	left := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox")
	if left >= len(want) || first() < 2 {
		t.Errorf("%d of %d rows are left in the table, and the stream begins at %d: nothing went", left,
			len(want), first())
	}
	f.MustRun("archive", "verify")
	f.MustStop(t)
}
