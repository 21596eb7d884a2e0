package claim

import (
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

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

// TestTwoShortFailuresWhileAHomeWaitsAreNoYield: it sends nothing then, so it does not know whether NATS
// would have refused it.
func TestTwoShortFailuresWhileAHomeWaitsAreNoYield(t *testing.T) {
	t.Parallel()
	h := NewHome(Config{Self: 1, Count: 2, Delay: 100, Beat: 10})
	h.Start(0)
	h.Row(&relay.ClusterRow{Kind: relay.Published, By: 1}, 1, 0)
	h.Number(7)
	lives(&h, 1, 10)
	h.Away(10)
	lives(&h, 10, 12)
	h.Back()
	lives(&h, 12, 95)
	h.Away(95)
	h.Row(&relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}, 5000, 97)
	lives(&h, 97, 115)
	h.Back()
	if got := h.May(100, 100); got != Publish {
		t.Errorf("%v behind a failure of 20: %+v", got, h.State())
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

// TestAHelloThatIsThereTwiceIsNoNewOne: the process stood still before it read its hello, and asked for it
// once more. That one lands behind the sign of life of the next start, which has to say a new hello: others
// have answered the first one, and may have claimed since. Or another process reads it, which goes on from
// what was kept before the first one was read, or when the new one was to be said.
func TestAHelloThatIsThereTwiceIsNoNewOne(t *testing.T) {
	t.Parallel()
	for kept := range 4 {
		sign := relay.ClusterRow{Kind: relay.Published, By: 1}
		hello := relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}
		echo := relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}
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
		if kept < 3 {
			h.Row(&echo, 3, 5)
		}
		h.Next(203)
		h.Row(&sign, 4, 203)
		if !h.Nameless() {
			t.Fatal("no hello behind a silence of two delays")
		}
		if kept >= 2 {
			h = HomeFrom(h.cfg, h.State())
			h.Start(4)
		}
		if kept == 3 { // the answer comes behind what was kept
			h.Row(&echo, 5, 210)
		}
		h.Row(&hello, 6, 220)
		h.Row(&sign, 7, 221)
		if got := h.May(100, 100); got != Wait || !h.Nameless() {
			t.Errorf("kept %d: %v", kept, got)
		}
	}
}
