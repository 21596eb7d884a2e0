package oracle

import "testing"

// Parts of a truth are those of the outflows that have them: together they have each event once, each with a
// stream of its own.
func TestPartsOfATruthHaveEachEventOnce(t *testing.T) {
	t.Parallel()
	truth := script(t, Source{}, append(eight[:len(eight):len(eight)], "insert e9 other ann 3;insert e10 "+
		"doc ann 5;message outflow.tick x")...)
	cfg := Config{Settings: Settings{0, BySeqKey, 100, 1 << 20, Gap{}}}
	for doc, want := range map[string]struct{ events, commits int }{"doc": {7, 5}, "other": {3, 2},
		"none": {0, 1}} {
		part := truth.Only(func(e *Event) bool { return e.Doc == doc })
		if part.Events != want.events || len(part.commits) != want.commits {
			t.Errorf("%s: %d events in %d transactions, want %+v", doc, part.Events, len(part.commits), want)
		}
		all := stream(t, part, cfg)
		if j := judgeOf(t, part, cfg, all, 0); !j.OK() || j.Published != want.events {
			t.Errorf("%s: %s", doc, j.String())
		}
		if j := judgeOf(t, truth, cfg, all, 0); j.OK() {
			t.Errorf("%s is taken for the whole", doc)
		}
	}
	if e := truth.commits[len(truth.commits)-1].events[1]; e.Pos.Index != 1 {
		t.Errorf("the whole was changed: %v", e)
	}
}
