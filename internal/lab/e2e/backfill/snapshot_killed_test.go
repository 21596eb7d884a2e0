package backfill

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// TestASnapshotKilledAtAnyStepPublishesEachRowOnce kills a snapshot with kill -9 at every step, while writers
// write. In between nothing takes what is there for the whole; the one that comes to its end has each row in
// the stream once.
func TestASnapshotKilledAtAnyStepPublishesEachRowOnce(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	const rows = 2000
	f := older(t, pgtest.Server(t), ns.URL(), "cut", rows)
	stop := harness.StartWriters(t, f.URL)
	defer stop()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	f.KillSnapshotAt(t, "snapshot.begin:1")
	f.MustFail(3, []string{"run"}, "outflow init")
	for _, point := range []string{"begun", "slot", "made", "taken", "row", "known", "row", "row",
		"published", "durable"} {
		n := 1
		if point == "row" {
			n = 1 + rnd.IntN(rows/3)
		}
		f.KillSnapshotAt(t, fmt.Sprintf("snapshot.%s:%d", point, n))
		if health, problem := f.Health(); health != "snapshot_unfinished" ||
			!strings.Contains(problem, "outflow init --snapshot") {
			t.Errorf("after %s: %s, %s", point, health, problem)
		}
	}
	harness.RunAtOnce(t, [][]string{{"run"}, {"init"}, {"repair"}, {"repair", "--accept",
		"snapshot_unfinished"}, {"drain"}}, func(c []string) string { return strings.Join(c, " ") },
		func(t *testing.T, _ int, args []string) {
			// A report of its own for each: they run at the same time.
			out, stderr, code := f.Run(args...)
			if code != 4 || !strings.Contains(stderr, "did not finish") ||
				!strings.Contains(stderr, "`outflow init --snapshot` again") {
				t.Errorf("exit code %d\n%s%s", code, out, stderr)
			}
		})
	f.KillSnapshotAt(t, "snapshot.finished:1")
	f.Start()
	f.AwaitReady()
	stop()
	f.AwaitComplete(t, ns.URL(), 0)
	c := judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject)
	if c.cut < 2 || c.windows <= c.cut || c.snapshot < rows {
		t.Errorf("%+v", c)
	}
	t.Logf("%+v", c)
}

// taking is an outflow init --snapshot --json that runs.
type taking struct {
	env   []string
	child *process.Process
	lines chan string // of its standard error
	w     *io.PipeWriter
}

func startTaking(f *harness.Installation, t *testing.T) *taking {
	t.Helper()
	k := &taking{env: slices.Clone(f.Env)} // a later setting may take the place of one
	k.start(t)
	return k
}

func (k *taking) start(t *testing.T) {
	t.Helper()
	cmd := exec.Command(harness.Program(k.env), "init", "--snapshot", "--json")
	cmd.Env = k.env
	r, w := io.Pipe()
	cmd.Stderr = w
	child, err := process.Start(cmd, syscall.SIGKILL)
	harness.Must(t, err)
	lines := make(chan string, 1024)
	k.child, k.lines, k.w = child, lines, w
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(r); s.Scan(); {
			lines <- s.Text()
		}
	}()
}

// says waits until it says something.
func (k *taking) says(t *testing.T, word string) {
	t.Helper()
	var all []string
	for limit := time.After(harness.Patience); ; {
		select {
		case line := <-k.lines:
			if all = append(all, line); strings.Contains(line, word) {
				return
			}
		case <-k.child.Done():
			t.Fatalf("it ended without %q:\n%s", word, strings.Join(all, "\n"))
		case <-limit:
			t.Fatalf("it does not say %q:\n%s", word, strings.Join(all, "\n"))
		}
	}
}

// ends waits for its end.
func (k *taking) ends(t *testing.T) (code int, stderr string) {
	return k.endsWithin(t, 2*harness.Patience)
}

