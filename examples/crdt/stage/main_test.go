package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

func TestMain(m *testing.M) {
	natsserver.Child()
	code := m.Run()
	if binaries.dir != "" {
		_ = os.RemoveAll(binaries.dir) // the system's temporary folder has it else
	}
	os.Exit(code)
}

// binaries are built once. OUTFLOW_TEST_BINARY names Outflow's, if it is built already.
var binaries struct {
	once          sync.Once
	dir           string
	outflow, crdt string
	err           error
}

func build() {
	b := &binaries
	if b.dir, b.err = os.MkdirTemp("", "outflow-crdt-test-"); b.err != nil {
		return
	}
	b.outflow, b.crdt = os.Getenv("OUTFLOW_TEST_BINARY"), filepath.Join(b.dir, "crdt")
	wanted := map[string]string{b.crdt: "examples/crdt"}
	if b.outflow == "" {
		b.outflow = filepath.Join(b.dir, "outflow")
		wanted[b.outflow] = "cmd/outflow"
	}
	for to, pkg := range wanted {
		cmd := exec.Command("go", "build", "-o", to, ".")
		cmd.Dir = filepath.Join("..", "..", "..", filepath.FromSlash(pkg))
		if out, err := cmd.CombinedOutput(); err != nil {
			b.err = fmt.Errorf("go build %s: %w\n%s", pkg, err, out)
			return
		}
	}
}

// newWorld starts everything for a test.
func newWorld(t *testing.T, yjs, stage string) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("runs two servers and seven programs: not with -short")
	}
	if _, err := pgserver.Find(0); err != nil {
		tier.Missing(t, "postgres", "%v", err)
	}
	if _, err := exec.LookPath("go"); err != nil {
		tier.Missing(t, "go", "needs the go command to build the example: %v", err)
	}
	binaries.once.Do(build)
	if binaries.err != nil {
		t.Fatal(binaries.err)
	}
	w := &world{options: options{outflow: binaries.outflow, crdt: binaries.crdt, yjs: yjs, stage: stage}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(w.logs())
		}
		if err := w.close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(w.dir); err == nil {
			t.Errorf("%s is left behind", w.dir)
		}
	})
	if err := w.start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return w
}

// library returns the folder of the CRDT library, fetched if need be.
func library(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("not with -short")
	}
	var why strings.Builder
	cmd := exec.CommandContext(t.Context(), filepath.Join("..", "fetch-yjs"))
	cmd.Stderr = &why
	out, err := cmd.Output()
	if err != nil {
		tier.Missing(t, "yjs", "the CRDT library is not here and cannot be fetched: "+
			"examples/crdt/fetch-yjs: %v\n%s", err, why.String())
	}
	return strings.TrimSpace(string(out))
}
