package rules

import (
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// files returns the content of each file of the module with one of the suffixes, by its path from the root
// with slashes.
func files(t *testing.T, suffixes ...string) map[string]string {
	t.Helper()
	return filesIn(t, filepath.Join("..", "..", ".."), suffixes...)
}

// filesIn is files of a folder: in a checkout what git keeps there, as anything may lie beside it; elsewhere
// all there is.
func filesIn(t *testing.T, root string, suffixes ...string) map[string]string {
	t.Helper()
	var names []string
	if _, err := os.Stat(filepath.Join(root, ".git")); err == nil {
		out, err := exec.Command("git", "-C", root, "ls-files", "-z").Output()
		if err != nil {
			t.Fatalf("git ls-files: %v", err)
		}
		names = strings.Split(string(out), "\x00")
	} else if err := fs.WalkDir(os.DirFS(root), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			names = append(names, name)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, name := range names {
		if !slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(name, s) }) {
			continue
		}
		content, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if os.IsNotExist(err) {
			continue // deleted, and not committed yet
		}
		must.Succeed(t, err)
		all[name] = string(content)
	}
	return all
}

// TestOnlyFilesOfTheCheckoutAreLookedAt: what lies beside the files of a checkout is not looked at, be it
// what a package manager has fetched or another checkout.
func TestOnlyFilesOfTheCheckoutAreLookedAt(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, name := range []string{"README.md", "docs/a.md", "docs/a.go", "node_modules/x/README.md",
		"other/README.md", "docs/gone.md"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(root, filepath.Dir(name)), 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(root, name), []byte(name), 0o644))
	}
	look := func() []string { return slices.Sorted(maps.Keys(filesIn(t, root, ".md"))) }
	if got := look(); len(got) != 5 {
		t.Errorf("not in a checkout: %q", got)
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "README.md", "docs"},
		{"-C", "other", "init", "-q"}} {
		cmd := exec.Command("git", args...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	must.Succeed(t, os.Remove(filepath.Join(root, "docs", "gone.md")))
	if got := look(); !slices.Equal(got, []string{"README.md", "docs/a.md"}) {
		t.Errorf("in a checkout: %q", got)
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)#]*)(?:#([^)]*))?\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	noSlug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// slugs returns the anchors of a page.
func slugs(page string) (all []string) {
	for _, h := range heading.FindAllStringSubmatch(page, -1) {
		all = append(all, strings.ReplaceAll(noSlug.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-"))
	}
	return all
}

func TestLinksOfTheDocuments(t *testing.T) {
	t.Parallel()
	pages := files(t, ".md")
	for name, page := range pages {
		for _, l := range link.FindAllStringSubmatch(page, -1) {
			to := name
			if strings.Contains(l[1], "://") {
				continue
			}
			if l[1] != "" {
				to = path.Join(path.Dir(name), l[1])
			}
			if _, err := os.Stat(filepath.Join("..", "..", "..", filepath.FromSlash(to))); err != nil {
				t.Errorf("%s links to %s, which is not there", name, l[0])
			} else if l[2] != "" && !slices.Contains(slugs(pages[to]), l[2]) {
				t.Errorf("%s links to %s, a section that is not there", name, l[0])
			}
		}
	}
}

// TestEachTestThatDocumentsNameExists: a test that the documents name as the proof of something is there, in
// the package that is named with it.
var (
	quoted = regexp.MustCompile("`([a-z0-9_/-]+)`")
	folder = regexp.MustCompile(`^(.*)/[^/]+\.go$`)
)

// TestEachPackageIsInTheArchitecture: a newcomer finds every folder of code in ARCHITECTURE.md, or a folder
// above it, and no line is about a folder that is gone.
func TestEachPackageIsInTheArchitecture(t *testing.T) {
	t.Parallel()
	page := files(t, "ARCHITECTURE.md")["ARCHITECTURE.md"]
	listed := map[string]bool{}
	for row := range strings.Lines(page) {
		name, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " |")
		if name == row || !strings.HasPrefix(row, "| `") {
			continue
		}
		group := "" // of names that follow on the same line: `internal/lab/demo`, `torture`
		for _, q := range quoted.FindAllStringSubmatch(name, -1) {
			dir := q[1]
			if !strings.Contains(dir, "/") && group != "" {
				dir = group + "/" + dir
			} else if strings.Contains(dir, "/") {
				group = path.Dir(dir)
			}
			listed[dir] = true
		}
	}
	there := map[string]bool{}
	for name := range files(t, ".go") {
		if dir := folder.FindStringSubmatch(name); dir != nil {
			there[dir[1]] = true
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(there)) {
		found := false
		for at := dir; at != "." && !found; at = path.Dir(at) {
			found = listed[at]
		}
		if !found {
			t.Errorf("ARCHITECTURE.md does not have %s", dir)
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(listed)) {
		if _, err := os.Stat(filepath.Join("..", "..", "..", filepath.FromSlash(dir))); err != nil {
			t.Errorf("ARCHITECTURE.md has %s, which is not there", dir)
		}
	}
}

func TestEachTestThatDocumentsNameExists(t *testing.T) {
	t.Parallel()
	folders := map[string][]string{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	for name, source := range files(t, "_test.go") {
		for _, f := range declared.FindAllStringSubmatch(source, -1) {
			folder := path.Dir(name)
			if within(folder, "internal/lab/e2e") { // the documents name all of them as one
				folder = "internal/lab/e2e"
			}
			folders[f[1]] = append(folders[f[1]], folder)
		}
	}
	quoted := regexp.MustCompile("`([a-z]+(?:/[a-z0-9]+)*|(?:Test|Fuzz)[A-Z]\\w*)`")
	packages := slices.Collect(func(yield func(string) bool) {
		for _, in := range folders {
			for _, folder := range in {
				if !yield(folder) {
					return
				}
			}
		}
	})
	n := 0
	for name, page := range files(t, ".md") {
		for line := range strings.Lines(page) {
			folder := ""
			for _, q := range quoted.FindAllStringSubmatch(line, -1) {
				in, isTest := folders[q[1]]
				switch {
				case slices.Contains(packages, q[1]):
					folder = q[1]
				case !strings.HasPrefix(q[1], "Test") && !strings.HasPrefix(q[1], "Fuzz"):
				case !isTest:
					t.Errorf("%s names %s, which is not there", name, q[1])
				case folder != "" && !slices.Contains(in, folder) && !slices.Contains(in, "internal/lab/e2e"):
					t.Errorf("%s names %s of %s, which is in %v", name, q[1], folder, in)
				}
				n++
			}
		}
	}
	if n < 100 {
		t.Errorf("only %d names were looked at", n)
	}
}
