// Package must ends a test whose preparation failed. It is internal to Outflow: its API may change at any
// time.
package must

import "testing"

// Succeed ends the test if there is an error.
func Succeed(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
