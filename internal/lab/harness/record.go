package harness

import (
	"encoding/json"
	"testing"
)

// EditRecord changes the checkpoint record behind the back of an outflow that does not run.
func EditRecord(t *testing.T, f *Installation, edit func(record map[string]any)) {
	t.Helper()
	kv, err := f.JS.KeyValue(t.Context(), "outflow-"+f.Stream)
	Must(t, err)
	entry, err := kv.Get(t.Context(), f.Slot)
	Must(t, err)
	var record map[string]any
	Must(t, json.Unmarshal(entry.Value(), &record))
	edit(record)
	value, err := json.Marshal(record)
	Must(t, err)
	_, err = kv.Put(t.Context(), f.Slot, value)
	Must(t, err)
}

// BeforeTheFirstCheckpoint is the record between the decision to make the slot and the first checkpoint.
func BeforeTheFirstCheckpoint(record map[string]any) {
	record["creating"] = true
	delete(record, "places")
}

func (f *Installation) DropSlot(t *testing.T) {
	t.Helper()
	Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", f.Slot)
}

func (f *Installation) DeleteRecord(t *testing.T) {
	t.Helper()
	kv, err := f.JS.KeyValue(t.Context(), "outflow-"+f.Stream)
	Must(t, err)
	Must(t, kv.Delete(t.Context(), f.Slot))
}