func (k *taking) endsWithin(t *testing.T, limit time.Duration) (code int, stderr string) {
	t.Helper()
	select {
	case <-k.child.Done():
	case <-time.After(limit):
		t.Fatal("it does not end")
	}
	k.w.Close()
	for line := range k.lines {
		stderr += line + "\n"
	}
	var exit *exec.ExitError
	if errors.As(k.child.Wait(), &exit) {
		code = exit.ExitCode()
	}
	return code, stderr
}

// asleep waits until a failpoint has stopped it. One that ended before, because a server did not answer, is
// started again.
func (k *taking) asleep(t *testing.T) {
	t.Helper()
	harness.Eventually(t, "it sleeps", func() error {
		if !k.child.Running() {
			code, stderr := k.ends(t)
			if code >= 0 && (code != 1 || !harness.Unanswered(t, "init --snapshot", stderr)) {
				t.Fatalf("it ended before it slept: exit code %d\n%s", code, stderr)
			}
			k.start(t)
		}
		return harness.CheckFrozen(k.child.PID())
	})
}

// TestASnapshotGoesOnAfterServerOutages: NATS and PostgreSQL are killed while rows are published. The
// snapshot goes on by itself, or, where that takes too long, when it is run again.
func TestASnapshotGoesOnAfterServerOutages(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	nats, pg := natstest.Process(t), pgtest.Own(t, 0)
	const rows = 30_000
	f := older(t, pg, nats.URL(), "outage", rows)
	f.Set("FAILPOINT=stop.snapshot.row:5000,snapshot.taken:2")
	k := startTaking(f, t)
	k.asleep(t)
	harness.Must(t, nats.Kill())
	harness.Must(t, nats.Start())
	harness.Must(t, k.child.Resume())
	k.says(t, "begins again")
	if _, stderr := k.ends(t); k.child.Running() {
		t.Fatal(stderr)
	}
	f.Set("FAILPOINT=stop.snapshot.row:5000")
	k = startTaking(f, t)
	k.asleep(t)
	harness.Must(t, pg.Kill())
	harness.Must(t, pg.Start(t.Context()))
	harness.Must(t, k.child.Resume())
	code, stderr := k.ends(t) // it need not begin again: what the server had sent may be all the rest
	f.Env = f.Env[:len(f.Env)-2]
	for n := 0; (code == 1 || code == 3) && n < 10; n++ {
		_, stderr, code, _ = f.Snapshot()
	}
	if code != 0 {
		t.Fatalf("exit code %d\n%s", code, stderr)
	}
	f.Conn = harness.Connect(t, f.URL)
	f.Start()
	harness.Insert(t, f.Conn, "after", 1, "{}")
	f.AwaitComplete(t, nats.URL(), 0)
	c := judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject)
	if c.snapshot != rows || c.windows < 2 {
		t.Errorf("%+v", c)
	}
}

// TestASnapshotThatWakesUpLatePublishesNothing: a snapshot sleeps in the middle of its window, and another
// comes to its end. What the sleeper still sends when it wakes up is nowhere in the stream, and it ends.
func TestASnapshotThatWakesUpLatePublishesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	const rows = 20_000
	// A server of its own: while nobody reads what one of its processes sends, it can't drop a database.
	f := older(t, pgtest.Own(t, 0), ns.URL(), "sleeper", rows)
	f.Set("FAILPOINT=stop.snapshot.row:3000")
	k := startTaking(f, t)
	f.Env = f.Env[:len(f.Env)-1]
	k.asleep(t)
	r := f.MustSnapshot()
	if r.Already == 0 || r.Already+r.Published != rows {
		t.Errorf("%+v", r)
	}
	f.Start()
	f.AwaitReady()
	harness.Must(t, k.child.Resume())
	if code, stderr := k.ends(t); code != 3 || !strings.Contains(stderr, "another outflow init --snapshot") {
		t.Errorf("the sleeper: exit code %d\n%s", code, stderr)
	}
	harness.Insert(t, f.Conn, "after", 1, "{}")
	f.AwaitComplete(t, ns.URL(), 0)
	judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject)
	f.MustStop(t)
}

