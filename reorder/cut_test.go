package reorder

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// A cut that does not come where it belongs would make another stream than the WAL and the cuts do. So would
// an input that comes too late for it.
func TestACutThatIsNotNextIsRefused(t *testing.T) {
	t.Parallel()
	gap := Config{Settings: relay.Settings{Sort: outbox.ByGap, MaxEvents: 100, MaxBytes: 1 << 20,
		Gap: relay.Gap{Bound: 1e9, Memory: 10, First: 1}}, Start: 0x1E0, Due: 0x300,
		Holds: []relay.Hold{{Sequence: 1, Base: 1, Oldest: outbox.Position{LSN: 0x200}}}}
	horizon := Config{Settings: relay.Settings{Horizon: 1e9, MaxEvents: 100, MaxBytes: 1 << 20}}
	at := func(kind relay.Kind, lsn outbox.LSN) input {
		in := input{commit: relay.Commit{Kind: kind, LSN: lsn}}
		if kind == relay.Events {
			in.events, in.commit.Events = []relay.Event{{Doc: "note", Actor: "ana", Key: "1"}}, 1
		}
		return in
	}
	one, two, cut := at(relay.Events, 0x100), at(relay.Events, 0x200), at(aCut, 0x180)
	for name, c := range map[string]struct {
		cfg    Config
		inputs []input
		within bool // an event of the next transaction was read
		last   input
		says   string
	}{
		"below an input":       {horizon, []input{one, two}, false, at(aCut, 0x1FF), errCut.Error()},
		"below a cut":          {horizon, []input{one, cut}, false, at(aCut, 0x100), errCut.Error()},
		"within a transaction": {horizon, []input{one}, true, cut, errCut.Error()},
		"an input at a cut":    {horizon, []input{at(aCut, 0x100)}, false, one, errBack.Error()},
		"below what is held":   {gap, []input{at(aCut, 0x1FF)}, false, at(aCut, 0x200), errCutDue.Error()},
		"before what is held":  {gap, nil, false, at(aCut, 0x300), "does not send again"},
	} {
		b := New(c.cfg)
		for _, in := range c.inputs {
			if _, err := feed(b, in); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		if c.within {
			if err := b.Append(&at(relay.Events, 0).events[0]); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := feed(b, c.last); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
		if _, again := b.Cut(0x1000); again == nil {
			t.Errorf("%s: the buffer goes on", name)
		}
	}
}
