package crash

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/failpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// doomed is an outflow with a failpoint.
type doomed struct {
	*harness.Outflow
	point string
}

// doom makes an installation with a slot and a stream of its own, which dies at the point once it is started,
// in a mode that init has recorded and with settings that it has not.
func doom(t *testing.T, pgURL, natsURL, mode, point string, settings ...string) *doomed {
	t.Helper()
	slot := harness.SlotName("doomed")
	d := &doomed{harness.New(t, pgURL, natsURL, slot, "STREAM="+slot, "REORDER_MODE="+mode), point}
	d.Stream = slot
	d.Init()
	d.Set(settings...)
	d.Set("FAILPOINT=" + point)
	return d
}

// again starts it without the failpoint, and with heartbeats: without them its last events would wait for
// somebody else's.
func (d *doomed) again() {
	d.T.Helper()
	d.Env = slices.DeleteFunc(d.Env, func(entry string) bool {
		return strings.HasPrefix(entry, "OUTFLOW_FAILPOINT=") || entry == "OUTFLOW_REORDER_TICK=off"
	})
	d.Start()
}

// killed makes sure that it has ended as by kill -9.
func (d *doomed) killed() {
	d.T.Helper()
	d.Wait()
	var exit *exec.ExitError
	if err := d.Process.Wait(); !errors.As(err, &exit) ||
		exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		d.T.Errorf("%s: it ended with %v\n%s", d.point, err, d.Log.Tail(1000))
	}
}

// compare makes sure that the stream is the table.
func (d *doomed) compare(conn *pgx.Conn, natsURL string) oracle.Verdict {
	d.T.Helper()
	v, err := oracle.Compare(d.T.Context(), conn, "outbox", harness.JetStream(d.T, natsURL), d.Stream, 0)
	if err != nil {
		d.T.Fatalf("%s: %v", d.point, err)
	}
	if !v.OK() {
		d.T.Errorf("%s: %s", d.point, v.String())
	}
	return v
}

// TestAClockThatIsAheadMakesNothingDurable: another machine takes over, and its clock is ahead by more than
// durable_after. What was recorded a moment ago is not durable for that.
func TestAClockThatIsAheadMakesNothingDurable(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Server(t)
	o := harness.New(t, url, nats.URL(), harness.SlotName("clock"), "SINK_DURABLE_AFTER=2m")
	o.Init()
	conn, stream := harness.Connect(t, url), harness.JetStream(t, nats.URL())
	revisions := func(least uint64) uint64 {
		var last uint64
		harness.Eventually(t, "a record", func() error {
			s, err := stream.Stream(t.Context(), "KV_outflow-"+o.Stream)
			if err == nil {
				last = s.CachedInfo().State.LastSeq
			}
			if err == nil && last < least {
				err = fmt.Errorf("revision %d", last)
			}
			return err
		})
		return last
	}
	first := o.ConfirmedLSN(conn)
	made := revisions(1)
	o.Start()
	harness.Insert(t, conn, "doc", 1, "{}")
	recorded := revisions(made + 1)
	o.Kill()
	o.Set("FAILPOINT=clock:2h")
	o.Start()
	o.AwaitReady()
	harness.Insert(t, conn, "doc", 2, "{}")
	harness.AwaitMessages(t, stream, o.Stream, 2)
	o.MustStop(t) // it records and confirms once more
	revisions(recorded + 1)
	if now := o.ConfirmedLSN(conn); now != first {
		t.Errorf("confirmed moved from %s to %s", first, now)
	}
}

// TestOutflowResumesWhereverItWasKilled: wherever outflow is killed, the next one finds its checkpoint again.
// All read the same table, each over a slot of its own into a stream of its own, so that the streams must
// also be equal to each other.
func TestOutflowResumesWhereverItWasKilled(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	t.Run("horizon", func(t *testing.T) {
		testResumes(t, "horizon", "REORDER_HORIZON=30ms", "REORDER_MODE=gap")
	})
	if tier.Long() {
		t.Run("gap", func(t *testing.T) { testResumes(t, "gap", "REORDER_BOUND=1s", "REORDER_MODE=horizon") })
	}
}

