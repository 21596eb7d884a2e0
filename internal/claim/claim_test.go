package claim

import (
	"flag"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
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

// twoClusters is a reader in cluster 2 of the rows of cluster 1, of two, which has read a hello and its own
// echo of it at 0.
func twoClusters() Reader {
	r := NewReader(Config{Self: 2, Count: 2, Delay: 100}, 1)
	r.Start(-1000)
	r.End(0)
	r.Row(0, &relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 5})
	r.Row(0, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5})
	return r
}

// reads lets a reader read its WAL to the end until now, again and again.
func reads(r *Reader, now time.Duration) {
	for r.end && now-r.ended > r.cfg.Delay/4 {
		r.End(r.ended + r.cfg.Delay/4)
	}
	r.End(now)
}

// at is what a reader asks for at the end of its WAL.
func at(r *Reader, now time.Duration) relay.ClusterRow {
	reads(r, now)
	return r.Next(now)
}

// TestAClaimActsWhereItIsRead: of what it names nothing is published that was settled before it in the WAL,
// and nothing that had not come.
func TestAClaimActsWhereItIsRead(t *testing.T) {
	t.Parallel()
	claim := relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 5, From: 10, To: 40}
	for settled, want := range map[outbox.LSN]Range{0: {10, 30}, 20: {20, 30}, 30: {}, 50: {}} {
		r := twoClusters()
		r.Commit(0, 30)
		r.Row(1, &relay.ClusterRow{Kind: relay.Published, By: 1, To: settled})
		if got := r.Row(2, &claim); got != want {
			t.Errorf("settled up to %v: %+v, want %+v", settled, got, want)
		}
		if again := r.Row(3, &claim); again != (Range{}) {
			t.Errorf("settled up to %v: %+v once more", settled, again)
		}
	}
	r := twoClusters()
	r.Commit(0, 30)
	other := claim
	other.Home = 3
	if got := r.Row(1, &other); got != (Range{}) {
		t.Errorf("of another home: %+v", got)
	}
}

// TestAHomeThatSaysNothingIsNotClaimedFrom: neither one that has never said hello, as one of an older
// version, nor one whose yield comes late, behind the hello that ended it.
func TestAHomeThatSaysNothingIsNotClaimedFrom(t *testing.T) {
	t.Parallel()
	r := NewReader(Config{Self: 2, Count: 2, Delay: 100}, 1)
	r.Commit(0, 10)
	for now := range time.Duration(1000) {
		if row := at(&r, now); row.Kind != 0 {
			t.Fatalf("at %d: %v", now, row.Content())
		}
	}
	r = twoClusters()
	r.Commit(0, 10)
	r.Row(1, &relay.ClusterRow{Kind: relay.Yield, By: 1, Hello: 4})
	if row := at(&r, 2); row.Kind != 0 {
		t.Errorf("after a yield that was late: %v", row.Content())
	}
	r.Row(3, &relay.ClusterRow{Kind: relay.Yield, By: 1, Hello: 5})
	want := relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 5, To: 10}
	if row := at(&r, 4); row != want {
		t.Errorf("after a yield: %v", row.Content())
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

// TestWhatAHomeHasSaidIsNotLeft: nobody claims it, and its stream may have lost it.
func TestWhatAHomeHasSaidIsNotLeft(t *testing.T) {
	t.Parallel()
	h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
	h.Start(0)
	for lsn, row := range []relay.ClusterRow{
		{Kind: relay.Published, By: 1, To: 20}, {Kind: relay.Hello, By: 1, Hello: 1},
		{Kind: relay.Claim, By: 2, Home: 1, Hello: 1, From: 10, To: 30},
		{Kind: relay.Echo, By: 2, Home: 1, Hello: 1},
	} {
		h.Row(&row, outbox.LSN(40+lsn), 0)
	}
	for lsn, want := range map[outbox.LSN]Verdict{20: Publish, 21: Leave, 30: Leave, 31: Publish} {
		if got := h.May(lsn, lsn); got != want {
			t.Errorf("%v: %v, want %v", lsn, got, want)
		}
	}
	// What it has left stays left when it has said more, also where it says so while it leaves it.
	h.Row(&relay.ClusterRow{Kind: relay.Published, By: 1, To: 25}, 50, 0)
	h.Row(&relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 1, From: 10, To: 35}, 51, 0)
	h.Row(&relay.ClusterRow{Kind: relay.Published, By: 1, To: 40}, 52, 0)
	h = HomeFrom(h.cfg, h.State())
	for lsn, want := range map[outbox.LSN]bool{20: false, 21: true, 35: true, 36: false} {
		if h.Claimed(lsn, lsn) != want {
			t.Errorf("%v: claimed is %t", lsn, !want)
		}
	}
	old := h.State()
	old.From = 0
	if h := HomeFrom(h.cfg, old); h.Claimed(20, 20) || h.Claimed(35, 35) {
		t.Error("a record that does not have what was said before a claim: what was said since is left")
	}
	if h.Claimed(20, 25) || !h.Claimed(21, 25) {
		t.Error("an event from beyond a window that was said to be published")
	}
	h.Row(&relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 1, From: 35, To: 50}, 53, 0)
	for lsn, want := range map[outbox.LSN]bool{40: false, 41: true, 50: true, 51: false} {
		if h.Claimed(lsn, lsn) != want {
			t.Errorf("%v: claimed is %t after the second silence", lsn, !want)
		}
	}
}

