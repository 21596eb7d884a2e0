// Package harness runs the built program for the end-to-end tests: installations of it, its commands, their
// reports and logs, the load on its table, and comparisons of stream and table.
package harness

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/failpoint"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// Binary is the program under test, Lab the one beside it that can be told to harm itself.
var Binary, Lab string

// Program returns which of the two an environment is for.
func Program(env []string) string {
	if slices.ContainsFunc(env, failpoint.Sets) {
		return Lab
	}
	return Binary
}

// Main is the TestMain of every package of end-to-end tests.
func Main(m *testing.M) {
	natstest.RunChild()
	flag.Parse()
	await.WatchMachine()
	smoke = os.Getenv("OUTFLOW_TEST_E2E") == "" && flag.Lookup("test.run").Value.String() == ""
	// The tests wait, for servers and for rechecks, more than they compute: more of them run at the same
	// time than there are cores, and those of a library beside them. -test.parallel has its way.
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("3")
	}
	if Binary = os.Getenv("OUTFLOW_TEST_BINARY"); Binary == "" {
		dir, err := build()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		Binary = filepath.Join(dir, "outflow")
	}
	Lab = filepath.Join(filepath.Dir(Binary), "outflow-lab")
	pgtest.Main(m)
}

// build builds both programs in the user's cache, where the next package of tests finds them, and returns the
// folder.
func build() (dir string, err error) {
	if dir, err = os.UserCacheDir(); err != nil {
		return "", err
	}
	dir = filepath.Join(dir, "outflow-test")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close() // and with it the lock
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	if out, err := exec.Command("go", "build", "-o", dir+"/", Path("cmd")+
		"/...").CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return dir, nil
}

// Path is a path in the repository.
func Path(elem ...string) string {
	dir, err := os.Getwd() // of the package under test
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return filepath.Join(append([]string{dir}, elem...)...)
		}
		if dir == filepath.Dir(dir) {
			err = errors.New("no go.mod above the tests")
		}
		dir = filepath.Dir(dir)
	}
	panic(err)
}
