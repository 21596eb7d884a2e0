// Package script runs the scripts in a package's testdata: lines of input, with what the code under test says
// to each below it, behind ">".
package script

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

var update = flag.Bool("update", false, "write what the tests print into testdata")

// Script is one of them while it runs. What is printed to Out stands below the line in hand.
type Script struct{ Out strings.Builder }

// Do carries out a line: its first word and the others.
type Do func(verb string, args []string) error

// Run runs testdata/*.txt, at least so many, each as a parallel subtest with a state that begin makes, and
// compares what they print with what is there. With -update it writes that instead.
func Run(t *testing.T, least int, begin func(*testing.T, *Script) Do) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) < least {
		t.Fatalf("scripts %v, %v", files, err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(name)
			must.Succeed(t, err)
			var s Script
			got := s.run(t, string(text), begin(t, &s))
			if *update {
				err = os.WriteFile(name, []byte(got), 0o644)
			}
			if err != nil || !*update && got != string(text) {
				t.Errorf("%s prints %v\n%s", name, err, got)
			}
		})
	}
}

func (s *Script) run(t *testing.T, text string, do Do) string {
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		if strings.HasPrefix(line, ">") {
			continue
		}
		s.Out.WriteString(line + "\n")
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] != "#" {
			if err := do(fields[0], fields[1:]); err != nil {
				t.Fatalf("line %d: %s: %v", i+1, line, err)
			}
		}
	}
	return s.Out.String()
}
