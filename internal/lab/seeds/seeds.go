// Package seeds gives simulations the seeds of their runs: the same ones in every test run, so that a change
// that breaks something is seen at once, and in the long tests others each time, so that more is found than
// was found before. A seed that failed is kept in the package's testdata and runs always from then on, as the
// fuzzer's do.
package seeds

import (
	"bufio"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// Seeds are those of a test.
type Seeds struct {
	List []uint64

	again string // the command, without the seed
	file  string // "": one that fails is not kept
}

// For returns the seeds that are kept for the test, and n from that of a flag on. In the long tests
// (OUTFLOW_TEST_LONG) they begin with a fresh one, which is printed, and one that fails is kept. If the flag
// is given, the n from it are all. trials is the flag that says n.
func For(t *testing.T, seedFlag, trials string, n int) *Seeds {
	t.Helper()
	first, given, err := flagged(flag.CommandLine, seedFlag)
	must.Succeed(t, err)
	s := &Seeds{again: "go test -run '^" + t.Name() + "$' -args -" + trials + "=1 -" + seedFlag + "="}
	if !given {
		file := filepath.Join("testdata", "seeds", t.Name()+".txt")
		if s.List, err = load(file); err != nil {
			t.Fatal(err)
		}
		if tier.Long() {
			s.file, first = file, uint64(rand.Uint32())<<16 // far apart, and short to write
			fmt.Fprintf(os.Stderr, "seeds: %s: %d from %d\n", t.Name(), n, first)
		}
	}
	for i := range n {
		s.List = append(s.List, first+uint64(i))
	}
	return s
}

// Failed says how a seed is run again, and keeps it if it is a fresh one.
func (s *Seeds) Failed(t *testing.T, seed uint64) {
	t.Helper()
	t.Logf("seed %d; again: %s%d", seed, s.again, seed)
	if s.file == "" {
		return
	}
	if err := keep(s.file, seed); err != nil {
		t.Errorf("seed %d is not kept: %v", seed, err)
		return
	}
	t.Logf("it is kept in %s", s.file)
}

// Each runs a simulation with the test's seeds, one after the other, until one fails.
func Each(t *testing.T, seedFlag, trials string, n int, run func(seed uint64)) {
	t.Helper()
	s := For(t, seedFlag, trials, n)
	var seed uint64
	t.Cleanup(func() {
		if t.Failed() {
			s.Failed(t, seed)
		}
	})
	for _, seed = range s.List {
		if run(seed); t.Failed() {
			return
		}
	}
}

// flagged is the flag's value, and whether it was given.
func flagged(set *flag.FlagSet, name string) (value uint64, given bool, err error) {
	f := set.Lookup(name)
	if f == nil {
		return 0, false, fmt.Errorf("no flag -%s", name)
	}
	set.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	value, err = strconv.ParseUint(f.Value.String(), 10, 64)
	return value, given, err
}

// load reads the seeds that are kept in a file, one a line. What follows a seed in its line says why.
func load(file string) (seeds []uint64, err error) {
	f, err := os.Open(file)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		number, _, _ := strings.Cut(lines.Text(), " ")
		seed, err := strconv.ParseUint(number, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		seeds = append(seeds, seed)
	}
	return seeds, nil
}

// keep adds a seed to those of a file.
func keep(file string, seed uint64) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, seed)
	if also := f.Close(); err == nil {
		err = also
	}
	return err
}
