package clusters

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// TestAKilledInitElsewhereIsRunAgain: init at a cluster that is to stand by is killed while its slot is being
// made, and when it is made and the record does not say so; then outflow run at its first steps. Run again,
// each goes on, and nothing of the home is missing when that cluster takes the stream over.
func TestAKilledInitElsewhereIsRunAgain(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	majors := awayMajors(t)
	s := newSharedHome(t, majors[len(majors)-1], 2)
	home, away, conn := s.home.o, s.others[0], s.all[1].conn
	away.MustRun("uninstall", "--yes")
	home.Start()
	js := harness.JetStream(t, s.natsURL)
	rows := 0
	write := func() {
		t.Helper()
		harness.Exec(t, s.home.conn, harness.InsertNumbered, rows+1, rows+10)
		rows += 10
	}
	write()
	harness.AwaitMessages(t, js, home.Stream, rows)

	// killedInit kills init when the slot is in a state.
	killedInit := func(state string) {
		t.Helper()
		cmd := exec.Command(harness.Program(away.Env), "init")
		cmd.Env, cmd.Stdout, cmd.Stderr = away.Env, away.Log, away.Log
		init, err := process.Start(cmd, syscall.SIGKILL)
		harness.Must(t, err)
		t.Cleanup(func() { _ = init.Kill() }) // it may have ended
		harness.Eventually(t, "the slot "+state, func() error {
			if !init.Running() {
				t.Fatalf("outflow init ended: %s", away.Log.Tail(1000))
			}
			if n := harness.Value[int](t, conn, "SELECT count(*)::int FROM pg_replication_slots WHERE "+
				"slot_name = $1 AND "+state, away.Slot); n == 0 {
				return errors.New("it is not there")
			}
			return nil
		})
		harness.Must(t, init.Kill())
		write()
	}
	writer := harness.Connect(t, s.all[1].url)
	harness.Exec(t, writer, "BEGIN")
	harness.Exec(t, writer, "SELECT pg_current_xact_id()")
	killedInit("confirmed_flush_lsn IS NULL")
	away.MustFail(3, []string{"init"}, "slot_unfinished")
	harness.Exec(t, writer, "COMMIT")
	// The server drops a slot that was not finished when it finds that its client is gone, or finishes it.
	harness.Eventually(t, "the server has done with the slot", func() error {
		if n := harness.Value[int](t, conn, "SELECT count(*)::int FROM pg_replication_slots WHERE "+
			"slot_name = $1 AND (active OR confirmed_flush_lsn IS NULL)", away.Slot); n > 0 {
			return errors.New("it has not")
		}
		return nil
	})
	harness.Exec(t, conn, "ALTER SUBSCRIPTION from_1 DISABLE") // init waits for it when the slot is made
	killedInit("confirmed_flush_lsn IS NOT NULL AND NOT active")
	harness.Exec(t, conn, "ALTER SUBSCRIPTION from_1 ENABLE")
	away.Init()
	away.Init()

	env := away.Env
	for _, point := range []string{"start.before", "start.after", "record.before", "record.after",
		"confirm.before", "confirm.after"} {
		away.Set("FAILPOINT=" + point + ":1")
		away.Start()
		write()
		away.Wait()
		away.Env = env
		s.mustBeKilled(away, point)
	}
	away.Start()
	away.AwaitState("standby")
	harness.AwaitMessages(t, js, home.Stream, rows)
	home.Kill()
	write()
	s.awaitOwner("taken over", map[int]*harness.Outflow{2: away})
	s.awaitReplicated(2)
	home.Start()
	s.awaitOwner("the home is back", map[int]*harness.Outflow{1: home})
	write()
	s.mustBeTheHomes()
}

// mustBeKilled makes sure that an outflow has ended at a failpoint.
func (s *sharedHome) mustBeKilled(o *harness.Outflow, point string) {
	s.Helper()
	var exit *exec.ExitError
	if err := o.Process.Wait(); !errors.As(err, &exit) ||
		exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		s.Fatal(fmt.Errorf("%s: it ended with %w", point, err))
	}
}
