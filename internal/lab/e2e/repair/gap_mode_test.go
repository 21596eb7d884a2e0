package repair

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// inGapMode never gives a missing counter up while a test runs: what waits for one that does not come,
// because something wrong is remembered, never becomes complete.
var inGapMode = []string{"REORDER_MODE=gap", "REORDER_BOUND=1h", "SINK_DURABLE_AFTER=1s"}

// The document that has events held back: all but the counter after the first ones, which is still to come.
const (
	heldDoc = "doc0"
	filling = before/4 + 1 // the counter that is missing
	held    = 2            // how many wait for it
)

// gapModeCase is a set-up of gap mode that holds events back and lost something.
type gapModeCase struct {
	name, code string
	damage     func(t *testing.T, f *harness.Installation)
	accept     []string
	mode       string
	missing    int  // -1: any number, or not compared
	fromWAL    bool // the held events come from the WAL, behind the one that they wait for
	removed    bool // messages were removed that nobody publishes again
}

var gapModeCases = []gapModeCase{
	{name: "slot dropped", code: "slot_missing", mode: "new-slot", missing: held + meanwhile,
		damage: func(t *testing.T, f *harness.Installation) { f.DropSlot(t) }},
	{name: "slot moved", code: "slot_ahead", mode: "keep", missing: held + meanwhile,
		damage: func(t *testing.T, f *harness.Installation) {
			loseDense(f, t)
			harness.Exec(t, f.Conn, "SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", f.Slot)
		}},
	{name: "table out of the publication", code: "publication_changed", mode: "keep", missing: meanwhile,
		fromWAL: true,
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" DROP TABLE outbox")
			loseDense(f, t)
			harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" ADD TABLE outbox")
		}},
	{name: "stranger at the end", code: "foreign_message", mode: "keep", fromWAL: true,
		damage: func(t *testing.T, f *harness.Installation) {
			_, err := f.JS.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
			harness.Must(t, err)
		}},
	{name: "record deleted", code: "record_missing", mode: "new-slot", missing: held + meanwhile,
		accept: []string{"--new-slot"},
		damage: func(t *testing.T, f *harness.Installation) { f.DeleteRecord(t) }},
	{name: "stream missing", code: "stream_missing", mode: "keep", missing: -1, fromWAL: true,
		damage: func(t *testing.T, f *harness.Installation) {
			newestOnly(t, f)
			harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
		}},
	{name: "messages removed", code: "memory_lost", mode: "record", missing: -1, fromWAL: true, removed: true,
		damage: func(t *testing.T, f *harness.Installation) { purge(t, f, jetstream.WithPurgeKeep(5)) }},
	{name: "all messages removed", code: "memory_lost", mode: "record", missing: -1, fromWAL: true,
		removed: true, damage: func(t *testing.T, f *harness.Installation) { purge(t, f) }},
}

// newestOnly takes the older checkpoints out of the record, as if they were confirmed: from the first one
// everything would be made again, and nothing has to be remembered there.
func newestOnly(t *testing.T, f *harness.Installation) {
	t.Helper()
	harness.EditRecord(t, f, func(rec map[string]any) {
		places := rec["places"].([]any)
		rec["places"] = places[len(places)-1:]
	})
}

func purge(t *testing.T, f *harness.Installation, how ...jetstream.StreamPurgeOpt) {
	t.Helper()
	newestOnly(t, f)
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, s.Purge(t.Context(), how...))
}

// loseDense writes rows of a sequence of their own that no slot will bring.
func loseDense(f *harness.Installation, t *testing.T) {
	t.Helper()
	for i := range meanwhile {
		harness.Insert(t, f.Conn, "lost", i+1, "{}")
	}
}

