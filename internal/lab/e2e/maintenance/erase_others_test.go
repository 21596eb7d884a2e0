package maintenance

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAnErasureWaitsForEachOutflowOfTheTable, and names its stream, which it does not reach: naming its slot
// in retain.other_slots changes nothing, because it would publish what was erased, to another stream. Slots
// of others that are named are not waited for.
func TestAnErasureWaitsForEachOutflowOfTheTable(t *testing.T) {
	t.Parallel()
	natsURL := natstest.Server(t).URL()
	f := harness.NewInstallation(t, pgtest.Server(t), natsURL, "erasing", "SINK_DURABLE_AFTER=0s")
	second := harness.New(t, f.URL, natsURL, "erasing_too", "SINK_DURABLE_AFTER=0s")
	second.UseStream(strings.ToUpper(second.Slot))
	foreign := "debezium_" + f.Slot
	f.Set("RETAIN_OTHER_SLOTS=" + second.Slot + "," + foreign)
	f.Init()
	second.Init()
	harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", foreign)
	f.Start()
	counter := 0
	settle := func() {
		counter++
		harness.Insert(t, f.Conn, "other", counter, "{}")
		f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
	}
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	settle()
	args := []string{"--doc", "gone", "--request", "r", "--yes"}
	harness.Eventually(t, "only the other Outflow is waited for", func() error {
		c, said, code := erase(t, f, args...)
		if code != 1 || !strings.Contains(fmt.Sprint(c.Waiting), "slot "+second.Slot) {
			t.Fatalf("exit code %d: %+v\n%s", code, c, said)
		}
		settle()
		if len(c.Waiting) > 1 {
			return fmt.Errorf("%v", c.Waiting)
		}
		return nil
	})
	second.Start()
	harness.Eventually(t, "the erasure finishes", func() error {
		settle()
		second.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
		c, said, code := erase(t, f, args...)
		if code != 0 || c.Finished == nil {
			return fmt.Errorf("exit code %d: %+v\n%s", code, c, said)
		}
		not := fmt.Sprint(c.NotReached)
		if !strings.Contains(not, "stream "+second.Stream+", to which another") {
			t.Errorf("the stream of the other Outflow is not named: %s", not)
		}
		return nil
	})
	second.MustStop(t)
	f.MustStop(t)
	harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", foreign)
}

// TestAnErasureWaitsForAnOutflowWhoseTableHasAnotherName: its record has the name that the table had before,
// until init is run for it as well.
func TestAnErasureWaitsForAnOutflowWhoseTableHasAnotherName(t *testing.T) {
	t.Parallel()
	natsURL := natstest.Server(t).URL()
	f := harness.NewInstallation(t, pgtest.Server(t), natsURL, "renaming", "SINK_DURABLE_AFTER=0s")
	second := beside(t, f, natsURL)
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	harness.Exec(t, f.Conn, "CREATE SCHEMA notes; ALTER TABLE outbox SET SCHEMA notes; ALTER TABLE "+
		"notes.outbox RENAME TO note_events; CREATE VIEW public.outbox AS SELECT * FROM notes.note_events")
	f.Set("TABLE=notes.note_events")
	f.Init()
	f.Start()
	blocked(t, f, second, "by its record it reads this table")
	second.Set("TABLE=notes.note_events")
	second.Init()
	second.Start()
	finishes(t, f, second)
	second.MustStop(t)
	f.MustStop(t)
}

// TestAnErasureWaitsForAnOutflowWhoseRecordCannotBeRead, as one that a newer build has written.
func TestAnErasureWaitsForAnOutflowWhoseRecordCannotBeRead(t *testing.T) {
	t.Parallel()
	natsURL := natstest.Server(t).URL()
	f := harness.NewInstallation(t, pgtest.Server(t), natsURL, "unread", "SINK_DURABLE_AFTER=0s")
	second := beside(t, f, natsURL)
	restore := rewritten(t, f, second, "v", 99)
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	f.Start()
	blocked(t, f, second, "the checkpoint record has version 99")
	c, _, _ := erase(t, f, "--doc", "gone", "--request", "r")
	if not := fmt.Sprint(c.NotReached); !strings.Contains(not, "stream "+second.Stream+", to which another "+
		"Outflow may publish") {
		t.Errorf("the stream of the other Outflow is not named: %s", not)
	}
	restore()
	second.Start()
	finishes(t, f, second)
	second.MustStop(t)
	f.MustStop(t)
}

// rewritten changes a field of the record of the second, until what it returns is called.
func rewritten(t *testing.T, f *harness.Installation, second *harness.Outflow, field string,
	value any) (restore func()) {
	t.Helper()
	kv, err := f.JS.KeyValue(t.Context(), checkpoint.Bucket(second.Stream))
	harness.Must(t, err)
	was, err := kv.Get(t.Context(), second.Slot)
	harness.Must(t, err)
	doc := map[string]any{}
	harness.Must(t, json.Unmarshal(was.Value(), &doc))
	if _, ok := doc[field]; !ok {
		t.Fatalf("the record has no %s: %s", field, was.Value())
	}
	doc[field] = value
	changed, err := json.Marshal(doc)
	harness.Must(t, err)
	put := func(doc []byte) {
		_, err := kv.Put(t.Context(), second.Slot, doc)
		harness.Must(t, err)
	}
	put(changed)
	return func() { put(was.Value()) }
}

// beside returns a second installation that reads the table of the first, which names its slot among those
// that do not count.
func beside(t *testing.T, f *harness.Installation, natsURL string) *harness.Outflow {
	t.Helper()
	second := harness.New(t, f.URL, natsURL, f.Slot+"_too", "SINK_DURABLE_AFTER=0s")
	second.UseStream(strings.ToUpper(second.Slot))
	f.Set("RETAIN_OTHER_SLOTS=" + second.Slot)
	f.Init()
	second.Init()
	return second
}

// blocked begins the erasure of document gone, until only the other slot is waited for, and says why.
func blocked(t *testing.T, f *harness.Installation, second *harness.Outflow, why string) {
	t.Helper()
	settle(t, f)
	harness.Eventually(t, "only the other Outflow is waited for", func() error {
		c, said, code := erase(t, f, "--doc", "gone", "--request", "r", "--yes")
		waiting := fmt.Sprint(c.Waiting)
		if code != 1 || !strings.Contains(waiting, "slot "+second.Slot) || !strings.Contains(waiting, why) {
			t.Fatalf("exit code %d: %+v\n%s", code, c, said)
		}
		settle(t, f)
		if len(c.Waiting) > 1 {
			return fmt.Errorf("%v", c.Waiting)
		}
		return nil
	})
}

// finishes ends that erasure, while both run.
func finishes(t *testing.T, f *harness.Installation, second *harness.Outflow) {
	t.Helper()
	harness.Eventually(t, "the erasure finishes", func() error {
		settle(t, f)
		second.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
		c, said, code := erase(t, f, "--doc", "gone", "--request", "r", "--yes")
		if code == 0 && c.Finished != nil {
			return nil
		}
		return fmt.Errorf("exit code %d: %+v\n%s", code, c, said)
	})
}
