package rules

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// program is the module's source with its types, without tests.
type program struct {
	set      *token.FileSet
	packages map[string]*types.Package
	files    []*ast.File
	info     *types.Info
}

// load type-checks the packages that the roots reach: those of the module from their source, others from what
// the compiler has of them.
func load(t *testing.T, roots ...string) program {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-deps", "-export",
		"-json=ImportPath,Dir,GoFiles,Export,Standard"}, roots...)...)
	cmd.Dir = filepath.Join("..", "..", "..")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	p := program{set: token.NewFileSet(), packages: map[string]*types.Package{}, info: &types.Info{
		Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{},
		Defs: map[*ast.Ident]types.Object{}, Selections: map[*ast.SelectorExpr]*types.Selection{},
	}}
	exports := map[string]string{}
	compiled := importer.ForCompiler(p.set, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})
	config := types.Config{Importer: importing(func(path string) (*types.Package, error) {
		if pkg, ok := p.packages[path]; ok {
			return pkg, nil
		}
		return compiled.Import(path)
	})}
	for d := json.NewDecoder(out); ; {
		var pkg struct {
			ImportPath, Dir, Export string
			GoFiles                 []string
			Standard                bool
		}
		if err := d.Decode(&pkg); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[pkg.ImportPath] = pkg.Export
		if !within(pkg.ImportPath, module) {
			continue
		}
		var files []*ast.File
		for _, name := range pkg.GoFiles {
			file, err := parser.ParseFile(p.set, filepath.Join(pkg.Dir, name), nil,
				parser.SkipObjectResolution)
			must.Succeed(t, err)
			files = append(files, file)
		}
		p.packages[pkg.ImportPath], err = config.Check(pkg.ImportPath, p.set, files, p.info)
		must.Succeed(t, err)
		p.files = append(p.files, files...)
	}
	must.Succeed(t, cmd.Wait())
	return p
}

type importing func(path string) (*types.Package, error)

func (f importing) Import(path string) (*types.Package, error) { return f(path) }

// flow is an expression that is assigned to a variable, field or parameter, and where: in a literal, in a
// call or neither.
type flow struct {
	value ast.Expr
	lit   *ast.CompositeLit
	call  *ast.CallExpr
}

// flows returns what is assigned to each variable, field and parameter.
func (p program) flows() map[types.Object][]flow {
	all := map[types.Object][]flow{}
	add := func(to types.Object, f flow) {
		if v, ok := to.(*types.Var); ok {
			all[v.Origin()] = append(all[v.Origin()], f)
		}
	}
	for _, file := range p.files {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CompositeLit:
				s, isStruct := p.info.Types[n].Type.Underlying().(*types.Struct)
				for i, e := range n.Elts {
					if kv, ok := e.(*ast.KeyValueExpr); isStruct && ok {
						add(p.info.Uses[kv.Key.(*ast.Ident)], flow{value: kv.Value, lit: n})
					} else if isStruct {
						add(s.Field(i), flow{value: e, lit: n})
					}
				}
			case *ast.AssignStmt:
				for i, to := range n.Lhs {
					add(p.object(to), flow{value: n.Rhs[min(i, len(n.Rhs)-1)]})
				}
			case *ast.ValueSpec:
				for i, e := range n.Values {
					add(p.info.Defs[n.Names[i]], flow{value: e})
				}
			case *ast.CallExpr:
				if o, ok := p.object(n.Fun).(*types.Func); ok {
					params := o.Origin().Signature().Params()
					for i := range min(len(n.Args), params.Len()) {
						add(params.At(i), flow{value: n.Args[i], call: n})
					}
				} else if sig, ok := p.info.Types[n.Fun].Type.(*types.Signature); ok { // of a local function
					for i := range min(len(n.Args), sig.Params().Len()) {
						add(sig.Params().At(i), flow{value: n.Args[i], call: n})
					}
				}
			}
			return true
		})
	}
	return all
}

