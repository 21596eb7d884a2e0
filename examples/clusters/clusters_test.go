package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

func TestMain(m *testing.M) {
	natsserver.Child()
	os.Exit(m.Run())
}

// played plays the example, smaller, and returns what it said.
func played(t *testing.T, mode string, delay time.Duration) (verdict, string) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs six servers and nine outflows: not with -short")
	}
	if _, err := newEnough(pgserver.Installations()); err != nil {
		tier.Missing(t, "pg"+strconv.Itoa(pgserver.Newest), "%v", err)
	}
	var out strings.Builder
	v, err := play(t.Context(), options{outflow: binary(t), events: 50, mode: mode,
		delay: delay}, &out)
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	t.Logf("\n%s", out.String())
	if err := v.good(); err != nil {
		t.Error(err)
	}
	return v, out.String()
}

// TestEachEventIsReadOnceThoughAClusterDies: through Outflow each event comes to each reader once and in
// order; through the naive relays as often as there are clusters, at least.
func TestEachEventIsReadOnceThoughAClusterDies(t *testing.T) {
	v, story := played(t, shared, 5*time.Second)
	each := v.(*perReader)
	for home, readers := range each.relays {
		for at, f := range readers {
			if f.missing > 0 || f.twice < (clusters-1)*each.committed[home] {
				t.Errorf("home %d through the relays, read at cluster %d: %+v of %d events", home+1, at+1, f,
					each.committed[home])
			}
		}
	}
	for _, act := range []string{
		`cluster [12] goes on with the stream of home 3`, `BACK +home 3 makes its stream itself`,
		`cluster [23] goes on with its stream`, `BACK +it has seen`,
	} {
		if !regexp.MustCompile(act).MatchString(story) {
			t.Errorf("the story lacks %q", act)
		}
	}
}

// TestIslandsGoOnForEachOther: each event is in the stream of one cluster, or of two if its home had
// published it first; others have published for the homes that fell silent.
func TestIslandsGoOnForEachOther(t *testing.T) {
	// Within it a home has to hear the others' answers, also on a machine where everything, and other tests
	// beside it, shares two cores.
	const delay = 20 * time.Second
	v, _ := played(t, islands, delay)
	for home, f := range v.(*unions).outflow {
		for at, n := range f.by {
			if at == home && n == 0 {
				t.Errorf("home %d has published nothing", home+1)
			}
		}
		if n := f.published + f.twice - f.by[home]; (n > 0) != (home != 1) {
			t.Errorf("others have published %d events of home %d", n, home+1)
		}
	}
	for home, f := range v.(*unions).relays {
		if f.missing > 0 || f.twice < (clusters-1)*v.(*unions).committed[home] {
			t.Errorf("home %d through the relays: %+v", home+1, f)
		}
	}
}

// binary is the program outflow: OUTFLOW_TEST_BINARY, if it is built already.
func binary(t *testing.T) string {
	t.Helper()
	if built := os.Getenv("OUTFLOW_TEST_BINARY"); built != "" {
		return built
	}
	if _, err := exec.LookPath("go"); err != nil {
		tier.Missing(t, "go", "needs the go command to build outflow: %v", err)
	}
	to := filepath.Join(t.TempDir(), "outflow")
	cmd := exec.Command("go", "build", "-o", to, "./cmd/outflow")
	cmd.Dir = filepath.Join("..", "..")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return to
}

