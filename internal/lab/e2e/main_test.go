package e2e

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/failpoint"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// binary is the program under test, lab the one beside it that can be told to harm itself.
var binary, lab string

// program returns which of the two an environment is for.
func program(env []string) string {
	if slices.ContainsFunc(env, failpoint.Sets) {
		return lab
	}
	return binary
}

func TestMain(m *testing.M) {
	natstest.RunChild()
	flag.Parse()
	await.WatchMachine()
	smoke = os.Getenv("OUTFLOW_TEST_E2E") == "" && flag.Lookup("test.run").Value.String() == ""
	// The tests wait, for servers and for second readings, more than they compute: more of them run at the same time than there are
	// cores. -test.parallel has its way.
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("6")
	}
	os.Exit(withBinary(m))
}

func withBinary(m *testing.M) int {
	if binary = os.Getenv("OUTFLOW_TEST_BINARY"); binary == "" {
		dir, err := os.MkdirTemp("", "outflow")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "outflow")
		if out, err := exec.Command("go", "build", "-o", dir+"/", "../../../cmd/...").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
			return 1
		}
	}
	lab = filepath.Join(filepath.Dir(binary), "outflow-lab")
	return pgtest.Tests(m).Run()
}