// TestASnapshotGoesOnAfterTheStreamLosesItsEnd: between two attempts the broker loses the end of what the
// first had published, with the sequence going back or leaving a hole. The next attempts know what is there.
func TestASnapshotGoesOnAfterTheStreamLosesItsEnd(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	harness.RunAtOnce(t, []natsserver.Form{natsserver.Back, natsserver.Hole}, natsserver.Form.String,
		func(t *testing.T, _ int, form natsserver.Form) {
			nats := natstest.Process(t)
			const rows = 5000
			f := older(t, pgtest.Server(t), nats.URL(), "tail", rows)
			f.KillSnapshotAt(t, "snapshot.row:4000")
			harness.Must(t, nats.Stop())
			harness.LoseNewest(form, 300).Tear(t, nats.Dir(), f.Stream)
			harness.Must(t, nats.Start())
			f.KillSnapshotAt(t, "snapshot.row:100")
			r := f.MustSnapshot()
			if r.Already == 0 || r.Already+r.Published != rows {
				t.Errorf("%+v", r)
			}
			f.Start()
			harness.Insert(t, f.Conn, "after", 1, "{}")
			f.AwaitComplete(t, nats.URL(), 0)
			judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject)
		})
}

// TestASnapshotBeginsAgainWhenItsSlotIsRecreated: while rows are published somebody makes the slot anew. What
// was written before would be in neither; so the snapshot begins again.
func TestASnapshotBeginsAgainWhenItsSlotIsRecreated(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Server(t), ns.URL(), "anew", 50)
	f.Set("FAILPOINT=stop.snapshot.published:1")
	k := startTaking(f, t)
	f.Env = f.Env[:len(f.Env)-1]
	k.asleep(t)
	harness.Insert(t, f.Conn, "meanwhile", 1, "{}")
	f.DropSlot(t)
	harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.Slot)
	harness.Must(t, k.child.Resume())
	k.says(t, "begins again: somebody else changed what was made")
	if code, stderr := k.ends(t); code != 0 {
		t.Fatalf("exit code %d\n%s", code, stderr)
	}
	f.Start()
	harness.Insert(t, f.Conn, "after", 1, "{}")
	f.AwaitComplete(t, ns.URL(), 0)
	if c := judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject); c.windows < 2 ||
		c.snapshot != 51 {
		t.Errorf("%+v", c)
	}
}

// TestASnapshotThatWakesUpLateLeavesTheSlotAlone: a snapshot sleeps just before it would drop the slot and
// make it anew, and another comes to its end. What the sleeper finds when it wakes up is an installation that
// is whole, and it leaves its slot alone.
func TestASnapshotThatWakesUpLateLeavesTheSlotAlone(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	const rows = 50
	f := older(t, pgtest.Server(t), ns.URL(), "beforeslot", rows)
	f.Set("FAILPOINT=stop.snapshot.begun:2")
	k := startTaking(f, t)
	f.Env = f.Env[:len(f.Env)-1]
	k.asleep(t)
	if r := f.MustSnapshot(); r.Published != rows {
		t.Errorf("%+v", r)
	}
	harness.Insert(t, f.Conn, "between", 1, "{}") // only the slot has it, once the row is gone
	harness.Exec(t, f.Conn, "DELETE FROM outbox WHERE doc_id = 'between'")
	harness.Must(t, k.child.Resume())
	if code, stderr := k.ends(t); code != 3 || !strings.Contains(stderr, "another outflow init --snapshot") {
		t.Errorf("the sleeper: exit code %d\n%s", code, stderr)
	}
	f.Start()
	harness.Eventually(t, "the row that was written between is published", func() error {
		st, err := f.JS.Stream(t.Context(), f.Stream)
		if err == nil && st.CachedInfo().State.LastSeq != rows+1 {
			err = fmt.Errorf("last sequence %d", st.CachedInfo().State.LastSeq)
		}
		return err
	})
	f.MustStop(t)
}