// TestTheVerdictSeesWhatIsWrong: a reader that gets an event twice, late or never is found.
func TestTheVerdictSeesWhatIsWrong(t *testing.T) {
	t.Parallel()
	own := map[sequence]int{{"note", "ada@1"}: 4, {"note", "grace@1"}: 1}
	for name, test := range map[string]struct {
		keys string
		want found
	}{
		"exact":    {"ada@1:1 ada@1:2 grace@1:1 ada@1:3 ada@1:4", found{figures: figures{events: 5}}},
		"missing":  {"ada@1:1 ada@1:2 ada@1:4", found{missing: 2, figures: figures{events: 3}}},
		"twice":    {"ada@1:1 grace@1:1 ada@1:2 ada@1:3 grace@1:1 ada@1:4", found{figures: figures{5, 1, 0}}},
		"late":     {"ada@1:2 ada@1:1 ada@1:4 ada@1:3 grace@1:1", found{figures: figures{5, 0, 2}}},
		"all":      {"ada@1:2 ada@1:1 ada@1:2", found{3, figures{2, 1, 1}}},
		"no event": {"", found{missing: 5}},
	} {
		tally := newTally()
		for i, key := range strings.Fields(test.keys) {
			tally.add(uint64(i+1), time.Now(), "note", key) //nolint:gosec // it is not below 0
		}
		if got := tally.against(own, 1); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
		v := perReader{committed: [clusters]int{5, 5, 5}}
		v.outflow[0][2] = test.want
		if err := v.good(); (err == nil) != (name == "exact") {
			t.Errorf("%s: the verdict says %v", name, err)
		}
		if strangers := tally.strangers(2); (len(strangers) > 0) != (test.keys != "") {
			t.Errorf("%s: in another home's stream: %v", name, strangers)
		}
	}
}

// TestTheVerdictOfIslandsSeesWhatIsWrong: an event that its home published first may be in one other stream,
// and nothing else is good.
func TestTheVerdictOfIslandsSeesWhatIsWrong(t *testing.T) {
	t.Parallel()
	begun := time.Now()
	own := map[sequence]int{{"note", "ada@1"}: 3}
	for name, test := range map[string]struct {
		streams [clusters]string // of each cluster: the event, and the second at which it was stored
		want    together
	}{
		"exact": {[clusters]string{"1/0 3/5", "2/3"},
			together{by: [clusters]int{2, 1}, published: 3}},
		"said too late": {[clusters]string{"1/0 2/1 3/8", "2/6"},
			together{by: [clusters]int{3, 1}, published: 3, twice: 1}},
		"the home after": {[clusters]string{"1/0 2/7 3/8", "2/6"},
			together{by: [clusters]int{3, 1}, published: 3, twice: 1, strange: 1}},
		"two others": {[clusters]string{"1/0 3/8", "2/6", "2/6"},
			together{by: [clusters]int{2, 1, 1}, published: 3, strange: 1}},
		"the same": {[clusters]string{"1/0 2/1 2/2 3/3"},
			together{by: [clusters]int{3}, published: 3, strange: 1}},
		"late": {[clusters]string{"1/0", "", "3/5 2/6"},
			together{by: [clusters]int{1, 0, 2}, published: 3, late: 1}},
		"missing": {[clusters]string{"1/0 3/1"},
			together{by: [clusters]int{2}, published: 2, missing: 1}},
	} {
		m := &mesh{}
		for _, stream := range test.streams {
			t := newTally()
			for i, event := range strings.Fields(stream) {
				key, second, _ := strings.Cut(event, "/")
				at, _ := time.ParseDuration(second + "s")
				t.add(uint64(i+1), begun.Add(at), "note", "ada@1:"+key) //nolint:gosec // it is not below 0
			}
			m.all = append(m.all, &cluster{streams: []*tally{t}})
		}
		got := m.against(own, 1)
		if got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
		v := unions{committed: [clusters]int{3, 3, 3}, outflow: [clusters]together{got}}
		if err := v.good(); (err == nil) != (name == "exact" || name == "said too late") {
			t.Errorf("%s: the verdict says %v", name, err)
		}
	}
}

// TestTheStoryIsNeverSilent: when nothing happens it says how things are.
func TestTheStoryIsNeverSilent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		s := newStory(&out)
		time.Sleep(5 * time.Second)
		s.tellsOf(func() string { return "reading" })
		time.Sleep(time.Second)
		s.say("KILL")
		time.Sleep(5 * time.Second)
		s.quiet()
		s.quiet()
		last := 0.0
		for line := range strings.Lines(out.String()) {
			var at float64
			if _, err := fmt.Sscan(line, &at); err != nil || at > last+2 {
				t.Errorf("%v s, %v, is followed by %q", last, err, line)
			}
			last = at
		}
		if last < 9 || strings.Count(out.String(), "reading") < 3 || !strings.Contains(out.String(), "KILL") {
			t.Errorf("the story:\n%s", out.String())
		}
	})
}
