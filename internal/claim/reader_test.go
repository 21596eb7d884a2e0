package claim

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

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
