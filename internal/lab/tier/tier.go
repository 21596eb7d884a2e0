// Package tier says which tests run, in which form, and whether one may be left out because the machine lacks
// something.
package tier

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Long tells whether the tests run in their long forms: OUTFLOW_TEST_LONG=1, which scripts/test --long sets.
func Long() bool { return os.Getenv("OUTFLOW_TEST_LONG") != "" }

// Race tells whether the race detector is on, under which simulations are ten times slower.
const Race = race

// Size is how much of a quantity, such as trials or messages, a test takes: all of it, or an eighth, and 1 at
// least, with -short and under the race detector, where a plain run of the same package takes all. Long runs
// always do.
func Size(full int) int {
	if (Race || testing.Short()) && !Long() {
		return max(1, full/8)
	}
	return full
}

// OnlyLong skips a test, or a part of one, that only long runs take.
func OnlyLong(t testing.TB, why string) {
	t.Helper()
	if !Long() {
		t.Skipf("only with OUTFLOW_TEST_LONG=1: %s", why)
	}
}

// Missing skips a test because the machine lacks a thing, or fails it where OUTFLOW_TEST_REQUIRE, a list of
// things with commas, names that thing, as it does in scripts/test --long and on CI machines. The things are
// postgres (of any major), pg14 to pg18, psql, pg_resetwal, go, linux, browser, yjs, npm, python,
// python-drivers, java-drivers, prometheus, pg_upgrade, old-nats, fake-gcs and azurite; the scripts
// themselves ask for race and shellcheck.
func Missing(t testing.TB, thing, format string, args ...any) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("OUTFLOW_TEST_REQUIRE"), ","), thing) {
		t.Fatalf("OUTFLOW_TEST_REQUIRE names "+thing+": "+format, args...)
	}
	t.Skipf(format, args...)
}
