package reorder

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The decoder reads counters in every mode; the buffer knows which one is in force.
func TestOnlyGapModeUsesCounters(t *testing.T) {
	t.Parallel()
	horizon := relay.Settings{MaxEvents: 10, MaxBytes: 1 << 20}
	gap := horizon
	gap.Sort, gap.Gap = outbox.ByGap, relay.Gap{Bound: 1e9, Memory: 1}
	placed, unusable, null := outbox.Counter{First: 5,
		Span: 1}, outbox.Counter{First: relay.CounterNoInteger},
		outbox.Counter{}
	for _, c := range []struct {
		set       relay.Settings
		counter   outbox.Counter
		bad       string
		want      outbox.Counter
		spoilt    bool
		spoiltFor string
	}{
		{set: horizon, counter: placed},
		{set: horizon, counter: unusable},
		{set: gap, counter: placed, want: placed},
		{set: gap, counter: null},
		{set: gap, counter: unusable, want: unusable, spoilt: true},
		{set: gap, counter: unusable, want: unusable, bad: "payload", spoilt: true, spoiltFor: "payload"},
	} {
		e := relay.Event{Doc: "d", Counter: c.counter, Bad: c.bad}
		must.Succeed(t, New(Config{Settings: c.set}).Append(&e))
		if e.Counter != c.want || (e.Bad != "") != c.spoilt || c.spoiltFor != "" && e.Bad != c.spoiltFor {
			t.Errorf("%v, %+v: %+v, bad %q", c.set, c.counter, e.Counter, e.Bad)
		}
	}
}