// testResumes kills outflows in a mode, and some that start with other settings than they had.
func testResumes(t *testing.T, mode string, others ...string) {
	url, err := pgtest.Own(t, 0).CreateDatabase(t.Context(), "traces")
	harness.Must(t, err)
	nats := natstest.Process(t)
	var all []*doomed
	for _, point := range failpoint.Names() {
		// What comes once a second, or once a session, is not waited for long.
		at := []int{1, 23}
		settings := []string{"REORDER_TICK=off"} // or those that are to write ticks would hardly come to it
		if mode == "gap" {
			settings = nil
		}
		switch name, _, _ := strings.Cut(point, "."); name {
		case "record", "confirm":
			at[1] = 3
		case "tick":
			if mode == "gap" { // no counter is missing: there is nothing that a heartbeat would end
				continue
			}
			at[1], settings = 3, nil
		case "change":
			for _, other := range others {
				with := []string{other}
				if other != "REORDER_MODE=gap" { // which needs a heartbeat where the last events wait
					with = append(with, settings...)
				}
				all = append(all, doom(t, url, nats.URL(), mode, point+":1", with...))
			}
			continue
		case "start", "publisher":
			at = at[:1]
		case "memory":
			if at = at[:1]; mode != "gap" {
				continue
			}
		case "spill": // see TestASpillThatIsKilledOrOutOfSpaceLosesNothing
			continue
		}
		for _, n := range at {
			all = append(all, doom(t, url, nats.URL(), mode, fmt.Sprintf("%s:%d", point, n), settings...))
		}
	}

	ops, written := &harness.Load{Ops: harness.RecordedOps(t, 40_000)}, 0
	burst := func() {
		const size = 100
		harness.StartLoad(t, url, ops.Some(written, written+size), 4, 0, uint64(written)).Wait(t)
		written += size
	}
	// A slow machine decodes the WAL more slowly for more of them, or if more is written, than that comes.
	const together, pause = 12, 200 * time.Millisecond
	for some := range slices.Chunk(all, together) {
		for _, d := range some {
			d.Start()
		}
		var next time.Time
		await.Until(t, "all are dead", func() error { // that some have ended is as it should be
			if now := time.Now(); now.After(next) {
				burst()
				next = now.Add(pause)
			}
			var alive []string
			for _, d := range some {
				if d.Process.Running() {
					alive = append(alive, d.point)
				}
			}
			if alive != nil {
				return fmt.Errorf("alive: %v", alive)
			}
			return nil
		})
		for _, d := range some {
			d.killed()
		}
	}
	burst()

	conn := harness.Connect(t, url)
	digests := map[string]string{}
	for some := range slices.Chunk(all, together) {
		for _, d := range some {
			d.again()
		}
		for _, d := range some {
			harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), d.Stream, written)
			v := d.compare(conn, nats.URL())
			d.Kill()
			if strings.HasPrefix(d.point, "change") { // other settings
				continue
			}
			if digests[v.Digest] = d.point; len(digests) > 1 {
				t.Errorf("the streams differ: %v", digests)
			}
		}
	}
	t.Logf("%d operations, %d failpoints", written, len(all))
}

