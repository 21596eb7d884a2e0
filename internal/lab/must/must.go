// Package must ends a test whose preparation failed.
package must

import "testing"

// Succeed ends the test if there is an error.
func Succeed(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
