package reorder

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

const module = "github.com/outflowhq/outflow/"

// vocabulary prints and parses, so it reaches os and time by way of fmt and encoding/json.
var vocabulary = []string{module + "outbox", module + "internal/relay"}

// TestTheOrderDependsOnTheInputAlone: the order depends on nothing but what is read. The package starts
// nothing, reads no clock, has no map, and reaches no network, context, file or outside library by itself.
func TestTheOrderDependsOnTheInputAlone(t *testing.T) {
	t.Parallel()
	files := list(t, "-f", "{{range .GoFiles}}{{.}}\n{{end}}", ".")
	if len(files) < 10 {
		t.Fatalf("only %v", files)
	}
	var imports []string
	for _, name := range files {
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, name, nil, 0)
		must.Succeed(t, err)
		for _, spec := range f.Imports {
			path, _ := strconv.Unquote(spec.Path.Value)
			imports = append(imports, path)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt, *ast.SelectStmt, *ast.ChanType, *ast.SendStmt:
				t.Errorf("%v: %T", fset.Position(n.Pos()), n)
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" {
					t.Errorf("%v: time.%s", fset.Position(n.Pos()), n.Sel.Name)
				}
			case *ast.MapType:
				t.Errorf("%v: a map, whose order could decide something", fset.Position(n.Pos()))
			}
			return true
		})
	}
	slices.Sort(imports)
	imports = slices.Compact(imports)
	for _, path := range list(t, "-deps", ".") {
		if path == "net" || strings.HasPrefix(path, "net/") || path == "context" ||
			strings.HasPrefix(path, "math/rand") ||
			strings.Contains(strings.Split(path, "/")[0], ".") && !strings.HasPrefix(path, module) {
			t.Errorf("reaches %s", path)
		}
	}
	if slices.Contains(imports, "sync") {
		t.Error("imports sync")
	}
	imports = slices.DeleteFunc(imports, func(path string) bool { return slices.Contains(vocabulary, path) })
	for _, path := range list(t, append([]string{"-deps"}, imports...)...) {
		if path == "os" || path == "time" || path == "syscall" {
			t.Errorf("reaches %s without the vocabulary", path)
		}
	}
}

func list(t *testing.T, args ...string) []string {
	t.Helper()
	out, err := exec.Command("go", append([]string{"list"}, args...)...).Output()
	if err != nil {
		tier.Missing(t, "go", "needs the go command: %v", err)
	}
	return strings.Fields(string(out))
}
