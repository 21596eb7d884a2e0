package pgserver

import (
	"strings"
	"testing"
)

func TestAnAddressIsGivenAnotherDatabase(t *testing.T) {
	t.Parallel()
	got, err := InDatabase("postgres://me:secret@db:5433/app?sslmode=require", "other")
	if want := "postgres://me:secret@db:5433/other?sslmode=require"; err != nil || got != want {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	for _, bad := range []string{"host=db password=secret", "postgres://me:secret@db:port"} {
		if got, err := InDatabase(bad, "other"); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q, %v", got, err)
		}
	}
}