// TestAnEchoAnswersAHelloThatWasSaid: one of a hello that was not read before it is somebody else's, and
// changes nothing.
func TestAnEchoAnswersAHelloThatWasSaid(t *testing.T) {
	t.Parallel()
	h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
	h.Start(0)
	echo := relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: relay.MaxHello}
	h.Row(&echo, 1, 0)
	h.Row(&relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 1}, 2, 0)
	h.Row(&echo, 3, 0)
	if got := h.May(1, 1); got != Wait {
		t.Errorf("%v before the hello is answered", got)
	}
	h.Row(&relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 1, To: 20}, 4, 0)
	echo.Hello = 1
	h.Row(&echo, 5, 0)
	if got := [...]Verdict{h.May(20, 20), h.May(21, 21)}; got != [...]Verdict{Leave, Publish} {
		t.Errorf("%v up to the claim and behind it", got)
	}
	r := NewReader(Config{Self: 2, Count: 2, Delay: 100}, 1)
	r.Row(0, &relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 5})
	r.Row(0, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 6})
	want := relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5}
	if row := r.Next(1); row != want {
		t.Errorf("asks for %v", row.Content())
	}
}

// TestANumberThatComesLateIsNotTaken: a hello of a process before this one was read while it was taken, or
// one that is greater.
func TestANumberThatComesLateIsNotTaken(t *testing.T) {
	t.Parallel()
	sign := relay.ClusterRow{Kind: relay.Published, By: 1}
	h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
	h.Start(0)
	h.Row(&sign, 1, 0)
	h.Row(&relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 8}, 2, 0)
	h.Number(9)
	h.Row(&relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 8}, 3, 0)
	if got := h.May(1, 1); got != Publish {
		t.Errorf("%v with an answer to hello 8, which has no number to come", got)
	}
	h.Start(3)
	h.Row(&sign, 4, 100)
	if h.Number(8); !h.Nameless() {
		t.Error("a hello has the number of the one before")
	}
	if h.Number(9); h.Nameless() {
		t.Error("a hello has no number")
	}
}

// TestWhoStartsAgainSoonSaysNoHello: it goes on where it was as soon as a sign of life of its own is in the
// WAL in time; with what the processes before it have left on its way as well.
func TestWhoStartsAgainSoonSaysNoHello(t *testing.T) {
	t.Parallel()
	sign := relay.ClusterRow{Kind: relay.Published, By: 1}
	hello := relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}
	yield := relay.ClusterRow{Kind: relay.Yield, By: 1, Hello: 7}
	echo := relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}
	later := hello
	later.Hello = 8
	type read struct {
		row relay.ClusterRow
		at  time.Duration
	}
	for name, c := range map[string]struct {
		before, after []read // the start
		there         int    // so many of the latter were in the WAL then
		may           Verdict
		hello         uint64
	}{
		"in time":               {after: []read{{sign, 159}}, may: Publish, hello: 7},
		"no sign of its own":    {before: []read{{sign, 120}}, may: Wait, hello: 7},
		"signs that were there": {after: []read{{sign, 120}, {sign, 130}}, there: 2, may: Wait, hello: 7},
		"too late":              {after: []read{{sign, 160}}, may: Wait, hello: 9},
		"a clock set back":      {after: []read{{sign, 109}}, may: Wait, hello: 9},
		"after one that was too late": {before: []read{{sign, 200}}, after: []read{{sign, 210}}, may: Wait,
			hello: 9},
		"after one that said hello": {before: []read{{sign, 200}, {later, 205}}, after: []read{{sign, 210}},
			may: Wait, hello: 8},
		"after a yield": {before: []read{{yield, 120}}, after: []read{{sign, 130}}, may: Wait,
			hello: 9},
		"a yield was on its way": {after: []read{{sign, 120}, {yield, 130}}, may: Wait, hello: 9},
		"a hello was on its way": {after: []read{{sign, 120}, {later, 130}}, may: Wait, hello: 8},
		"a hello ends a yield": {after: []read{{sign, 120}, {later, 130}, {yield, 140}}, may: Wait,
			hello: 8},
		"the same hello twice": {after: []read{{sign, 120}, {hello, 130}}, may: Publish, hello: 7},
	} {
		h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
		h.Start(0)
		lsn := outbox.LSN(0)
		take := func(rows ...read) {
			for _, r := range rows {
				lsn++
				h.Row(&r.row, lsn, r.at)
			}
		}
		take(read{sign, 100}, read{hello, 105}, read{echo, 108}, read{sign, 110})
		take(c.before...)
		h.Start(lsn + outbox.LSN(c.there))
		if got := h.May(50, 50); got != Wait {
			t.Errorf("%s: %v before anything is read", name, got)
		}
		take(c.after...)
		if h.Nameless() {
			h.Number(9)
		}
		if got := h.May(50, 50); got != c.may || h.hello != c.hello {
			t.Errorf("%s: %v with hello %d, want %v with %d", name, got, h.hello, c.may, c.hello)
		}
	}
}

