package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestSettingsChange: other ordering settings in the configuration are written into the WAL, once, and rule from there on.
func TestSettingsChange(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "settings", "REORDER_HORIZON=20ms")
	o.init()
	o.start()
	row(t, conn, "doc", 1, "{}")
	awaitMessages(t, js(t, ns.URL()), o.stream, 1)
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	o.set("REORDER_HORIZON=0s", "REORDER_SORT=commit", "REORDER_MAX_EVENTS=1000")
	o.log.Reset()
	o.start()
	eventually(t, "the change has been read", func() error {
		if !strings.Contains(o.log.String(), "ordering settings changed in the WAL") {
			return fmt.Errorf("log: %s", o.log.String())
		}
		return nil
	})
	row(t, conn, "doc", 2, "{}")
	awaitMessages(t, js(t, ns.URL()), o.stream, 2)
	all := messages(t, js(t, ns.URL()), o.stream)
	if h := all[0].Outflow; h.Sort != oracle.BySeqKey || h.Thru == h.Pos.LSN {
		t.Errorf("before the change: %v, want sort s and a window closed by a later input", &h)
	}
	if h := all[1].Outflow; h.Sort != oracle.ByCommit || h.Due != h.Pos.LSN || h.Thru != h.Pos.LSN {
		t.Errorf("after the change: %v, want sort c and a window of the transaction alone", &h)
	}
	if n := strings.Count(o.log.String(), "wrote a change"); n != 1 {
		t.Errorf("%d changes written, want 1", n)
	}
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	// The same settings again: nothing to write, and the place says what is in force.
	o.log.Reset()
	o.start()
	o.state("running")
	row(t, conn, "doc", 3, "{}")
	awaitMessages(t, js(t, ns.URL()), o.stream, 3)
	if strings.Contains(o.log.String(), "wrote a change") {
		t.Error("a change was written although nothing changed")
	}
	out, _, _ := o.exec("status", "--json")
	var report struct{ Place relay.Checkpoint }
	must(t, json.Unmarshal([]byte(out), &report))
	want := relay.Settings{Sort: outbox.ByCommit, MaxEvents: 1000, MaxBytes: relay.DefaultMaxBytes}
	if report.Place.Settings != want {
		t.Errorf("settings in the newest place: %v, want %v", report.Place.Settings, want)
	}
	o.mustBeComplete(conn, ns.URL())
}

// TestKillsAcrossSettings is claim C3 across changes of the ordering settings: they are in the WAL, at one place for both outflows,
// so the one that is killed again and again makes the same stream as the one that is not.
func TestKillsAcrossSettings(t *testing.T) {
	slow(t)
	t.Parallel()
	ops := number(t, "OUTFLOW_TEST_OPS", 12_000)
	seed := uint64(number(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 5))
	pg := pgtest.Own(t, 0)
	url, err := pg.CreateDatabase(t.Context(), "traces")
	must(t, err)
	ns, twinNATS := natstest.Process(t), natstest.Process(t)
	victim, twin := newOutflow(t, url, ns.URL(), "victim"), newOutflow(t, url, twinNATS.URL(), "twin")
	both := []*outflow{victim, twin}
	for _, o := range both {
		o.init()
		o.start()
	}
	l := startLoad(t, url, traces(t, ops), 8, 2500, seed)
	conn := db(t, url)
	kills := func() {
		for range 3 {
			time.Sleep(time.Duration(rnd.Int64N(int64(600 * time.Millisecond)))) // when it is killed is random
			victim.kill()
			victim.start()
		}
	}
	for _, s := range []relay.Settings{
		{Horizon: 0, Sort: outbox.ByCommit, MaxEvents: 500, MaxBytes: 1 << 20},
		{Horizon: 50 * time.Millisecond, Sort: outbox.ByCommit, MaxEvents: relay.DefaultMaxEvents, MaxBytes: relay.DefaultMaxBytes},
	} {
		kills()
		victim.kill() // one in disorder, one in order
		if code := twin.term(); code != 0 {
			t.Fatalf("stop: exit code %d", code)
		}
		mustExec(t, conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', $1), pg_logical_emit_message(true, 'outflow.settings', $2)",
			s.Content("victim"), s.Content("twin"))
		for _, o := range both {
			o.set("REORDER_HORIZON="+s.Horizon.String(), "REORDER_SORT="+s.Sort.String(), fmt.Sprint("REORDER_MAX_EVENTS=", s.MaxEvents),
				fmt.Sprint("REORDER_MAX_BYTES=", s.MaxBytes))
			o.start()
		}
	}
	kills()
	l.wait(t)
	awaitMessages(t, js(t, ns.URL()), victim.stream, ops)
	awaitMessages(t, js(t, twinNATS.URL()), twin.stream, ops)
	compareTwins(t, url, ns.URL(), twinNATS.URL(), victim.stream, 0)
	for _, o := range both {
		if strings.Contains(o.log.String(), "wrote a change") {
			t.Errorf("%s wrote a change of its own: the comparison says nothing then", o.slot)
		}
	}
	sorts := map[oracle.Sort]int{}
	for _, m := range messages(t, js(t, ns.URL()), victim.stream) {
		sorts[m.Outflow.Sort]++
	}
	if len(sorts) != 2 {
		t.Errorf("messages by sort rule: %v, want both", sorts)
	}
}
