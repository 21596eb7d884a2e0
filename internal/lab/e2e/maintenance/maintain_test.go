package maintenance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// maintainer is an outflow maintain.
type maintainer struct {
	t     *testing.T
	child *process.Process
	log   harness.Log
}

func (r *retained) maintain(settings ...string) *maintainer {
	r.t.Helper()
	return r.maintainBy(nil, settings...)
}

// maintainBy runs it by another program, such as nice, which is replaced by it.
func (r *retained) maintainBy(other []string, settings ...string) *maintainer {
	r.t.Helper()
	return r.runsBy(other, []string{"maintain"}, settings...)
}

// runs runs a command in the background.
func (r *retained) runs(command []string, settings ...string) *maintainer {
	r.t.Helper()
	return r.runsBy(nil, command, settings...)
}

func (r *retained) runsBy(other, command []string, settings ...string) *maintainer {
	r.t.Helper()
	m := &maintainer{t: r.t}
	env := append(slices.Clone(r.Env), settings...)
	args := append(append(slices.Clone(other), harness.Program(env)), command...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Stdout, cmd.Stderr = &m.log, &m.log
	var err error
	m.child, err = process.Start(cmd, syscall.SIGKILL)
	harness.Must(r.t, err)
	r.t.Cleanup(func() {
		_ = m.child.Kill() // it may have ended
		_ = m.child.Wait()
	})
	return m
}

func (m *maintainer) says(what string) {
	m.t.Helper()
	harness.Eventually(m.t, what, func() error {
		if !strings.Contains(m.log.String(), what) {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
}

// stopped reports whether the process stands still.
func (m *maintainer) stopped() bool {
	// where it has ended there is none
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.child.PID()))
	_, state, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(state, "T")
}

func newMaintained(t *testing.T, name string, settings ...string) *retained {
	t.Helper()
	return newMaintainedAt(t, pgtest.Server(t), name, settings...)
}

func newMaintainedAt(t *testing.T, pg *pgserver.Server, name string, settings ...string) *retained {
	t.Helper()
	r := newRetained(t, pg, name, append(settings, "ARCHIVE_URL=file://"+t.TempDir(),
		"ARCHIVE_SEGMENT_AGE=0s", "MAINTAIN_EVERY=1s")...)
	r.Init()
	r.Start()
	r.MustRun("partition", "apply") // makes a partition of now
	return r
}

// goes writes until the old partitions are gone.
func (r *retained) goes(m *maintainer) {
	r.t.Helper()
	harness.Eventually(r.t, "the partitions go", func() error {
		r.beat()
		if got := r.left(); got != "" {
			return fmt.Errorf("left: %s\n%s", got, m.log.String())
		}
		return nil
	}, m.child)
}

// oneIsOld makes an old partition of ten rows, when all before it have gone.
func (r *retained) oneIsOld() {
	r.t.Helper()
	m := r.maintain()
	r.goes(m)
	harness.Must(r.t, m.child.Signal(syscall.SIGTERM))
	harness.Must(r.t, m.child.Wait())
	harness.Exec(r.t, r.Conn, "CREATE TABLE day_1 PARTITION OF outbox FOR VALUES FROM ('2024-05-01') TO "+
		"('2024-05-02')")
	r.write(1, 10)
	r.settle()
}

// stopsAt is an outflow maintain that stands still at a point.
func (r *retained) stopsAt(point string) *maintainer {
	r.t.Helper()
	m := r.maintain("OUTFLOW_FAILPOINT=stop." + point + ":1")
	harness.Eventually(r.t, "it stands still at "+point, func() error {
		r.beat()
		if !m.stopped() {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
	return m
}

// TestOfTwoMaintainsOneWorks: the other one stands by, and goes on when the first one is killed; a signal
// ends it cleanly.
func TestOfTwoMaintainsOneWorks(t *testing.T) {
	t.Parallel()
	r := newMaintained(t, "pair")
	first := r.maintain()
	r.goes(first)
	second := r.maintain()
	second.says("standing by")
	harness.Must(t, first.child.Kill())
	second.says("this one goes on")
	r.day(10)
	r.goes(second)
	third := r.maintain()
	third.says("standing by")
	harness.Must(t, second.child.Signal(syscall.SIGTERM))
	if err := second.child.Wait(); err != nil {
		t.Errorf("%v\n%s", err, second.log.String())
	}
	third.says("this one goes on")
	r.MustStop(t)
}

// TestAMaintainThatSleptBeforeTheDropVerifiesAgain: somebody writes to the detached partition meanwhile.
func TestAMaintainThatSleptBeforeTheDropVerifiesAgain(t *testing.T) {
	t.Parallel()
	r := newMaintained(t, "slept")
	r.oneIsOld()
	m := r.stopsAt("partition.verified")
	day := harness.Value[string](t, r.Conn, "SELECT name FROM outflow_partitions WHERE state = 'verified'")
	harness.Exec(t, r.Conn, "INSERT INTO "+day+" (doc_id, actor_id, counter, payload, created_at) VALUES "+
		"('late', 'a', 1, '{}', '2024-05-01 12:00Z')")
	harness.Must(t, m.child.Signal(syscall.SIGCONT))
	harness.Eventually(t, "the row is refused", func() error {
		r.beat()
		if !strings.Contains(m.log.String(), "1 row of partition ") {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
	if n := harness.Value[int](t, r.Conn, "SELECT count(*) FROM "+day+" WHERE doc_id = 'late'"); n != 1 {
		t.Errorf("%d rows are left", n)
	}
	r.MustStop(t)
}

// TestMaintainOnceHasTheWorstExitCode: the partition part is done although the archive has a gap.
func TestMaintainOnceHasTheWorstExitCode(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "once",
		"SINK_DURABLE_AFTER=0s", "INIT_PARTITION_BY=written_at",
		"ARCHIVE_URL=file://"+t.TempDir(), "ARCHIVE_SEGMENT_AGE=0s")
	f.Init()
	f.Start()
	f.MustRun("maintain", "--once")
	for range 3 {
		settle(t, f)
	}
	stream, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, stream.Purge(t.Context()))
	harness.Exec(t, f.Conn, "DROP TABLE outflow_partitions")
	harness.Eventually(t, "the gap is found", func() error {
		settle(t, f)
		out, said, code := f.Run("maintain", "--once")
		if code != 4 || !strings.Contains(said, "archive_gap") {
			return fmt.Errorf("exit code %d: %s%s", code, out, said)
		}
		return nil
	})
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outflow_partitions"); n == 0 {
		t.Error("the other part was not run")
	}
	f.MustStop(t)
}

// TestMaintainOnceThatHasNothingToDoPrintsNothing, however long that takes: cron would send it.
func TestMaintainOnceThatHasNothingToDoPrintsNothing(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "oncesilent",
		"INIT_PARTITION_BY=written_at")
	f.Init()
	f.MustRun("maintain", "--once")
	proxy, url, err := faultproxy.To(f.URL)
	harness.Must(t, err)
	t.Cleanup(proxy.Close)
	proxy.Delay(100 * time.Millisecond)
	if out, said, code := f.Run("maintain", "--once", "--postgres.url", url); code != 0 || out+said != "" {
		t.Errorf("exit code %d: %s%s", code, out, said)
	}
}

// TestMaintainLeavesAPlainTableAlone: that is what init makes where nothing else is said, and nobody asked
// for its rows to go. A run that has nothing else to do says that.
func TestMaintainLeavesAPlainTableAlone(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "plain",
		"SINK_DURABLE_AFTER=0s", "ARCHIVE_URL=file://"+t.TempDir(), "ARCHIVE_SEGMENT_AGE=0s")
	f.Init()
	f.Start()
	for range 3 {
		settle(t, f)
	}
	const stay = "its rows stay"
	if out, said, code := f.Run("maintain", "--once"); code != 0 || strings.Contains(said, stay) {
		t.Errorf("exit code %d: %s%s", code, out, said)
	}
	if out, said, code := f.Run("maintain", "--once", "--archive.url="); code != 0 ||
		!strings.Contains(said, stay) {
		t.Errorf("exit code %d: %s%s", code, out, said)
	}
	f.MustContain("archive list", f.MustRun("archive", "list"), "1 to ")
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox"); n != 3 {
		t.Errorf("%d rows are left", n)
	}
	f.MustFail(3, []string{"partition", "apply"}, "partition_key")
	f.MustStop(t)
}
