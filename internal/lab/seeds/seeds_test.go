package seeds

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var (
	_ = flag.Uint64("seed", 1, "the first seed")
	_ = flag.Int("trials", 3, "seeds")
)

// TestOneSeedOfTheSimulation is what TestAFailedSeedIsKeptAndRunsFirst runs in a process of its own: it
// prints its seeds, and fails with the one that it is told.
func TestOneSeedOfTheSimulation(t *testing.T) {
	fails, told := os.LookupEnv("SEEDS_FAIL")
	if !told {
		t.Skip("run by TestAFailedSeedIsKeptAndRunsFirst")
	}
	i := 0
	Each(t, "seed", "trials", 3, func(seed uint64) {
		t.Logf("seed=%d", seed)
		if i++; fails == "2" && i == 2 {
			t.Error("it fails")
		}
	})
}

// simulated runs it in a folder, and returns the seeds that it ran and what it printed.
func simulated(t *testing.T, folder string, env []string, args ...string) (seeds []string, output string) {
	t.Helper()
	cmd := exec.Command(
		os.Args[0],
		append([]string{"-test.run=^TestOneSeedOfTheSimulation$", "-test.v"}, args...)...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "SEEDS_FAIL=", "OUTFLOW_TEST_LONG=")
	cmd.Env = append(cmd.Env, env...)
	out, _ := cmd.CombinedOutput() // that it fails is what some want to see
	for line := range strings.Lines(string(out)) {
		if _, seed, found := strings.Cut(strings.TrimSpace(line), "seed="); found &&
			!strings.Contains(line, "again") {
			seeds = append(seeds, seed)
		}
	}
	return seeds, string(out)
}

// TestAFailedSeedIsKeptAndRunsFirst: the same seeds each time, and fresh ones in the long tests, of which one
// that fails is kept and runs first from then on.
func TestAFailedSeedIsKeptAndRunsFirst(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	long := []string{"OUTFLOW_TEST_LONG=1"}
	if got, out := simulated(t, folder, nil); !slices.Equal(got, []string{"1", "2", "3"}) {
		t.Fatalf("seeds %v: %s", got, out)
	}
	if got, out := simulated(t, folder, []string{"SEEDS_FAIL=2"}); len(got) != 2 ||
		!strings.Contains(
			out,
			"seed 2; again: go test -run '^TestOneSeedOfTheSimulation$' -args -trials=1 -seed=2",
		) {
		t.Errorf("it failed with seeds %v: %s", got, out)
	}
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("a seed that fails always is kept: %v, %v", left, err)
	}
	one, out := simulated(t, folder, long)
	two, _ := simulated(t, folder, long)
	if len(one) != 3 || len(two) != 3 || one[0] == two[0] ||
		!strings.Contains(out, "seeds: TestOneSeedOfTheSimulation: 3 from "+one[0]) {
		t.Errorf("fresh seeds %v, then %v: %s", one, two, out)
	}
	failed, out := simulated(t, folder, append(long, "SEEDS_FAIL=2"))
	kept := filepath.Join("testdata", "seeds", "TestOneSeedOfTheSimulation.txt")
	if len(failed) != 2 || !strings.Contains(out, "it is kept in "+kept) {
		t.Fatalf("it failed with seeds %v: %s", failed, out)
	}
	if got, out := simulated(t, folder, nil); !slices.Equal(got, []string{failed[1], "1", "2", "3"}) {
		t.Errorf("with one that is kept, seeds %v: %s", got, out)
	}
	if got, out := simulated(t, folder, long, "-seed=7"); !slices.Equal(got, []string{"7", "8", "9"}) {
		t.Errorf("with the first one given, seeds %v: %s", got, out)
	}
	if err := os.WriteFile(filepath.Join(folder, kept), []byte("17 a record that came late\n18\n"),
		0o644); err != nil {
		t.Fatal(err)
	}
	if got, out := simulated(t, folder, nil); !slices.Equal(got, []string{"17", "18", "1", "2", "3"}) {
		t.Errorf("with two that are kept, seeds %v: %s", got, out)
	}
}
