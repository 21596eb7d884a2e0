package claim

import (
	"flag"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/relay"
)

var (
	trials = flag.Int("claim.trials", 300, "random schedules")
	_      = flag.Uint64("claim.seed", 1, "the first schedule's seed")
)

// TestTheRuleHoldsWhatTheModelClaims: with one thing broken at a time nothing is lost, what has reached a
// living cluster is published in time, no two successors publish a commit, and it is published twice only
// where its home had published it and could not say so. With two things broken nothing is lost, and while a
// home and another cluster live, what it commits is published in time. With links cut as well, and any number
// of things broken, nothing is lost. So docs/models/islands_model.py claims; here it is of the program.
//
// Whatever an operator says of clusters that are gone, and whenever it is taken back, nothing is lost but
// what one had claimed that never returns.
func TestTheRuleHoldsWhatTheModelClaims(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]harm{"one thing broken": oneFails, "two things broken": twoFail,
		"an operator's word": wordGiven, "links cut": linksFail} {
		t.Run(name, func(t *testing.T) {
			var total tally
			seeds.Each(t, "claim.seed", "claim.trials", *trials, func(seed uint64) {
				one, err := run(seed, harm, "", 600)
				if err != nil {
					t.Errorf("seed %d: %v", seed, err)
				}
				total.add(one)
			})
			t.Logf("%+v", total)
			if *trials >= 100 && (min(total.claims, total.yields, total.soon, total.twice) == 0 ||
				harm == wordGiven && total.words == 0) {
				t.Errorf("nothing happened: %+v", total)
			}
		})
	}
}

// missedBy are seeds that miss a rule, where the first ones do not: they save looking for one.
var missedBy = map[string]uint64{"behind": 1875, "chain": 263, "fresh": 218, "late": 258, "order": 251,
	"read": 1382, "slow": 113, "still": 259}

// TestEachRuleIsNeeded takes away one rule after the other: each is missed.
func TestEachRuleIsNeeded(t *testing.T) {
	t.Parallel()
	for _, rule := range slices.Sorted(maps.Keys(rules)) {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			for i := range uint64(4000) {
				seed := missedBy[rule] + i
				harm := oneFails
				if rule == "wait" {
					harm = twoFail
				}
				if _, err := run(seed, harm, rule, 2000); err != nil {
					t.Logf("%s: seed %d: %v", rules[rule], seed, err)
					return
				}
			}
			t.Errorf("not missed: %s", rules[rule])
		})
	}
}

// TestWhatIsNotReadIsAskedForAgain: a row of which nobody knows, when it can't be committed any more; not
// before, and not when it was read.
func TestWhatIsNotReadIsAskedForAgain(t *testing.T) {
	t.Parallel()
	h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
	h.Start(0)
	if row := h.Next(-1); row.Kind != relay.Published {
		t.Errorf("first: %v", row.Content())
	}
	h.Row(&relay.ClusterRow{Kind: relay.Published, By: 1}, 1, 0)
	if row := h.Next(-1); row.Kind != 0 || !h.Nameless() {
		t.Errorf("a hello without a number: %v", row.Content())
	}
	h.Number(7)
	kinds := func(from, to time.Duration, kind relay.ClusterRowKind) (asked []time.Duration) {
		for now := from; now < to; now++ {
			if row := h.Next(now); row.Kind == kind {
				asked = append(asked, now)
			} else if row.Kind != 0 && row.Kind != relay.Published {
				t.Errorf("at %d: %v", now, row.Content())
			}
		}
		return asked
	}
	if got := kinds(0, 60, relay.Hello); !slices.Equal(got, []time.Duration{0, 25, 50}) {
		t.Errorf("hello at %v", got)
	}
	h.Row(&relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}, 2, 1)
	h.Row(&relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}, 3, 2)
	h.Away(100)
	if got := kinds(100, 250, relay.Yield); !slices.Equal(got, []time.Duration{201, 226}) {
		t.Errorf("yield at %v", got)
	}
	h.Row(&relay.ClusterRow{Kind: relay.Yield, By: 1, Hello: 7}, 4, 3)
	if got := kinds(250, 400, relay.Yield); got != nil || h.May(1, 1) != Wait {
		t.Errorf("yield again at %v; %v", got, h.May(1, 1))
	}
}
