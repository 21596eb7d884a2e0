package decoder

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
)

func without(cols []col, names ...string) []col {
	return slices.DeleteFunc(slices.Clone(cols), func(c col) bool { return slices.Contains(names, c.name) })
}

// A row that lacks a mapped column is an event in its place all the same, marked, with what it has. It is
// decided by its own Relation message: not by what came before it in the session.
func TestARowWithoutAMappedColumnIsAnEventInItsPlace(t *testing.T) {
	t.Parallel()
	keyed := append(slices.Clone(columns), col{"seq_key", oidText})
	const id, key = "7f0c6b1e-0c39-4f1e-9a53-1d5c2b8e4a10", "0:00000000000000000017"
	for missing, want := range map[string]relay.Event{
		"":           {Doc: "friendsforever", Actor: "0", Key: key, ID: id},
		"doc_id":     {Actor: "0", Key: key, ID: id, Null: relay.NullDoc},
		"actor_id":   {Doc: "friendsforever", ID: id, Null: relay.NullActor | relay.NullKey},
		"counter":    {Doc: "friendsforever", Actor: "0", ID: id, Null: relay.NullKey},
		"payload":    {Doc: "friendsforever", Actor: "0", Key: key, ID: id, Null: relay.NullPayload},
		"created_at": {Doc: "friendsforever", Actor: "0", Key: key, ID: id},
		"id":         {Doc: "friendsforever", Actor: "0", Key: key, Null: relay.NullID}, // as NULL is
	} {
		for form, before := range map[string][]col{"first": nil, "after a whole one": columns,
			"after a published key": keyed} {
			t.Run(missing+", "+form, func(t *testing.T) {
				t.Parallel()
				cfg := config
				cfg.Extra = []string{"created_at"}
				msgs := [][]byte{begin(0x100)}
				if before != nil {
					msgs = append(msgs, relation(tableOID, before...))
				}
				left := without(columns, missing)
				vals := map[string]val{"id": txt(id), "doc_id": txt("friendsforever"), "actor_id": txt("0"),
					"counter": txt("17"), "payload": txt("[]"), "created_at": txt("2024-05-01 12:00:00+00")}
				var r []val
				for _, c := range left {
					r = append(r, vals[c.name])
				}
				results, err := decodeAll(cfg, append(msgs, relation(tableOID, left...),
					insert(tableOID, r...), commit(0x100, 0x130, 0))...)
				must.Succeed(t, err)
				e := events(results)[0]
				if e.Doc != want.Doc || e.Actor != want.Actor || e.ID != want.ID ||
					e.Null&^(1<<5) != want.Null || e.ExtraNull(0) != (missing == "created_at") {
					t.Errorf("%+v, want %+v", e, want)
				}
				if missing != "actor_id" && missing != "counter" && e.Key != want.Key {
					t.Errorf("key %q, want %q", e.Key, want.Key)
				}
				if bad := missing != "" && missing != "id"; bad != strings.Contains(e.Bad, `"`+missing+`"`) ||
					!bad && e.Bad != "" {
					t.Errorf("bad: %q", e.Bad)
				}
				// Each lacks a key that is mapped, but for the one that has it published.
				described := map[string]int{"first": 1, "after a whole one": 2,
					"after a published key": 1}[form]
				if n := len(slices.DeleteFunc(results, func(r Result) bool {
					return !r.Missing
				})); n != described {
					t.Errorf("%d messages said that a column is missing", n)
				}
			})
		}
	}
}