// TestAReaderClaimsNothingBeforeItsFirstCommit that the home has not said: also after another start.
func TestAReaderClaimsNothingBeforeItsFirstCommit(t *testing.T) {
	t.Parallel()
	r := twoClusters()
	r.First(20)
	r.First(30)
	r.Commit(0, 40)
	r = ReaderFrom(r.cfg, r.home, r.State())
	r.Start(0)
	r.End(0)
	claims := func(settled outbox.LSN) relay.ClusterRow {
		next := r
		next.Row(0, &relay.ClusterRow{Kind: relay.Published, By: 1, To: settled})
		return at(&next, 100)
	}
	if row := claims(19); row.Kind != 0 {
		t.Errorf("with 19 published: %v", row.Content())
	}
	want := relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 5, From: 20, To: 40}
	if row := claims(20); row != want {
		t.Errorf("with 20 published: %v", row.Content())
	}
}

// TestAHomeThatWaitsTooLongYields: others publish until whoever it waits for has answered, and then it says
// hello. What else happens meanwhile changes nothing: a cluster that is gone answers no further hello either.
func TestAHomeThatWaitsTooLongYields(t *testing.T) {
	t.Parallel()
	h := NewHome(Config{Self: 1, Count: 3, Delay: 100, Beat: 10})
	lsn := outbox.LSN(0)
	take := func(row relay.ClusterRow, at time.Duration) {
		lsn++
		h.Row(&row, lsn, at)
	}
	h.Start(0)
	take(relay.ClusterRow{Kind: relay.Published, By: 1}, 0)
	h.Number(7)
	take(relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}, 1)
	take(relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}, 2)
	yielded := time.Duration(0)
	for now := time.Duration(1); now < 200 && yielded == 0; now++ {
		if row := h.Next(now); row.Kind == relay.Yield {
			yielded = now
		}
	}
	if yielded != 102 {
		t.Errorf("yield at %d", yielded)
	}
	take(relay.ClusterRow{Kind: relay.Yield, By: 1, Hello: 7}, 103)
	take(relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 7, To: 20}, 104)
	h.Away(105)
	if h.Back(); h.Nameless() || h.May(30, 30) != Wait {
		t.Errorf("its NATS was away: %v, or a hello", h.May(30, 30))
	}
	if take(relay.ClusterRow{Kind: relay.Echo, By: 3, Home: 1, Hello: 7}, 106); !h.Nameless() {
		t.Error("no hello when all have answered")
	}
	h.Number(8)
	take(relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 8}, 107)
	for by := 2; by <= 3; by++ {
		if got := h.May(30, 30); got != Wait {
			t.Errorf("%v before cluster %d has answered again", got, by)
		}
		take(relay.ClusterRow{Kind: relay.Echo, By: by, Home: 1, Hello: 8}, 108)
	}
	if got := [...]Verdict{h.May(20, 20), h.May(21, 21)}; got != [...]Verdict{Leave, Publish} {
		t.Errorf("%v up to the claim and behind it", got)
	}
}

