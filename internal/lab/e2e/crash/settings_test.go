package crash

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestChangedOrderSettingsApplyFromTheirPlaceInTheWAL: other ordering settings in the configuration are
// written into the WAL, once, and rule from there on.
func TestChangedOrderSettingsApplyFromTheirPlaceInTheWAL(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "settings", "REORDER_HORIZON=20ms")
	o.Init()
	o.Start()
	harness.Insert(t, conn, "doc", 1, "{}")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
	o.MustStop(t)
	o.Set("REORDER_HORIZON=0s", "REORDER_SORT=commit", "REORDER_MAX_EVENTS=1000")
	o.Start()
	harness.Eventually(t, "the change has been read", func() error {
		if !strings.Contains(o.Said(), "ordering settings changed in the WAL") {
			return fmt.Errorf("log: %s", o.Said())
		}
		return nil
	})
	harness.Insert(t, conn, "doc", 2, "{}")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 2)
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
	if h := all[0].Outflow; h.Sort != oracle.BySeqKey || h.Thru == h.Pos.LSN {
		t.Errorf("before the change: %v, want sort s and a window closed by a later input", &h)
	}
	if h := all[1].Outflow; h.Sort != oracle.ByCommit || h.Due != h.Pos.LSN || h.Thru != h.Pos.LSN {
		t.Errorf("after the change: %v, want sort c and a window of the transaction alone", &h)
	}
	if n := strings.Count(o.Said(), "wrote a change"); n != 1 {
		t.Errorf("%d changes written, want 1", n)
	}
	o.MustStop(t)
	// The same settings again: nothing to write, and the checkpoint says what is in force.
	o.Start()
	o.AwaitState("running")
	harness.Insert(t, conn, "doc", 3, "{}")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 3)
	if strings.Contains(o.Said(), "wrote a change") {
		t.Error("a change was written although nothing changed")
	}
	want := relay.Settings{Sort: outbox.ByCommit, MaxEvents: 1000, MaxBytes: relay.DefaultMaxBytes}
	if got := o.Status().Checkpoint.Settings; got != want {
		t.Errorf("settings in the newest checkpoint: %v, want %v", got, want)
	}
	o.MustBeComplete(conn, ns.URL())
}

// TestKillsAcrossChangesOfSettingsLeaveEqualStreams is claim C3 across changes of the ordering settings: they
// are in the WAL, at one place for both outflows, so the one that is killed again and again makes the same
// stream as the one that is not.
func TestKillsAcrossChangesOfSettingsLeaveEqualStreams(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ops := harness.EnvInt(t, "OUTFLOW_TEST_OPS", 12_000)
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 5))
	pg := pgtest.Own(t, 0)
	url, err := pg.CreateDatabase(t.Context(), "traces")
	harness.Must(t, err)
	ns, twinNATS := natstest.Process(t), natstest.Process(t)
	victim, twin := harness.New(t, url, ns.URL(), "victim"), harness.New(t, url, twinNATS.URL(), "twin")
	both := []*harness.Outflow{victim, twin}
	for _, o := range both {
		o.Init()
		o.Start()
	}
	l := harness.StartLoad(t, url, harness.RecordedOps(t, ops), 8, 2500, seed)
	conn := harness.Connect(t, url)
	kills := func() {
		for range 3 {
			// when it is killed is random
			time.Sleep(time.Duration(rnd.Int64N(int64(600 * time.Millisecond))))
			victim.Kill()
			victim.Start()
		}
	}
	for _, s := range []relay.Settings{
		{Horizon: 0, Sort: outbox.ByCommit, MaxEvents: 500, MaxBytes: 1 << 20},
		{Horizon: 50 * time.Millisecond, Sort: outbox.ByCommit, MaxEvents: relay.DefaultMaxEvents,
			MaxBytes: relay.DefaultMaxBytes},
	} {
		kills()
		victim.Kill() // one in disorder, one in order
		twin.MustStop(t)
		harness.Exec(t, conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', $1), "+
			"pg_logical_emit_message(true, 'outflow.settings', $2)",
			s.Content("victim"), s.Content("twin"))
		for _, o := range both {
			o.Set("REORDER_HORIZON="+s.Horizon.String(), "REORDER_SORT="+s.Sort.String(),
				fmt.Sprint("REORDER_MAX_EVENTS=", s.MaxEvents), fmt.Sprint("REORDER_MAX_BYTES=", s.MaxBytes))
			o.Start()
		}
	}
	kills()
	l.Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), victim.Stream, ops)
	harness.AwaitMessages(t, harness.JetStream(t, twinNATS.URL()), twin.Stream, ops)
	harness.CompareStreams(t, url, ns.URL(), twinNATS.URL(), victim.Stream, 0)
	for _, o := range both {
		if strings.Contains(o.Log.String(), "wrote a change") {
			t.Errorf("%s wrote a change of its own: the comparison says nothing then", o.Slot)
		}
	}
	sorts := map[oracle.Sort]int{}
	for _, m := range harness.Messages(t, harness.JetStream(t, ns.URL()), victim.Stream) {
		sorts[m.Outflow.Sort]++
	}
	if len(sorts) != 2 {
		t.Errorf("messages by sort rule: %v, want both", sorts)
	}
}
