package repair

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestARepairWithoutATableNamesWhatCannotComeBack: a gap that only a table could close is said to be one, and
// is passed only by who accepts in words that events are lost; a gap that needs no table is closed. With both
// sources the rows come back. A loss counts only when a recheck, 5 s later, agrees: so both sources do
// each step at the same time.
func TestARepairWithoutATableNamesWhatCannotComeBack(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	type lossy struct {
		*harness.Installation
		source             string
		want, missing      int // messages, rows
		record, look, done *harness.RunningRepair
		refused            []*harness.RunningRepair
		state              string
	}
	all := []*lossy{{source: "message"}, {source: "both"}}
	for _, l := range all {
		l.Installation = harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "lossy", "SOURCE="+l.source,
			"REORDER_HORIZON=0s")
		l.Init()
		l.Start()
		harness.EmitAll(t, l.Conn, harness.EventContent("a", "x", 1, "1"),
			harness.EventContent("a", "x", 2, "2"))
		l.want = 2
		if l.source == "both" {
			harness.Insert(t, l.Conn, "r", 1, "1")
			l.want++
		}
		harness.AwaitMessages(t, l.JS, l.Stream, l.want)
		l.MustStop(t)
		l.DeleteRecord(t)
		l.record = l.StartRepair("--accept", "record_missing")
	}
	for _, l := range all {
		if r, stderr, code := l.record.Wait(); code != 0 || r.Mode != "record" || !r.Repaired {
			t.Fatalf("%s: exit code %d, %+v: %s", l.source, code, r, stderr)
		}
		l.Start()
		harness.EmitAll(t, l.Conn, harness.EventContent("a", "x", 3, "3"))
		l.want++
		harness.AwaitMessages(t, l.JS, l.Stream, l.want)
		l.MustStop(t)
		l.DropSlot(t)
		harness.EmitAll(t, l.Conn, harness.EventContent("lost", "x", 1, "1"))
		if l.source == "both" {
			harness.Insert(t, l.Conn, "found", 1, "1")
			l.missing++
		}
		l.state = state(l.Installation, t)
		l.look = l.StartRepair()
		for _, words := range []string{"", "yes"} {
			l.refused = append(l.refused, l.StartRepair("--accept", "slot_missing", "--accept-loss", words))
		}
		l.Start()
	}
	for _, l := range all {
		l.MustEnd(4, "outflow repair", "can't be brought back")
		if r, stderr, code := l.look.Wait(); code != 4 || r.Mode != "new-slot" || r.Missing != l.missing ||
			!strings.HasSuffix(r.Command, "--accept slot_missing --accept-loss 'message events'") {
			t.Errorf("%s: exit code %d, %+v: %s", l.source, code, r, stderr)
		}
		for _, refused := range l.refused {
			if _, stderr, code := refused.Wait(); code != 2 || !strings.Contains(stderr, "source is "+
				l.source) || !strings.Contains(stderr, "--accept-loss 'message events'") {
				t.Errorf("%s: exit code %d: %s", l.source, code, stderr)
			}
		}
		if now := state(l.Installation, t); now != l.state {
			t.Errorf("%s: something was changed: %s, was %s", l.source, now, l.state)
		}
		l.done = l.StartRepair("--accept", "slot_missing", "--accept-loss", "message events")
	}
	for _, l := range all {
		if r, stderr, code := l.done.Wait(); code != 0 || !r.Repaired || r.Published != l.missing {
			t.Fatalf("%s: exit code %d, %+v: %s", l.source, code, r, stderr)
		}
		l.Start()
		harness.EmitAll(t, l.Conn, harness.EventContent("a", "x", 4, "4"))
		l.want += l.missing + 1
		harness.AwaitMessages(t, l.JS, l.Stream, l.want)
		if all := harness.Messages(t, l.JS, l.Stream); len(all) != l.want ||
			all[l.want-1].Outflow.ID != "m-a-x-4" {
			t.Errorf("%s: %d messages, want %d; the last one is %s", l.source, len(all), l.want,
				all[len(all)-1].Outflow.ID)
		}
	}
}