// field returns a field of a struct of the module.
func (p program) field(t *testing.T, in, of, name string) types.Object {
	t.Helper()
	pkg := p.packages[module+"/"+in]
	o, _, _ := types.LookupFieldOrMethod(pkg.Scope().Lookup(of).Type(), true, pkg, name)
	if o == nil {
		t.Fatalf("%s.%s has no field %s", in, of, name)
	}
	return o
}

// object returns what an expression names.
func (p program) object(e ast.Expr) types.Object {
	switch e := ast.Unparen(e).(type) {
	case *ast.Ident:
		if o := p.info.Defs[e]; o != nil {
			return o
		}
		return p.info.Uses[e]
	case *ast.SelectorExpr:
		return p.info.Uses[e.Sel]
	case *ast.StarExpr:
		return p.object(e.X)
	}
	return nil
}

// codes returns the codes of all faults that the program can make, each with the classes that go with it, and
// those that doctor reports.
func (p program) codes(t *testing.T) map[string][]outbox.Class {
	t.Helper()
	flows, codes, seen := p.flows(), map[string][]outbox.Class{}, map[types.Object]bool{}
	code, class := p.field(t, "outbox", "Fault", "Code"), p.field(t, "outbox", "Fault", "Class")
	var follow func(to types.Object, class ast.Expr)
	value := func(e ast.Expr, class ast.Expr) {
		found := func(v constant.Value) {
			name := constant.StringVal(v)
			if name == "" {
				return
			}
			if codes[name] == nil {
				codes[name] = []outbox.Class{} // it is made, whatever its class
			}
			if c := p.info.Types[class].Value; c != nil {
				n, _ := constant.Uint64Val(c)
				codes[name] = append(codes[name], outbox.Class(n))
			}
		}
		if v := p.info.Types[e].Value; v != nil {
			found(v)
			return
		}
		if call, ok := e.(*ast.CallExpr); ok && p.info.Types[call.Fun].IsType() {
			// what is converted has a type of its own: it is one of its constants
			for _, o := range p.info.Defs {
				if c, ok := o.(*types.Const); ok &&
					types.Identical(c.Type(), p.info.Types[call.Args[0]].Type) {
					found(c.Val())
				}
			}
			return
		}
		if v, ok := p.object(e).(*types.Var); ok {
			follow(v.Origin(), class)
			return
		}
		t.Errorf("%s: which code is this?", p.set.Position(e.Pos()))
	}
	follow = func(to types.Object, in ast.Expr) {
		// what comes from the catalogue is in it
		if seen[to] || to.Pkg().Path() == module+"/internal/finding" {
			return
		}
		seen[to] = true
		// what nothing is assigned to is empty, or decoded from what another process of Outflow says
		if v, ok := to.(*types.Var); ok && !v.IsField() && len(flows[to]) == 0 {
			t.Errorf("%s: which code is %s?", p.set.Position(to.Pos()), to.Name())
		}
		for _, f := range flows[to] {
			of := in
			if f.lit != nil {
				for _, c := range flows[class] {
					if c.lit == f.lit {
						of = c.value
					}
				}
			}
			if f.call != nil && of != nil && p.info.Types[of].Value == nil {
				for _, c := range flows[p.object(of)] {
					if c.call == f.call {
						of = c.value
					}
				}
			}
			value(f.value, of)
		}
	}
	follow(code, nil)
	follow(p.field(t, "internal/operate/doctor", "Result", "Code"), nil)
	return codes
}

// TestEveryCodeIsInTheCatalogue: each code of a fault that the program makes, or that doctor reports, has an
// entry with the fault's class, and each entry has something that makes it.
func TestEveryCodeIsInTheCatalogue(t *testing.T) {
	t.Parallel()
	made := load(t, "./cmd/outflow", "./consumer/...", "./producer/...").codes(t)
	for code, classes := range made {
		f, ok := finding.Of(code)
		if !ok {
			t.Errorf("%s has no entry in internal/finding", code)
			continue
		}
		for _, c := range classes {
			if !slices.Contains(f.Classes, c) {
				t.Errorf("%s: its entry lacks class %v", code, c)
			}
		}
	}
	for _, f := range finding.All() {
		if made[f.Code] == nil {
			t.Errorf("%s has an entry, and nothing has this code", f.Code)
		}
	}
}
