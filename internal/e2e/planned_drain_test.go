package e2e

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/drain"
	"github.com/outflowhq/outflow/internal/natstest"
	"github.com/outflowhq/outflow/internal/pgtest"
	"github.com/outflowhq/outflow/internal/process"
)

// long marks a part that only long runs take.
func long(t *testing.T) {
	t.Helper()
	if number(t, "OUTFLOW_TEST_LONG", 0) == 0 {
		t.Skip("only with OUTFLOW_TEST_LONG=1")
	}
}

// drained runs outflow drain, which must succeed, and returns what it found.
func (o *outflow) drained() (r drain.Report) {
	o.t.Helper()
	out, errOut, code := o.exec("drain", "--json", "--timeout", "60s")
	if code != 0 {
		o.t.Fatalf("outflow drain: exit code %d\n%s%s", code, out, errOut)
	}
	must(o.t, json.Unmarshal([]byte(out), &r))
	if !r.Drained {
		o.t.Errorf("outflow drain: exit code 0, but %+v", r)
	}
	return r
}

// TestDrain: drain publishes what waits in a free slot, watches an outflow that holds it, goes on while rows are written, and is a
// program that can be stopped.
func TestDrain(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, url := installation(t, pgtest.Server(t), ns.URL(), "drain")
	o.fails(3, []string{"drain"}, "outflow init")
	o.init()
	if r := o.drained(); r.Sequence != 0 || r.Holder != 0 {
		t.Errorf("nothing written: %+v", r)
	}

	// Nobody holds the slot.
	const ops = 3000
	startLoad(t, url, traces(t, ops), 4, 0, 3).wait(t)
	r := o.drained()
	if r.Sequence != ops || r.Holder != 0 {
		t.Errorf("a free slot: %+v, want %d messages, published by drain", r, ops)
	}
	var confirmed bool
	must(t, conn.QueryRow(t.Context(), "SELECT confirmed_flush_lsn >= $2::pg_lsn AND NOT active FROM pg_replication_slots WHERE slot_name = $1",
		o.slot, r.Goal.String()).Scan(&confirmed))
	if !confirmed {
		t.Errorf("the slot is held, or not confirmed up to %v", r.Goal)
	}

	// An outflow holds it, and rows are written all the time: no end before they stop.
	o.start()
	o.state("running")
	all := traces(t, 2*ops)
	l := startLoad(t, url, all[ops:], 4, 250, 3) // for 12 s
	o.fails(1, []string{"drain", "--timeout", "9s"}, "not drained within 9s", "events were written meanwhile", "are the writers stopped?")
	if n := l.written.Load(); n >= ops {
		t.Errorf("all %d operations were written before drain gave up", n)
	}
	r = o.drained() // the load ends while it waits
	l.wait(t)
	if r.Sequence != 2*ops || r.Holder == 0 || r.Rounds < 2 {
		t.Errorf("under load: %+v, want %d messages, published by the outflow that runs, in several rounds", r, 2*ops)
	}
	out, _, code := o.exec("drain")
	if code != 0 || !strings.Contains(out, "drained: everything up to ") || !strings.Contains(out, "still runs: stop it") {
		t.Errorf("exit code %d\n%s", code, out)
	}

	// That outflow ends in the middle: drain goes on by itself.
	row(t, conn, "last", 1, "{}")
	cmd := exec.Command(binary, "drain")
	cmd.Env = o.env
	log := &syncBuffer{}
	cmd.Stdout, cmd.Stderr = log, log
	o.set("SINK_DURABLE_AFTER=3s")
	cmd.Env = o.env
	child, err := process.Start(cmd, syscall.SIGKILL)
	must(t, err)
	said := func(what string) {
		t.Helper()
		eventually(t, what, func() error {
			if !strings.Contains(log.String(), what) {
				return fmt.Errorf("drain says:\n%s", log)
			}
			return nil
		})
	}
	said("the outflow that holds the slot")
	if code := o.term(); code != 0 {
		t.Errorf("stop: exit code %d", code)
	}
	said("drain publishes itself")
	must(t, child.Wait())
	said("drained: ")

	// A signal ends it.
	o.set("SINK_DURABLE_AFTER=1h")
	row(t, conn, "last", 2, "{}")
	cmd = exec.Command(binary, "drain")
	cmd.Env, cmd.Stdout, cmd.Stderr = o.env, log, log
	child, err = process.Start(cmd, syscall.SIGKILL)
	must(t, err)
	awaitMessages(t, js(t, ns.URL()), o.stream, 2*ops+2)
	must(t, child.Signal(syscall.SIGTERM))
	select {
	case <-child.Done():
	case <-time.After(patience):
		t.Fatal("drain does not end by a signal")
	}
	said("stopped by a signal (terminated)")
	o.mustBeComplete(conn, ns.URL())
}