// TestASpillThatIsKilledOrOutOfSpaceLosesNothing: a transaction that is larger than the buffer, killed while
// it is written to disk, and on a disk that is full. So many outflows at once don't run beside other tests.
func TestASpillThatIsKilledOrOutOfSpaceLosesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Process(t)
	var dead, full []*doomed
	for _, sort := range []string{"seq_key", "commit"} {
		settings := []string{"REORDER_MAX_BYTES=65536", "REORDER_SORT=" + sort}
		for _, point := range []string{"spill.before:1", "spill.after:1", "spill.after:2"} {
			if point == "spill.after:2" && sort == "seq_key" { // one file is all that it needs
				continue
			}
			dead = append(dead, doom(t, url, nats.URL(), "horizon", point, settings...))
		}
		for _, point := range []string{"spill.full:1+20", "spill.full:3+20"} {
			full = append(full, doom(t, url, nats.URL(), "horizon", point, settings...))
		}
	}
	conn := harness.Connect(t, url)
	ops := harness.RecordedOps(t, 6000)
	for _, d := range append(slices.Clone(dead), full...) {
		d.Start()
	}
	for _, d := range append(slices.Clone(dead), full...) {
		rules(d.Outflow, "max_bytes=65536")
	}
	insertAll(t, conn, ops)

	// Between two attempts each says that it is not ready, and why. It does not give up. All are asked in
	// turn: the disk is full for some seconds only. The others die meanwhile.
	silent := slices.Clone(full)
	await.Until(t, "each says that the disk is full", func() error {
		silent = slices.DeleteFunc(silent, func(d *doomed) bool {
			code, body := d.Get("/readyz")
			return code == 503 && strings.Contains(body, "no space left")
		})
		if len(silent) > 0 {
			return fmt.Errorf("%d have not, the first with %s", len(silent), silent[0].point)
		}
		return nil
	})
	for _, d := range dead {
		d.killed()
		d.again()
	}
	digests := map[string]bool{}
	for _, d := range append(dead, full...) {
		harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), d.Stream, len(ops))
		digests[d.compare(conn, nats.URL()).Digest] = true
	}
	if len(digests) != 2 {
		t.Errorf("%d different streams of 2 ways to sort", len(digests))
	}
	for _, d := range full {
		if n := harness.Metric(t, d.Outflow, `outflow_failures_total{class="transient"}`); n < 6 {
			t.Errorf("%s: %v sessions ended with an error", d.point, n)
		}
		d.AwaitReady()
		if code := d.Stop(); code != 0 {
			t.Errorf("%s: exit code %d", d.point, code)
		}
	}
}

// rules waits until settings are in force that the configuration has and init has not recorded: their change
// is read from the WAL, and what is committed before it goes by the old ones.
func rules(o *harness.Outflow, setting string) {
	o.T.Helper()
	harness.Eventually(o.T, setting+" is in force", func() error {
		for line := range strings.Lines(o.Log.String()) {
			if strings.Contains(line, "ordering settings changed in the WAL") &&
				strings.Contains(line, setting) {
				return nil
			}
		}
		return fmt.Errorf("log: %s", o.Log.Tail(1000))
	})
}

// insertAll writes operations in one transaction.
func insertAll(t *testing.T, conn *pgx.Conn, ops []recording.Op) {
	t.Helper()
	_, err := conn.CopyFrom(t.Context(), pgx.Identifier{"outbox"},
		[]string{"doc_id", "actor_id", "counter", "payload"},
		pgx.CopyFromSlice(len(ops), func(i int) ([]any, error) {
			return []any{ops[i].Doc, ops[i].Actor, ops[i].Counter, string(ops[i].Payload)}, nil
		}))
	harness.Must(t, err)
}

// TestOnlyTheLabKnowsFailpoints: outflow knows no failpoints, and outflow-lab none that it hasn't.
func TestOnlyTheLabKnowsFailpoints(t *testing.T) {
	t.Parallel()
	o := harness.New(t, "postgres://127.0.0.1:1/none", "nats://127.0.0.1:1", "none", "FAILPOINT=nowhere:1")
	for _, program := range []string{harness.Binary, harness.Lab} {
		cmd := exec.CommandContext(t.Context(), program, "run")
		cmd.Env = o.Env
		if _, err := cmd.Output(); cmd.ProcessState.ExitCode() != 2 {
			t.Errorf("%s: %v", program, err)
		}
	}
}
