package e2e

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/internal/operate/drain"
)

// drained runs outflow drain, which must succeed, and returns what it found.
func (o *outflow) drained() (r drain.Report) {
	o.t.Helper()
	out, errOut, code := o.exec("drain", "--json", "--timeout", patience.String())
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
	left(t, conn, o.slot)
	var confirmed bool
	must(t, conn.QueryRow(t.Context(), "SELECT confirmed_flush_lsn >= $2::pg_lsn AND NOT active FROM pg_replication_slots WHERE slot_name = $1",
		o.slot, r.Goal.String()).Scan(&confirmed))
	if !confirmed {
		t.Errorf("the slot is held, or not confirmed up to %v", r.Goal)
	}

	// An outflow holds it, and rows are written all the time: no end before they stop.
	o.start()
	o.state("running")
	l := startEndlessLoad(t, url, traces(t, 2*ops)[ops:], 4, 250, 3)
	eventually(t, "drain gives up", func() error { // in the middle of a round, sooner or later
		out, errOut, code := o.exec("drain", "--timeout", "9s")
		if code != 1 { // the writers may have stood still for as long as it looked
			return fmt.Errorf("outflow drain: exit code %d while rows are written\n%s%s", code, out, errOut)
		}
		for _, says := range []string{"not drained within 9s", "events were written meanwhile", "are the writers stopped?"} {
			if !strings.Contains(errOut, says) {
				return fmt.Errorf("it does not say %q: %s", says, errOut)
			}
		}
		return nil
	})
	log := &syncBuffer{}
	drain := func() *process.Process {
		t.Helper()
		log.Reset()
		cmd := exec.Command(program(o.env), "drain")
		cmd.Env, cmd.Stdout, cmd.Stderr = o.env, log, log
		child, err := process.Start(cmd, syscall.SIGKILL)
		must(t, err)
		return child
	}
	said := func(what string) {
		t.Helper()
		eventually(t, what, func() error {
			if !strings.Contains(log.String(), what) {
				return fmt.Errorf("drain says:\n%s", log)
			}
			return nil
		})
	}
	child := drain()
	eventually(t, "drain begins another round", func() error {
		if strings.Contains(log.String(), "events were written meanwhile") {
			return nil
		}
		if !child.Running() {
			child = drain()
		}
		return fmt.Errorf("drain says:\n%s", log)
	})
	l.ending.Store(true) // while it waits
	l.wait(t)
	must(t, child.Wait())
	said("drained: everything up to ")
	said("still runs: stop it")
	written := ops + int(l.written.Load())
	if r = o.drained(); r.Sequence != uint64(written) || r.Holder == 0 {
		t.Errorf("under load: %+v, want %d messages, published by the outflow that runs", r, written)
	}

	// That outflow ends in the middle: drain goes on by itself.
	if code := o.term(); code != 0 {
		t.Errorf("stop: exit code %d", code)
	}
	o.set("SINK_DURABLE_AFTER=1h") // it confirms nothing
	o.start()
	o.state("running")
	row(t, conn, "last", 1, "{}")
	awaitMessages(t, js(t, ns.URL()), o.stream, written+1)
	o.set("SINK_DURABLE_AFTER=3s")
	child = drain()
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
	child = drain()
	awaitMessages(t, js(t, ns.URL()), o.stream, written+2)
	must(t, child.Signal(syscall.SIGTERM))
	select {
	case <-child.Done():
	case <-time.After(patience):
		t.Fatal("drain does not end by a signal")
	}
	said("stopped by a signal (terminated)")
	o.mustBeComplete(conn, ns.URL())
}
