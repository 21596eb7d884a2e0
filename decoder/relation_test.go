package decoder

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

func without(cols []col, names ...string) []col {
	return slices.DeleteFunc(slices.Clone(cols), func(c col) bool { return slices.Contains(names, c.name) })
}

func TestMissingColumn(t *testing.T) {
	t.Parallel()
	keyed := append(slices.Clone(columns), col{"seq_key", oidText})
	for _, name := range []string{"doc_id", "actor_id", "counter", "payload", "id", "created_at"} {
		for form, all := range map[string][]col{"key computed": columns, "key published": keyed} {
			t.Run(name+", "+form, func(t *testing.T) {
				t.Parallel()
				cfg := config
				cfg.Extra = []string{"created_at"}
				if _, err := decodeAll(cfg, begin(0x100), relation(tableOID, all...)); err != nil {
					t.Fatal(err)
				}
				_, err := decodeAll(cfg, begin(0x16B3748), relation(tableOID, without(all, name)...))
				wantMissing(t, err, name)
			})
		}
	}
}

func wantMissing(t *testing.T, err error, column string) {
	t.Helper()
	f := outbox.FaultOf(err)
	if f == nil || f.Class != outbox.Fatal || f.Code != "column_missing" {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{"public.outbox", `"` + column + `"`, "0/16B3748", "outflow init"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}

func TestMissingKey(t *testing.T) {
	t.Parallel()
	key := col{"seq_key", oidText}
	for name, c := range map[string]struct {
		actor, counter, key string
		relations           [][]col
		missing             string
	}{
		"generated, not published":     {"actor_id", "counter", "seq_key", [][]col{columns}, ""},
		"without an actor":             {"", "counter", "seq_key", [][]col{columns}, "seq_key"},
		"without a counter":            {"actor_id", "", "seq_key", [][]col{columns}, "seq_key"},
		"without both, published":      {"", "", "seq_key", [][]col{append(slices.Clone(columns), key)}, ""},
		"published from some point on": {"actor_id", "counter", "seq_key", [][]col{columns, append(slices.Clone(columns), key)}, ""},
		"taken away":                   {"actor_id", "counter", "seq_key", [][]col{append(slices.Clone(columns), key), columns}, "seq_key"},
		"none at all":                  {"", "", "", [][]col{columns}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := config
			cfg.Mapping.Actor, cfg.Mapping.Counter, cfg.Mapping.Key = c.actor, c.counter, c.key
			msgs := [][]byte{begin(0x16B3748)}
			for _, cols := range c.relations {
				msgs = append(msgs, relation(tableOID, cols...))
			}
			_, err := decodeAll(cfg, msgs...)
			if c.missing != "" {
				wantMissing(t, err, c.missing)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// Columns are found by name, in whatever order they are, and again after every Relation message.
func TestColumnsMove(t *testing.T) {
	t.Parallel()
	cfg := config
	cfg.Extra = []string{"event_type"}
	results, err := decodeAll(cfg, begin(0x100),
		relation(tableOID, col{"event_type", oidText}, col{"payload", oidText}, col{"counter", oidInt4}, col{"actor_id", oidText},
			col{"doc_id", oidText}, col{"id", oidInt8}),
		insert(tableOID, txt("edit"), txt("{}"), txt("1"), txt("0"), txt("rustcode"), txt("41")),
		// dropped and added, renamed, of another type
		relation(tableOID, col{"doc_id", oidText}, col{"note", oidText}, col{"id", oidUUID}, col{"actor_id", oidInt4},
			col{"counter", oidText}, col{"payload", oidBytea}, col{"event_type", oidText}),
		insert(tableOID, txt("rustcode"), txt("a"), txt("42"), txt("0"), txt("2"), txt(`\x7b7d`), null),
		commit(0x100, 0x130, 0))
	if err != nil {
		t.Fatal(err)
	}
	got := events(results)
	for i, want := range []outbox.Event{
		{Key: "0:00000000000000000001", ID: "41", Extra: []string{"edit"}},
		{Key: "0:00000000000000000002", ID: "42", Extra: []string{""}},
	} {
		e := got[i]
		if e.Doc != "rustcode" || e.Actor != "0" || e.Key != want.Key || e.ID != want.ID || !slices.Equal(e.Extra, want.Extra) ||
			string(e.Payload) != "{}" || e.ExtraNull(0) != (i == 1) {
			t.Errorf("event %d: %+v", i, e)
		}
	}
}

// One column may have several roles.
func TestSharedColumns(t *testing.T) {
	t.Parallel()
	cfg := Config{
		TableOID: tableOID, Slot: "outflow", ID: "counter", Extra: []string{"doc_id", "payload", "doc_id"},
		Mapping: outbox.Mapping{Doc: "doc_id", Actor: "doc_id", Key: "counter", Counter: "counter", Payload: "payload"},
	}
	results, err := decodeAll(cfg, begin(0x100), relation(tableOID, columns...), row("17", "[1]"), commit(0x100, 0x130, 0))
	if err != nil {
		t.Fatal(err)
	}
	e := events(results)[0]
	if e.Doc != "friendsforever" || e.Actor != e.Doc || e.Key != "17" || e.ID != "17" ||
		!slices.Equal(e.Extra, []string{e.Doc, "[1]", e.Doc}) || string(e.Payload) != "[1]" {
		t.Errorf("%+v", e)
	}
}