// TestAClusterThatIsGoneForGoodIsNotWaitedFor: by an operator's word, from the next start on. What it has
// claimed and could not say counts for nothing then; what was read before stays left.
func TestAClusterThatIsGoneForGoodIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	cfg := Config{Self: 1, Count: 3, Delay: 100, Beat: 10}
	sign := relay.ClusterRow{Kind: relay.Published, By: 1}
	hello := relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}
	claim := relay.ClusterRow{Kind: relay.Claim, By: 3, Home: 1, To: 20}
	for name, waited := range map[string]bool{"it waited": true, "it comes back": false} {
		h := NewHome(cfg)
		h.Start(0)
		h.Row(&sign, 1, 0)
		h.Row(&claim, 2, 1)
		if waited {
			h.Row(&hello, 3, 2)
			h.Row(&relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}, 4, 3)
		}
		if got := h.May(30, 30); got != Wait {
			t.Errorf("%s: %v", name, got)
		}
		gone := cfg
		gone.Gone = []int{3}
		h = HomeFrom(gone, h.State())
		h.Start(4)
		h.Row(&sign, 5, 4)
		if !waited {
			h.Row(&hello, 6, 5)
			h.Row(&relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}, 7, 6)
		}
		late := claim
		late.To = 30
		h.Row(&late, 8, 7)
		if got := [...]Verdict{h.May(20, 20), h.May(21, 21)}; got != [...]Verdict{Leave, Publish} {
			t.Errorf("%s: %v up to what was claimed and behind it", name, got)
		}
		if s := h.State(); s.WaitsFor(1) != nil {
			t.Errorf("%s: waits for %v", name, s.WaitsFor(1))
		}
	}
	h := NewHome(cfg) // a claim came behind the hello, before the start
	h.Start(0)
	h.Row(&sign, 1, 0)
	h.Row(&hello, 2, 1)
	h.Row(&relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}, 3, 2)
	h.cfg.Gone = []int{3}
	h = HomeFrom(h.cfg, h.State())
	h.Start(4)
	h.Row(&claim, 4, 3)
	h.Row(&sign, 5, 4)
	if got := [...]Verdict{h.May(20, 20), h.May(21, 21)}; got != [...]Verdict{Leave, Publish} {
		t.Errorf("%v up to a claim that was there at the start, and behind it", got)
	}
	cfg.Gone = []int{2, 3}
	h = NewHome(cfg)
	h.Start(0)
	h.Row(&sign, 1, 0)
	if got := h.May(1, 1); got != Wait || !h.Nameless() {
		t.Errorf("%v, though a hello is due", got)
	}
	if h.Row(&hello, 2, 1); h.May(1, 1) != Publish {
		t.Errorf("%v with nobody to wait for", h.May(1, 1))
	}
}

// TestAHomeYieldsWithoutANumber: NATS goes away when a hello is due, and a number of it comes from there. So
// others know the hello before alone, and publish. A home that has never said one has nobody to yield to.
func TestAHomeYieldsWithoutANumber(t *testing.T) {
	t.Parallel()
	sign := relay.ClusterRow{Kind: relay.Published, By: 1}
	h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
	h.Start(0)
	h.Row(&sign, 1, 0)
	says := func(from, to time.Duration) (row relay.ClusterRow, at time.Duration) {
		for now := from; now < to; now++ {
			if row := h.Next(now); row.Kind != 0 && row.Kind != relay.Published {
				return row, now
			}
		}
		return row, 0
	}
	h.Away(0)
	if row, at := says(0, 1000); row.Kind != 0 {
		t.Errorf("at %d: %v before its first hello", at, row.Content())
	}
	h.Back()
	h.Number(7)
	hello := relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}
	echo := relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}
	h.Row(&hello, 2, 1)
	h.Row(&echo, 3, 2)
	h.Start(3)
	h.Row(&sign, 4, 1000)
	h.Away(1000)
	yield := relay.ClusterRow{Kind: relay.Yield, By: 1, Hello: 7}
	row, at := says(1000, 2000)
	if row != yield || at != 1101 || !h.Nameless() {
		t.Fatalf("at %d: %v", at, row.Content())
	}
	h.Row(&yield, 5, 1102)
	if s := h.State(); s.WaitsFor(1) != nil || !s.Yielded {
		t.Errorf("%+v", s)
	}
	if row, at := says(1102, 2000); row.Kind != 0 {
		t.Errorf("at %d: %v once more", at, row.Content())
	}
	h.Back()
	h.Number(8)
	hello.Hello, echo.Hello = 8, 8
	if row, at := says(2000, 2001); row != hello {
		t.Errorf("at %d: %v when its NATS is back", at, row.Content())
	}
	h.Row(&hello, 6, 2001)
	h.Row(&relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 7, To: 20}, 7, 2002)
	h.Row(&echo, 8, 2003)
	if got := [...]Verdict{h.May(20, 20), h.May(21, 21)}; got != [...]Verdict{Leave, Publish} {
		t.Errorf("%v up to the claim and behind it", got)
	}
}

