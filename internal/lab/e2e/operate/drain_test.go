package operate

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// TestDrainPublishesWhatWaits: drain publishes what waits in a free slot, watches an outflow that holds it,
// goes on while rows are written, and is a program that can be stopped.
func TestDrainPublishesWhatWaits(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), "drain")
	o.MustFail(3, []string{"drain"}, "outflow init")
	o.Init()
	if r := o.Drain(); r.Sequence != 0 || r.Holder != 0 {
		t.Errorf("nothing written: %+v", r)
	}

	// Nobody holds the slot.
	const ops = 3000
	harness.StartLoad(t, url, harness.RecordedOps(t, ops), 4, 0, 3).Wait(t)
	r := o.Drain()
	if r.Sequence != ops || r.Holder != 0 {
		t.Errorf("a free slot: %+v, want %d messages, published by drain", r, ops)
	}
	harness.AwaitSlotFree(t, conn, o.Slot)
	confirmed := harness.Value[bool](t, conn, "SELECT confirmed_flush_lsn >= $2::pg_lsn AND NOT active "+
		"FROM pg_replication_slots WHERE slot_name = $1",
		o.Slot, r.Goal.String())
	if !confirmed {
		t.Errorf("the slot is held, or not confirmed up to %v", r.Goal)
	}

	// An outflow holds it, and rows are written all the time: no end before they stop.
	o.Start()
	o.AwaitState("running")
	l := harness.StartEndlessLoad(t, url, harness.RecordedOps(t, 2*ops)[ops:], 4, 250, 3)
	harness.Eventually(t, "drain gives up", func() error { // in the middle of a round, sooner or later
		out, errOut, code := o.Run("drain", "--timeout", "9s")
		if code != 1 { // the writers may have stood still for as long as it looked
			return fmt.Errorf("outflow drain: exit code %d while rows are written\n%s%s", code, out, errOut)
		}
		for _, says := range []string{"not drained within 9s", "events were written meanwhile",
			"are the writers stopped?"} {
			if !strings.Contains(errOut, says) {
				return fmt.Errorf("it does not say %q: %s", says, errOut)
			}
		}
		return nil
	})
	var log *harness.Log
	var child *process.Process
	drain := func() {
		t.Helper()
		log = &harness.Log{}
		cmd := exec.Command(harness.Program(o.Env), "drain")
		cmd.Env, cmd.Stdout, cmd.Stderr = o.Env, log, log
		var err error
		child, err = process.Start(cmd, syscall.SIGKILL)
		harness.Must(t, err)
	}
	said := func(what string) {
		t.Helper()
		harness.Eventually(t, what, func() error {
			if !strings.Contains(log.String(), what) {
				return fmt.Errorf("drain says:\n%s", log)
			}
			return nil
		}, child)
	}
	drain()
	harness.Eventually(t, "drain begins another round", func() error {
		if strings.Contains(log.String(), "events were written meanwhile") {
			return nil
		}
		if !child.Running() {
			drain()
		}
		return fmt.Errorf("drain says:\n%s", log)
	})
	l.Ending.Store(true) // while it waits
	l.Wait(t)
	harness.Must(t, child.Wait())
	said("drained: everything up to ")
	said("still runs: stop it")
	written := ops + int(l.Written.Load())
	if r = o.Drain(); r.Sequence != uint64(written) || r.Holder == 0 {
		t.Errorf("under load: %+v, want %d messages, published by the outflow that runs", r, written)
	}

	// That outflow ends in the middle: drain goes on by itself.
	o.MustStop(t)
	o.Set("SINK_DURABLE_AFTER=1h") // it confirms nothing
	o.Start()
	o.AwaitState("running")
	harness.Insert(t, conn, "last", 1, "{}")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, written+1)
	o.Set("SINK_DURABLE_AFTER=3s")
	drain()
	said("the outflow that holds the slot")
	o.MustStop(t)
	said("drain publishes itself")
	harness.Must(t, child.Wait())
	said("drained: ")

	// A signal ends it.
	o.Set("SINK_DURABLE_AFTER=1h")
	harness.Insert(t, conn, "last", 2, "{}")
	drain()
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, written+2)
	harness.Must(t, child.Signal(syscall.SIGTERM))
	select {
	case <-child.Done():
	case <-time.After(harness.Patience):
		t.Fatal("drain does not end by a signal")
	}
	said("stopped by a signal (terminated)")
	o.MustBeComplete(conn, ns.URL())
}

// TestDrainWaitsForTransactionsThatAreOpen: what an open transaction or a prepared one has written to the
// table is in no WAL that a slot decodes, and would be left behind. Drain names them, and goes on when they
// have ended, also while another outflow holds the slot.
func TestDrainWaitsForTransactionsThatAreOpen(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, url := harness.Install(
		t,
		pgtest.Own(t, 0, "max_prepared_transactions=5"),
		ns.URL(),
		"drain_open",
		"SINK_DURABLE_AFTER=0s",
	)
	o.Init()
	writer := harness.Connect(t, url)
	insert := func(n int) {
		t.Helper()
		harness.Exec(t, writer, "BEGIN")
		harness.Exec(
			t,
			writer,
			"INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('note', 'ann', $1, '{}')",
			n,
		)
	}
	want := uint64(0)
	for _, held := range []bool{false, true} {
		if held {
			o.Start()
			o.AwaitState("running")
		}
		for _, prepared := range []bool{false, true} {
			want++
			insert(int(want))
			end, names := "COMMIT", "server process"
			if prepared {
				harness.Exec(t, writer, "PREPARE TRANSACTION 'left over'")
				end, names = "COMMIT PREPARED 'left over'", "prepared transaction left over"
			}
			o.MustFail(1, []string{"drain", "--timeout", "5s"}, names)
			harness.Exec(t, writer, end)
			if r := o.Drain(); r.Sequence != want {
				t.Errorf("held %t, prepared %t: %+v, want %d messages", held, prepared, r, want)
			}
		}
	}
	o.MustBeComplete(conn, ns.URL())
}
