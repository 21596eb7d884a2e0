package pgserver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

func TestVersionsAreParsedAsPostgreSQLPrintsThem(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]struct {
		major, minor int
		version      string
	}{
		"postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)\n": {15, 14, "15.14"},
		"postgres (PostgreSQL) 18.4\n":                           {18, 4, "18.4"},
		"postgres (PostgreSQL) 19beta1\n":                        {},
		"no such thing":                                          {},
	} {
		major, minor, version, err := parseVersion(in)
		if major != want.major || minor != want.minor || version != want.version ||
			(err == nil) != (want.major > 0) {
			t.Errorf("parseVersion(%q) = %d, %d, %q, %v", in, major, minor, version, err)
		}
	}
}

// fake makes a folder that looks like an installation.
func fake(t *testing.T, dir, version string, tools ...string) string {
	t.Helper()
	bin := filepath.Join(dir, version, "bin")
	must.Succeed(t, os.MkdirAll(bin, 0o755))
	for _, name := range append(tools, "postgres", "initdb") {
		script := "#!/bin/sh\necho 'postgres (PostgreSQL) " + version + "'\n"
		must.Succeed(t, os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755))
	}
	real, err := filepath.EvalSymlinks(bin)
	must.Succeed(t, err)
	return real
}

func TestFindPrefersWhatIsNamed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("OUTFLOW_CACHE", filepath.Join(dir, "cache"))
	old := fake(t, dir, "17.1")
	cached := fake(t, filepath.Join(dir, "cache", "postgres"), "17.99")
	for _, i := range Installations() {
		if i.Bin == cached {
			t.Errorf("found %v, of which only the programs are there", i)
		}
	}
	for _, file := range []string{"lib/postgresql/pgoutput.so", "share/postgresql/postgres.bki"} {
		file = filepath.Join(filepath.Dir(cached), file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755),
			os.WriteFile(file, []byte("x"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range Installations() {
		if i.Major == 17 && i.Version != "17.99" {
			t.Errorf("found %v before OUTFLOW_PG_BIN, want 17.99", i)
		}
	}
	t.Setenv("OUTFLOW_PG_BIN", old)
	for _, major := range []int{0, 17} {
		if i, err := Find(major); err != nil || i.Bin != old {
			t.Errorf("Find(%d) = %v, %v, want the one in %s", major, i, err, old)
		}
	}
}

func TestFindSaysHowToInstall(t *testing.T) {
	_, err := Find(9)
	if err == nil || !strings.Contains(err.Error(), "install") || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %v, want one line with the command", err)
	}
}