// holding is an installation in gap mode that runs, has published its first rows, and holds events back.
func holding(t *testing.T, natsURL, slot string) *harness.Installation {
	t.Helper()
	f := harness.NewInstallation(t, pgtest.Server(t), natsURL, slot, inGapMode...)
	f.Init()
	f.Start()
	harness.Exec(t, f.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'doc' || i % 4, 'anna', i / 4 + 1, '{"n": 1}' FROM generate_series(0, $1::int - 1) i`, before)
	for i := range held {
		harness.Insert(t, f.Conn, heldDoc, filling+1+i, "{}")
	}
	return f
}

// awaitHolds waits until a checkpoint holds events back.
func awaitHolds(t *testing.T, f *harness.Installation) {
	t.Helper()
	harness.AwaitMessages(t, f.JS, f.Stream, before)
	harness.Eventually(t, "a checkpoint holds events back", func() error {
		kv, err := f.JS.KeyValue(t.Context(), "outflow-"+f.Stream)
		if err != nil {
			return err
		}
		e, err := kv.Get(t.Context(), f.Slot)
		if err != nil {
			return err
		}
		rec, err := checkpoint.Decode(e.Value())
		if err != nil {
			return err
		}
		if p := rec.Checkpoints; len(p[len(p)-1].Holds) == 0 {
			err = fmt.Errorf("%s", e.Value())
		}
		return err
	})
}

// fill writes the event that others wait for, and those that follow in the sequences.
func fill(t *testing.T, f *harness.Installation) {
	t.Helper()
	harness.Insert(t, f.Conn, heldDoc, filling, "{}")
	harness.Insert(t, f.Conn, heldDoc, filling+held+1, "{}")
	harness.Insert(t, f.Conn, "doc1", filling, "{}")
	harness.Insert(t, f.Conn, "doc1", filling+1, "{}")
}

// counters are the counters of the stream's messages of a document, a late one as a negative number, without
// the stranger's.
func counters(t *testing.T, f *harness.Installation, doc string) (all []int64) {
	t.Helper()
	for _, m := range harness.Messages(t, f.JS, f.Stream) {
		h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
		harness.Must(t, err)
		if c := h.Counter; c.Sequence == outbox.SequenceOf(doc, "anna") && c.Span > 0 {
			if c.Late {
				c.First = -c.First
			}
			all = append(all, c.First)
		}
	}
	return all
}

// TestARepairInGapModeKeepsWhatIsHeldBackAndRemembered: after each loss the stream has each row once, the
// events that are held back too, and whatever follows in a sequence is published at once, because it is known
// what precedes it.
func TestARepairInGapModeKeepsWhatIsHeldBackAndRemembered(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns, cases := natstest.Server(t), harness.Part(3, gapModeCases)
	broken := make([]*harness.Installation, len(cases))
	for i := range cases {
		broken[i] = holding(t, ns.URL(), "gapmode")
	}
	for i, g := range cases {
		f := broken[i]
		awaitHolds(t, f)
		f.MustStop(t)
		harness.AwaitSlotFree(t, f.Conn, f.Slot)
		g.damage(t, f)
		for i := range meanwhile {
			harness.Insert(t, f.Conn, "meanwhile", i+1, "{}")
		}
		f.Start()
	}
	repairs := make([]*harness.RunningRepair, len(cases))
	for i, g := range cases {
		f := broken[i]
		f.MustEndInGap(g.code)
		f.AwaitHealth(g.code)
		if len(g.accept) > 0 {
			f.MustFailInGap(g.code, "repair", "--accept", g.code)
		}
		repairs[i] = f.StartRepair(append([]string{"--accept", g.code}, g.accept...)...)
	}
	for i, g := range cases {
		t.Run(g.name, func(t *testing.T) {
			f := broken[i]
			f.T = t
			r, stderr, code := repairs[i].Wait()
			if code != 0 || !r.Repaired || r.Mode != g.mode || g.missing >= 0 && r.Published != g.missing {
				t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
			}
			f.Start()
			f.AwaitReady()
			fill(t, f)
			var stranger uint64
			if g.code == "foreign_message" {
				stranger = before + 1
			}
			if g.removed {
				awaitCounters(t, f, "doc1", filling+1)
				awaitCounters(t, f, heldDoc, filling+held+1)
			} else {
				f.AwaitComplete(t, ns.URL(), stranger)
			}
			var want []int64
			for c := range int64(filling - 1) {
				want = append(want, c+1)
			}
			if g.fromWAL {
				want = append(want, filling, filling+1, filling+2)
			} else {
				want = append(want, filling+1, filling+2, -filling)
			}
			want = append(want, filling+3)
			got := counters(t, f, heldDoc)
			if g.removed && len(got) >= held+2 {
				want = want[len(want)-len(got):]
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s has %v, want %v", heldDoc, got, want)
			}
			f.MustStop(t)
		})
	}
}

// awaitCounters waits until a document's last message has a counter.
func awaitCounters(t *testing.T, f *harness.Installation, doc string, last int64) {
	t.Helper()
	harness.Eventually(t, "the last counter of "+doc, func() error {
		all := counters(t, f, doc)
		if len(all) == 0 || all[len(all)-1] != last {
			return fmt.Errorf("%v", all)
		}
		return nil
	})
}

// TestDrainAndInitWaitForWhatGapModeHoldsBack: what is held back is not drained, and the mapping does not
// change below it. A mapping with other counters begins without anything remembered.
func TestDrainAndInitWaitForWhatGapModeHoldsBack(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := holding(t, ns.URL(), "gapdrain")
	awaitHolds(t, f)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	stdout, stderr, code := f.Run("drain", "--timeout", "8s")
	if code != 1 || !strings.Contains(stdout+stderr, "1 sequences are held back") {
		t.Errorf("drain: exit code %d, %s%s", code, stdout, stderr)
	}
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	harness.Exec(t, f.Conn, "ALTER TABLE outbox ADD COLUMN span int")
	f.Set("COLUMNS_SPAN=span")
	f.MustFail(3, []string{"init"}, "cannot be changed yet", "outflow drain")
	f.Set("COLUMNS_SPAN=")
	stdout = f.MustRun("inspect")
	if !strings.Contains(stdout, fmt.Sprintf("%d events", held)) {
		t.Errorf("inspect does not show %d held events:\n%s", held, stdout)
	}
	fill(t, f)
	f.Drain()
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.Set("COLUMNS_SPAN=span")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc1", filling+7, "{}") // nothing is known of what precedes it
	f.AwaitComplete(t, ns.URL(), 0)
	f.MustStop(t)
}

// TestASnapshotInGapModeIsRemembered: what a snapshot published is known, so that what it lacked comes late,
// at once, and what follows it goes on.
func TestASnapshotInGapModeIsRemembered(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "gapsnap", inGapMode...)
	harness.Exec(t, f.Conn, harness.GeneratedKey)
	for _, c := range []int{1, 2, 4, 5} {
		harness.Insert(t, f.Conn, heldDoc, c, "{}")
	}
	if r := f.MustSnapshot(); r.Published != 4 {
		t.Errorf("%+v", r)
	}
	f.Start()
	f.AwaitReady()
	harness.Insert(t, f.Conn, heldDoc, 6, "{}")
	harness.Insert(t, f.Conn, heldDoc, 3, "{}")
	f.AwaitComplete(t, ns.URL(), 0)
	f.Kill()
	f.Wait()
	f.Start()
	harness.Insert(t, f.Conn, heldDoc, 7, "{}")
	f.AwaitComplete(t, ns.URL(), 0)
	if got, want := fmt.Sprint(counters(t, f, heldDoc)), "[1 2 4 5 6 -3 7]"; got != want {
		t.Errorf("the stream has %v, want %v", got, want)
	}
	f.MustStop(t)
}