// TestAYieldEndsBehindWhatWasThereAtTheStart: its end is a hello, and one of the process before may be there,
// with its answers, and claims behind those. Neither the answer that was waited for ends it sooner, nor NATS.
func TestAYieldEndsBehindWhatWasThereAtTheStart(t *testing.T) {
	t.Parallel()
	sign := relay.ClusterRow{Kind: relay.Published, By: 1}
	hello := relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}
	echo := relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}
	for _, waited := range []bool{true, false} {
		h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
		h.Start(0)
		rows := []relay.ClusterRow{sign, hello, {Kind: relay.Yield, By: 1, Hello: 7}, echo}
		if !waited {
			rows[2], rows[3] = rows[3], rows[2]
		}
		rows = append(rows, hello, echo,
			relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 8, To: 20})
		rows[4].Hello, rows[5].Hello = 8, 8
		take := func(from, to int) {
			for i := from; i < to; i++ {
				h.Row(&rows[i], outbox.LSN(1+i), time.Duration(i))
			}
		}
		kept := 3
		if !waited {
			kept = 4
		}
		take(0, kept-1)
		h.yielded = true // it has asked for that
		take(kept-1, kept)
		h = HomeFrom(h.cfg, h.State())
		h.Start(outbox.LSN(len(rows)))
		h.Back()
		for i := kept; i < len(rows); i++ {
			if take(i, i+1); h.May(20, 20) != Wait || h.Nameless() {
				t.Errorf("it waited %t: %v behind row %d", waited, h.May(20, 20), i)
			}
		}
		h.Row(&sign, 8, 7)
		if got := [...]Verdict{h.May(20, 20), h.May(21, 21)}; got != [...]Verdict{Leave, Publish} {
			t.Errorf("it waited %t: %v up to the claim and behind it", waited, got)
		}
	}
}

// TestWhoWasGoneWhenAHomeYieldedLetsOthersClaim: the home had waited for it. When it is back the yield comes,
// and what others have claimed since may come later still. Each time it waits for a whole circle more.
func TestWhoWasGoneWhenAHomeYieldedLetsOthersClaim(t *testing.T) {
	t.Parallel()
	yield := relay.ClusterRow{Kind: relay.Yield, By: 1, Hello: 5}
	for name, begin := range map[string]func(r *Reader){
		"it has not answered": func(r *Reader) { r.hello, r.echoes[2] = 5, 0; r.Start(-1000) },
		"it is just back": func(r *Reader) {
			r.Start(-100)
			r.Row(-100, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5}) // of a process before
		},
		"it is just back, and has answered again": func(r *Reader) {
			r.Start(-70)
			r.End(-70)
			r.Row(-70, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5})
		},
		"it starts again": func(r *Reader) { r.Row(-100, &yield); r.Start(-1000) },
		"it was there":    func(*Reader) {},
		"it was there and has just started": func(r *Reader) {
			r.Start(-100)
			r.End(-100)
			r.Row(-100, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5})
		},
	} {
		r := NewReader(Config{Self: 2, Count: 3, Delay: 100}, 1)
		r.Start(-1000)
		r.Row(-1000, &relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 5})
		r.Row(-1000, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5})
		begin(&r)
		reads(&r, 0)
		r.Row(0, &yield)
		r.Row(0, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5})
		more := time.Duration(200)
		if strings.HasPrefix(name, "it was there") {
			more = 0
		}
		claims := func(from time.Duration) {
			t.Helper()
			for now := from; now <= from+more; now++ {
				if row := at(&r, now); (row.Kind == relay.Claim) != (now == from+more) {
					t.Errorf("%s: at %d after %d: %v", name, now, from, row.Content())
				}
			}
		}
		r.Commit(0, 20)
		claims(0)
		reads(&r, 300)
		r.Row(300, &relay.ClusterRow{Kind: relay.Claim, By: 3, Home: 1, Hello: 5, To: 20})
		r.Commit(300, 40)
		claims(300)
		r.Row(600, &relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 6})
		if r.late || r.yielded {
			t.Errorf("%s: a hello does not end it", name)
		}
	}
}

