package decoder

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func settingsOf(horizon time.Duration) relay.Settings {
	return relay.Settings{Horizon: horizon, Sort: outbox.ByCommit, MaxEvents: 512, MaxBytes: 1 << 20}
}

// gap are settings of gap mode, which only version 2 of a change can say.
var gap = relay.Settings{Sort: outbox.ByGap, MaxEvents: 512, MaxBytes: 1 << 20, Gap: relay.Gap{
	Bound: 10 * time.Second, Cold: 20 * time.Millisecond, Memory: 16384, First: 1, Scope: relay.OfDocument}}

// padded gives a change of n bytes; its first maxSettings bytes are a well-formed change too.
func padded(n int) string {
	head, tail, _ := strings.Cut(settingsOf(time.Second).Content("outflow"), "max_bytes=")
	head += "max_bytes="
	return head + strings.Repeat("0", maxSettings-len(head)-len(tail)) + tail +
		strings.Repeat(" ", n-maxSettings)
}

func TestOutflowsOwnMessagesAreToldFromEvents(t *testing.T) {
	t.Parallel()
	tick := logical(1, relay.HeartbeatPrefix, "at 12:00")
	set := func(content string) []byte { return logical(1, relay.SettingsPrefix, content) }
	ours, later := set(settingsOf(5*time.Millisecond).Content("outflow")), set(
		settingsOf(7*time.Millisecond).Content("outflow"))
	theirs, bad := set(settingsOf(time.Second).Content("analytics")), set("v=1 slot=outflow horizon=soon")
	event, rel := row("1", "[]"), relation(tableOID, columns...)
	for name, c := range map[string]struct {
		msgs      [][]byte
		want      relay.Commit
		malformed int
	}{
		"nothing":   {},
		"tick":      {msgs: [][]byte{tick}, want: relay.Commit{Kind: relay.Heartbeat}},
		"two ticks": {msgs: [][]byte{tick, tick}, want: relay.Commit{Kind: relay.Heartbeat}},
		"event after a tick": {msgs: [][]byte{tick, rel, event},
			want: relay.Commit{Kind: relay.Events, Events: 1}},
		"tick after an event": {msgs: [][]byte{rel, event, tick},
			want: relay.Commit{Kind: relay.Events, Events: 1}},
		"event after a change": {msgs: [][]byte{ours, rel, event},
			want: relay.Commit{Kind: relay.Events, Events: 1}},
		"change": {msgs: [][]byte{ours}, want: relay.Commit{Kind: relay.SettingsChange,
			Settings: settingsOf(5 * time.Millisecond)}},
		"change before a tick": {msgs: [][]byte{ours, tick},
			want: relay.Commit{Kind: relay.SettingsChange, Settings: settingsOf(5 * time.Millisecond)}},
		"change after a tick": {msgs: [][]byte{tick, ours},
			want: relay.Commit{Kind: relay.SettingsChange, Settings: settingsOf(5 * time.Millisecond)}},
		"the last change": {msgs: [][]byte{ours, later},
			want: relay.Commit{Kind: relay.SettingsChange, Settings: settingsOf(7 * time.Millisecond)}},
		"change and another's": {msgs: [][]byte{ours, theirs},
			want: relay.Commit{Kind: relay.SettingsChange, Settings: settingsOf(5 * time.Millisecond)}},
		"another's":            {msgs: [][]byte{theirs}},
		"another's and a tick": {msgs: [][]byte{theirs, tick}, want: relay.Commit{Kind: relay.Heartbeat}},
		"malformed":            {msgs: [][]byte{bad}, malformed: 1},
		"malformed and a tick": {msgs: [][]byte{bad, tick}, want: relay.Commit{Kind: relay.Heartbeat},
			malformed: 1},
		"malformed after a change": {msgs: [][]byte{ours, bad}, want: relay.Commit{Kind: relay.SettingsChange,
			Settings: settingsOf(5 * time.Millisecond)}, malformed: 1},
		"malformed with an event": {msgs: [][]byte{bad, rel, event},
			want: relay.Commit{Kind: relay.Events, Events: 1}, malformed: 1},
		"malformed for another": {msgs: [][]byte{set("v=1 slot=analytics horizon=soon")}},
		"without a slot":        {msgs: [][]byte{set("v=1 horizon=1s")}, malformed: 1},
		"empty":                 {msgs: [][]byte{set("")}, malformed: 1},
		"gap mode": {msgs: [][]byte{set(gap.Content("outflow"))},
			want: relay.Commit{Kind: relay.SettingsChange, Settings: gap}},
		"gap mode after a horizon": {msgs: [][]byte{ours, set(gap.Content("outflow"))},
			want: relay.Commit{Kind: relay.SettingsChange, Settings: gap}},
		"gap mode for another": {msgs: [][]byte{set(gap.Content("analytics"))}},
		"gap mode with a setting of the horizon": {
			msgs:      [][]byte{set(strings.Replace(gap.Content("outflow"), "bound=", "horizon=", 1))},
			malformed: 1},
		"newer": {msgs: [][]byte{set("v=3 slot=outflow x")}, malformed: 1},
		"newer before a change": {msgs: [][]byte{set("v=3 slot=outflow x"), ours},
			want:      relay.Commit{Kind: relay.SettingsChange, Settings: settingsOf(5 * time.Millisecond)},
			malformed: 1},
		"beyond a maximum": {msgs: [][]byte{set("v=1 slot=outflow horizon=24h sort=commit " +
			"max_events=9000000000000000000 max_bytes=1")}, malformed: 1},
		"newer for another": {msgs: [][]byte{set("v=3 slot=analytics shards=4")}},
		"newer beside an event": {msgs: [][]byte{set("v=3 slot=outflow shards=4"), rel, event},
			want: relay.Commit{Kind: relay.Events, Events: 1}, malformed: 1},
		"too long": {
			msgs:      [][]byte{set(padded(maxSettings + 1)), set(padded(2 * maxSettings))},
			malformed: 2,
		},
		"just not too long": {
			msgs: [][]byte{set(padded(maxSettings))}, want: relay.Commit{Kind: relay.SettingsChange,
				Settings: settingsOf(time.Second)},
		},
		"not transactional": {msgs: [][]byte{
			logical(0, relay.HeartbeatPrefix, ""), logical(0, relay.SettingsPrefix, "v=3 slot=outflow"),
			logical(0, relay.SettingsPrefix, "x"),
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			msgs := append([][]byte{begin(0x100)}, c.msgs...)
			results, err := decodeAll(config, append(msgs, commit(0x100, 0x130, 9))...)
			must.Succeed(t, err)
			c.want.LSN, c.want.Start, c.want.Time = 0x130, 0x100, 9
			if got := commits(results); len(got) != 1 || got[0] != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
			malformed := 0
			for _, r := range results {
				if r.Malformed != nil {
					malformed++
					if n := len(r.Malformed.Error()); r.Kind != Nothing || n > 3*maxSettings {
						t.Errorf("kind %v, %d bytes of text", r.Kind, n)
					}
				}
			}
			if malformed != c.malformed {
				t.Errorf("%d malformed, want %d", malformed, c.malformed)
			}
		})
	}
}

