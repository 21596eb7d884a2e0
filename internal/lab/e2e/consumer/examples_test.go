package consumer

import (
	"context"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// The examples' own demos are run as a reader runs them, smaller: servers, outflow, the example's programs,
// killed on the way. Their verdict is computed from the database and the stream; the exit code is 0 only if
// it is good.

func TestOrdersAreReservedOnceThoughProgramsAreKilled(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	out := example(t, "orders", "-orders", "700")
	if n := strings.Count(out, "kill -9"); n < 7 {
		t.Errorf("%d programs were killed, want 7", n)
	}
	if !regexp.MustCompile(`verdict: 700 orders, [1-9]\d* reserved, [1-9]\d* refused`).MatchString(out) {
		t.Errorf("want 700 orders, of which some could be reserved and some not")
	}
	if n := len(regexp.MustCompile(`(?m)^ +0  (orders|items)`).FindAllString(out, -1)); n != 5 {
		t.Errorf("%d lines of the verdict are 0, want 5", n)
	}
	if t.Failed() {
		t.Log(out)
	}
}

func TestTheInventoryIsExactThoughProgramsAreKilled(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	out := example(t, "inventory", "-events", "900")
	good := regexp.MustCompile(
		`verdict: 900 events; items that are wrong: 0 before the bad deploy, [1-9]\d* by it, 0 after its repair\n` +
			`.* equal, byte for byte,.*\n.* the past, from the archive alone: 0 of [1-9]\d* items are not`)
	if !good.MatchString(out) {
		t.Errorf("the verdict is not what it should be:\n%s", out)
	}
}

// example builds an example and plays it.
func example(t *testing.T, name string, args ...string) string {
	t.Helper()
	pgtest.Majors(t) // skips where PostgreSQL is not here
	dir := t.TempDir()
	home := harness.Path("examples", name)
	build := exec.Command("go", "-C", filepath.Dir(home), "build", "-ldflags=-w", "-o", dir, "./"+name, "./"+
		name+"/show")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*harness.Patience)
	defer cancel()
	args = append([]string{
		"-outflow", harness.Binary, "-" + name + "-binary", filepath.Join(dir, name),
		"-config", filepath.Join(home, "outflow.yaml"), "-schema", filepath.Join(home, "schema.sql"),
	}, args...)
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "show"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}