// TestWhoseTurnsAreAtOtherTimesLetsOthersClaim: who has read a backlog claims only what others have had for
// a whole circle, until it reads a row in time.
func TestWhoseTurnsAreAtOtherTimesLetsOthersClaim(t *testing.T) {
	t.Parallel()
	r := NewReader(Config{Self: 2, Count: 3, Delay: 100}, 1)
	r.Start(0)
	r.Row(0, &relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 5})
	r.Row(0, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5})
	first := func(from time.Duration) time.Duration { // its turns begin at 300, 500, 700 and so on
		for now := from; now < from+1000; now++ {
			if at(&r, now).Kind == relay.Claim {
				return now
			}
		}
		return 0
	}
	r.Commit(290, 20)
	if got := first(290); got != 500 {
		t.Errorf("it claims at %d what has come at 290, want 500", got)
	}
	r.Row(510, &relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 5, To: 20}) // read in time
	r.Commit(600, 30)
	if got := first(600); got != 610 {
		t.Errorf("it claims at %d what has come at 600, want 610", got)
	}
}

// TestSilenceIsNotCountedWhileTheWALIsNotRead: the database was away for half of the delay or longer, and the
// home's rows come later than it. A reader that has outlived that counts as one that has just started.
func TestSilenceIsNotCountedWhileTheWALIsNotRead(t *testing.T) {
	t.Parallel()
	for gap, want := range map[time.Duration]time.Duration{49: 100, 50: 310, 500: 760} {
		r := twoClusters()
		r.Commit(0, 20)
		reads(&r, 60)
		r.End(60 + gap)
		first := time.Duration(0)
		for now := 60 + gap; now < 1000 && first == 0; now++ {
			if at(&r, now).Kind == relay.Claim {
				first = now
			}
		}
		if first != max(want, 60+gap) {
			t.Errorf("behind a gap of %d it claims at %d, want %d", gap, first, want)
		}
	}
	r := twoClusters()
	reads(&r, 60)
	r.Row(524, &relay.ClusterRow{Kind: relay.Published, By: 1, To: 10})
	r.Commit(526, 20)
	if r.End(500); r.since != 624 || r.came != 526 {
		t.Errorf("since %d, came %d: rows were read behind the question", r.since, r.came)
	}
}

// TestWhatAClusterSaysOfOthersIsNoSignOfItsOwnLife: the process that publishes the home's events is dead, and
// another one there claims events of cluster 3, again and again.
func TestWhatAClusterSaysOfOthersIsNoSignOfItsOwnLife(t *testing.T) {
	t.Parallel()
	r := NewReader(Config{Self: 2, Count: 3, Delay: 100}, 1)
	r.Start(-1000)
	reads(&r, 0)
	r.Row(0, &relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 5})
	r.Row(0, &relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 5})
	r.Commit(0, 30)
	for now := time.Duration(1); now <= 100; now++ {
		r.Row(now, &relay.ClusterRow{Kind: []relay.ClusterRowKind{relay.Echo, relay.Claim}[now%2], By: 1,
			Home: 3, Hello: 1, To: outbox.LSN(now)})
		if row := at(&r, now); (row.Kind == relay.Claim) != (now == 100) {
			t.Errorf("at %d: %v", now, row.Content())
		}
	}
}

// TestAHomeYieldsWhenNATSRefusesAllMessages: it answers, so the stream is compared each time, and takes
// nothing. The time since the first failure counts, and the yield lasts for two turns of each other cluster.
func TestAHomeYieldsWhenNATSRefusesAllMessages(t *testing.T) {
	t.Parallel()
	for name, stored := range map[string]bool{"refused": false, "stored": true} {
		h := NewHome(Config{Self: 1, Count: 3, Delay: 100, Beat: 10})
		rows := []relay.ClusterRow{{Kind: relay.Published, By: 1}, {Kind: relay.Hello, By: 1, Hello: 7},
			{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}, {Kind: relay.Echo, By: 3, Home: 1, Hello: 7}}
		h.Start(0)
		for i := range rows {
			h.Row(&rows[i], outbox.LSN(i+1), 0)
		}
		yielded, back := time.Duration(0), time.Duration(0)
		for now := time.Duration(0); now < 1000 && back == 0; now++ {
			h.Away(now)
			row := h.Next(now)
			if row.Kind == relay.Yield {
				yielded = now
				h.Row(&row, outbox.LSN(now+10), now)
			}
			if h.Back(); h.Nameless() {
				back = now
			}
			if stored {
				h.Stored()
			}
		}
		switch {
		case stored && yielded > 0:
			t.Errorf("%s: a yield at %d", name, yielded)
		case !stored && (yielded != 101 || back != 500):
			t.Errorf("%s: a yield at %d, a hello at %d", name, yielded, back)
		}
	}
}