// A transaction that was replicated from elsewhere is no input, whatever is in it, unless the mapping wants
// it.
func TestReplicatedTransactionsAreNoInput(t *testing.T) {
	t.Parallel()
	ours := logical(1, relay.SettingsPrefix, settingsOf(5*time.Millisecond).Content("outflow"))
	for name, c := range map[string]struct {
		msgs [][]byte
		any  relay.Commit
	}{
		"rows": {[][]byte{relation(tableOID, columns...), row("1", "[]"), row("2", "[]")},
			relay.Commit{Kind: relay.Events, Events: 2}},
		"message": {[][]byte{logical(1, outbox.EventPrefix, `{"doc_id":"d","payload":1}`)},
			relay.Commit{Kind: relay.Events, Events: 1}},
		"settings": {[][]byte{ours},
			relay.Commit{Kind: relay.SettingsChange, Settings: settingsOf(5 * time.Millisecond)}},
		"tick":    {[][]byte{logical(1, relay.HeartbeatPrefix, "")}, relay.Commit{Kind: relay.Heartbeat}},
		"nothing": {nil, relay.Commit{}},
	} {
		for _, own := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, own only: %t", name, own), func(t *testing.T) {
				t.Parallel()
				cfg := config
				cfg.Mapping.Source, cfg.Mapping.OwnOnly = relay.FromBoth, own
				msgs := append([][]byte{begin(0x100), origin("elsewhere")}, c.msgs...)
				// The next one is our own again, and its table was described in the foreign one.
				msgs = append(msgs, commit(0x100, 0x130, 9), begin(0x200), relation(tableOID, columns...),
					row("3", "[]"), commit(0x200, 0x230, 10))
				results, err := decodeAll(cfg, msgs...)
				must.Succeed(t, err)
				want := c.any
				if own {
					want = relay.Commit{}
				}
				want.LSN, want.Start, want.Time = 0x130, 0x100, 9
				got := commits(results)
				if got[0] != want ||
					got[1] != (relay.Commit{LSN: 0x230, Start: 0x200, Time: 10, Kind: relay.Events,
						Events: 1}) {
					t.Errorf("got %+v, want %+v", got, want)
				}
				if n := len(events(results)); n != want.Events+1 {
					t.Errorf("%d events", n)
				}
				for _, r := range results {
					if r.Malformed != nil || r.Ignored != NothingIgnored {
						t.Errorf("%+v", r)
					}
				}
			})
		}
	}
}

// The inputs of one transaction say nothing of the next.
func TestInputsEndWithTheirTransaction(t *testing.T) {
	t.Parallel()
	results, err := decodeAll(config,
		begin(0x100), logical(1, relay.HeartbeatPrefix, ""),
		logical(1, relay.SettingsPrefix, settingsOf(0).Content("outflow")),
		relation(tableOID, columns...), row("1", "[]"), commit(0x100, 0x130, 0),
		begin(0x200), commit(0x200, 0x230, 0))
	must.Succeed(t, err)
	if got := commits(results); len(got) != 2 || got[1] != (relay.Commit{LSN: 0x230, Start: 0x200}) {
		t.Errorf("got %+v", got)
	}
}