// A key is computed wherever its parts are there and its column is not, whatever the session has seen.
func TestAMissingKeyIsComputedFromItsParts(t *testing.T) {
	t.Parallel()
	keyed := append(slices.Clone(columns), col{"seq_key", oidText})
	for name, c := range map[string]struct {
		actor, counter, key string
		relations           [][]col
		bad                 bool
		missing             int // descriptions that lack a column
	}{
		"generated, not published":     {"actor_id", "counter", "seq_key", [][]col{columns}, false, 1},
		"without an actor":             {"", "counter", "seq_key", [][]col{columns}, true, 1},
		"without a counter":            {"actor_id", "", "seq_key", [][]col{columns}, true, 1},
		"without both, published":      {"", "", "seq_key", [][]col{keyed}, false, 0},
		"published from some point on": {"actor_id", "counter", "seq_key", [][]col{columns, keyed}, false, 1},
		"published up to some point":   {"actor_id", "counter", "seq_key", [][]col{keyed, columns}, false, 1},
		"taken away":                   {"", "", "seq_key", [][]col{keyed, columns}, true, 1},
		"none at all":                  {"", "", "", [][]col{columns}, false, 0},
		"of its parts only":            {"actor_id", "counter", "", [][]col{columns}, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := config
			cfg.Mapping.Actor, cfg.Mapping.Counter, cfg.Mapping.Key = c.actor, c.counter, c.key
			msgs := [][]byte{begin(0x100)}
			for _, cols := range c.relations {
				msgs = append(msgs, relation(tableOID, cols...))
			}
			vals := []val{txt("i"), txt("d"), txt("a"), txt("1"), txt("[]"), null}
			if len(c.relations[len(c.relations)-1]) == len(keyed) {
				vals = append(vals, txt("k"))
			}
			results, err := decodeAll(cfg,
				append(msgs, insert(tableOID, vals...), commit(0x100, 0x130, 0))...)
			must.Succeed(t, err)
			e := events(results)[0]
			if n := len(slices.DeleteFunc(slices.Clone(results), func(r Result) bool {
				return !r.Missing
			})); n != c.missing {
				t.Errorf("%d messages said that a column is missing, want %d", n, c.missing)
			}
			if bad := strings.Contains(e.Bad, `"seq_key"`); bad != c.bad ||
				bad != (e.Null&relay.NullKey != 0) {
				t.Errorf("%+v", e)
			}
		})
	}
}

// Columns are found by name, in whatever order they are, and again after every Relation message.
func TestColumnsAreFoundByNameWhereverTheyAre(t *testing.T) {
	t.Parallel()
	cfg := config
	cfg.Extra = []string{"event_type"}
	results, err := decodeAll(cfg, begin(0x100),
		relation(tableOID, col{"event_type", oidText}, col{"payload", oidText}, col{"counter", oidInt4},
			col{"actor_id", oidText}, col{"doc_id", oidText}, col{"id", oidInt8}),
		insert(tableOID, txt("edit"), txt("{}"), txt("1"), txt("0"), txt("rustcode"), txt("41")),
		// dropped and added, renamed, of another type
		relation(tableOID, col{"doc_id", oidText}, col{"note", oidText}, col{"id", oidUUID},
			col{"actor_id", oidInt4},
			col{"counter", oidText}, col{"payload", oidBytea}, col{"event_type", oidText}),
		insert(tableOID, txt("rustcode"), txt("a"), txt("42"), txt("0"), txt("2"), txt(`\x7b7d`), null),
		commit(0x100, 0x130, 0))
	must.Succeed(t, err)
	got := events(results)
	for i, want := range []relay.Event{
		{Key: "0:00000000000000000001", ID: "41", Extra: []string{"edit"}},
		{Key: "0:00000000000000000002", ID: "42", Extra: []string{""}},
	} {
		e := got[i]
		if e.Doc != "rustcode" || e.Actor != "0" || e.Key != want.Key || e.ID != want.ID ||
			!slices.Equal(e.Extra, want.Extra) || string(e.Payload) != "{}" || e.ExtraNull(0) != (i == 1) {
			t.Errorf("event %d: %+v", i, e)
		}
	}
}

// One column may have several roles.
func TestOneColumnMayHaveSeveralRoles(t *testing.T) {
	t.Parallel()
	cfg := Config{
		TableOID: tableOID, Slot: "outflow", ID: "counter", Extra: []string{"doc_id", "payload", "doc_id"},
		Mapping: relay.Mapping{Doc: "doc_id", Actor: "doc_id", Key: "counter", Counter: "counter",
			Payload: "payload"},
	}
	results, err := decodeAll(cfg, begin(0x100), relation(tableOID, columns...), row("17", "[1]"),
		commit(0x100, 0x130, 0))
	must.Succeed(t, err)
	e := events(results)[0]
	if e.Doc != "friendsforever" || e.Actor != e.Doc || e.Key != "17" || e.ID != "17" ||
		!slices.Equal(e.Extra, []string{e.Doc, "[1]", e.Doc}) || string(e.Payload) != "[1]" {
		t.Errorf("%+v", e)
	}
}