// publishingHome is cluster 1 of so many, which may publish from 0 on.
func publishingHome(count int) Home {
	h := NewHome(Config{Self: 1, Count: count, Delay: 100, Beat: 10})
	h.Start(0)
	h.Row(&relay.ClusterRow{Kind: relay.Published, By: 1}, 1, 0)
	h.Row(&relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}, 2, 0)
	for by := 2; by <= count; by++ {
		h.Row(&relay.ClusterRow{Kind: relay.Echo, By: by, Home: 1, Hello: 7}, outbox.LSN(by+1), 0)
	}
	return h
}

// lives lets a home write and read what it has to say.
func lives(h *Home, from, to time.Duration) {
	for now := from; now < to; now++ {
		if row := h.Next(now); row.Kind != 0 {
			h.Row(&row, outbox.LSN(now+100), now)
		}
	}
}

// TestAYieldEndsWhenNothingIsRefused: NATS was away twice, the second time for long, and is back. There is
// nothing to publish, or something was stored.
func TestAYieldEndsWhenNothingIsRefused(t *testing.T) {
	t.Parallel()
	h := publishingHome(2)
	h.Away(10)
	h.Back()
	h.Away(12)
	lives(&h, 12, 150)
	if !h.yielded {
		t.Fatal("no yield")
	}
	if h.Back(); h.Nameless() {
		t.Error("a hello before anything was stored")
	}
	if h.Stored(); !h.Nameless() {
		t.Error("no hello")
	}
}

// TestAShortFailureBehindAReturnIsNoYield: NATS was away for long, the home has yielded and is back, and
// nothing was stored yet.
func TestAShortFailureBehindAReturnIsNoYield(t *testing.T) {
	t.Parallel()
	for _, waits := range []bool{true, false} {
		h := publishingHome(3)
		h.Away(0)
		lives(&h, 0, 1000)
		h.Back()
		h.Number(8)
		lives(&h, 1000, 1005)
		if waits {
			h.Away(1005)
		}
		for by := 2; by <= 3; by++ {
			h.Row(&relay.ClusterRow{Kind: relay.Echo, By: by, Home: 1, Hello: 8}, 5000, 1005)
		}
		h.Away(1005)
		lives(&h, 1005, 1008)
		if h.Back(); h.yielded || h.May(10000, 10000) != Publish {
			t.Errorf("it waited %t: yielded %t, %v", waits, h.yielded, h.May(10000, 10000))
		}
	}
}

// TestAReaderMadeLaterClaims: its slot is made behind the newest hello of a home that lives. The home says to
// have published all up to there, goes on for long, and then dies.
func TestAReaderMadeLaterClaims(t *testing.T) {
	t.Parallel()
	h := publishingHome(2)
	r := NewReader(Config{Self: 2, Count: 2, Delay: 100, Beat: 10}, 1)
	r.Start(1000)
	for now := time.Duration(1000); now < 5000; now++ {
		lsn := outbox.LSN(now)
		if row := h.Next(now); row.Kind != 0 {
			h.Row(&row, lsn, now)
			r.First(lsn)
			r.Row(now, &row)
			h.Published(lsn)
		}
		if row := at(&r, now); row.Kind == relay.Echo {
			h.Row(&row, lsn, now)
			r.Row(now, &row)
		}
	}
	r.Commit(5000, 5000)
	for now := time.Duration(5000); now < 5400; now++ {
		if at(&r, now).Kind == relay.Claim {
			return
		}
	}
	t.Errorf("nobody claims for four delays: %+v", r)
}

// TestAHomeIsAnsweredByAReaderMadeLater: behind the hello that it waits for, and maybe behind its yield. Once
// it is answered it publishes, or where its NATS is away, the reader claims.
func TestAHomeIsAnsweredByAReaderMadeLater(t *testing.T) {
	t.Parallel()
	for _, away := range []bool{false, true} {
		for _, after := range []time.Duration{50, 300} {
			h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
			h.Start(0)
			h.Row(&relay.ClusterRow{Kind: relay.Published, By: 1}, 1, 0)
			h.Number(7)
			r := NewReader(Config{Self: 2, Count: 2, Delay: 100, Beat: 10}, 1)
			r.Start(after)
			published, claimed := false, false
			for now := time.Duration(0); now < 1000 && !published && !claimed; now++ {
				if away && now == 2 {
					h.Away(now)
				}
				if h.Nameless() {
					h.Number(h.hello + 1)
				}
				rows := []relay.ClusterRow{h.Next(now)}
				if now > after {
					rows = append(rows, at(&r, now))
				}
				for i := range rows {
					if rows[i].Kind == 0 {
						continue
					}
					h.Row(&rows[i], outbox.LSN(now+10), now)
					if now > after {
						claimed = claimed || r.Row(now, &rows[i]) != Range{}
					}
				}
				if now == 400 {
					r.Commit(now, 400)
				}
				published = !away && now > 400 && h.May(400, 400) == Publish
			}
			if away && !claimed || !away && !published {
				t.Errorf("made at %d, NATS away %t: the home publishes %t, the reader claims %t", after, away,
					published, claimed)
			}
		}
	}
}

// TestAYieldThatIsThereAgainTakesNoTurn: a home asks for its yield each quarter of the delay until it has
// read it. Cluster 2 is gone. Cluster 3 lives.
func TestAYieldThatIsThereAgainTakesNoTurn(t *testing.T) {
	t.Parallel()
	h := publishingHome(3)
	r := NewReader(Config{Self: 3, Count: 3, Delay: 100, Beat: 10}, 1)
	r.Start(-1000)
	r.End(0)
	r.Row(0, &relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7})
	r.Row(0, &relay.ClusterRow{Kind: relay.Echo, By: 3, Home: 1, Hello: 7})
	r.Commit(0, 30)
	h.Away(0)
	for now := time.Duration(0); now < 350; now++ { // the home does not read its yield meanwhile
		if row := h.Next(now); row.Kind != 0 {
			r.Row(now, &row)
		}
		if at(&r, now).Kind == relay.Claim {
			return
		}
	}
	t.Error("nobody claims")
}

// TestAHelloThatIsThereTwiceIsNoNewOne: the process stood still before it read its hello, and asked for it
// once more. That one lands behind the sign of life of the next start, which has to say a new hello: others
// have answered the first one, and may have claimed since. Or another process reads it, which goes on from
// what was kept before the first one was read, or when the new one was to be said.
func TestAHelloThatIsThereTwiceIsNoNewOne(t *testing.T) {
	t.Parallel()
	for kept := range 3 {
		sign := relay.ClusterRow{Kind: relay.Published, By: 1}
		hello := relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}
		h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
		h.Start(0)
		h.Next(0)
		h.Row(&sign, 1, 0)
		h.Number(7)
		for _, now := range []time.Duration{1, 200} { // the second one is under way until 220
			if row := h.Next(now); row != hello {
				t.Fatal(row.Content())
			}
		}
		if kept == 1 {
			h = HomeFrom(h.cfg, h.State())
		}
		h.Start(3)
		h.Row(&hello, 2, 1)
		h.Row(&relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}, 3, 5)
		h.Next(203)
		h.Row(&sign, 4, 203)
		if !h.Nameless() {
			t.Fatal("no hello behind a silence of two delays")
		}
		if kept == 2 {
			h = HomeFrom(h.cfg, h.State())
			h.Start(4)
		}
		h.Row(&hello, 5, 220)
		h.Row(&sign, 6, 221)
		if got := h.May(100, 100); got != Wait || !h.Nameless() {
			t.Errorf("kept %d: %v", kept, got)
		}
	}
}

// TestAReaderMadeBehindAnEchoPassesOverALateClaim: for everybody else it is void, as cluster 3 has echoed
// hello 2 before it. Who counted it would claim only what comes behind it, and the home would leave all.
func TestAReaderMadeBehindAnEchoPassesOverALateClaim(t *testing.T) {
	t.Parallel()
	r := NewReader(Config{Self: 2, Count: 3, Delay: 100, Beat: 10}, 1)
	r.Start(0)
	r.End(1)
	r.First(10)
	for _, row := range []relay.ClusterRow{
		{Kind: relay.Published, By: 1, To: 10, Hello: 2},
		{Kind: relay.Claim, By: 3, Home: 1, Hello: 1, From: 10, To: 15},
		{Kind: relay.Echo, By: 2, Home: 1, Hello: 2},
	} {
		r.Row(1, &row)
	}
	r.Commit(2, 30)
	for now := time.Duration(2); now < 1000; now++ {
		if row := at(&r, now); row.Kind == relay.Claim {
			if row.From != 10 || row.To != 30 {
				t.Errorf("it claims %v to %v", row.From, row.To)
			}
			return
		}
	}
	t.Error("it does not claim")
}
