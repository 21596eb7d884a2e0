package docpage

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

const page = "# A page\n" +
	"```sh\noutflow init\n```\n\n" +
	"```text\nmade …\n```\n" +
	"```text\nnot an output\n```\n" +
	"1. In a list:\n\n" +
	"   ```sql eventually\n   SELECT 1;\n     -- more\n   ```\n   It says:\n   ```text\n   1\n   ```\n" +
	"```go\n// file: a/main.go\npackage main\n```\n" +
	"```yaml\n# file: outflow.yaml\ntable: x\n```\n" +
	"```yaml\ntable: shown only\n```\n" +
	"```text\nno output either\n```\n" +
	"````sh\ncat <<'X'\n```\nX\n````\n" +
	"```sh exit=3\noutflow run\n```\n" +
	"```sh\nexport A=1\nexec outflow run \\\n  --stream A &\n```\n" +
	"```sh\nkill %1\n```\n" +
	"```sh norun\nrm -rf /\n```\n" +
	"```\nshown\n```\n"

func TestAPageIsReadAsItsBlocks(t *testing.T) {
	t.Parallel()
	want := []Block{
		{Line: 2, Lang: "sh", Body: "outflow init\n", Want: "made …\n", Checked: true},
		{Line: 14, Lang: "sql", Body: "SELECT 1;\n  -- more\n", Eventually: true, Want: "1\n", Checked: true},
		{Line: 22, Kind: File, Lang: "go", Name: "a/main.go", Body: "// file: a/main.go\npackage main\n"},
		{Line: 26, Kind: File, Lang: "yaml", Name: "outflow.yaml", Body: "# file: outflow.yaml\ntable: x\n"},
		{Line: 36, Lang: "sh", Body: "cat <<'X'\n```\nX\n"},
		{Line: 41, Lang: "sh", Body: "outflow run\n", Exit: 3},
		{Line: 44, Kind: Background, Lang: "sh", Body: "export A=1\n",
			Command: "exec outflow run \\\n  --stream A"},
		{Line: 49, Kind: Kill, Lang: "sh", Body: "kill %1\n", Job: 1},
	}
	got, err := Parse(page)
	must.Succeed(t, err)
	if len(got) != len(want) {
		t.Fatalf("%d blocks, want %d: %+v", len(got), len(want), got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("block %d:\n%+v, want\n%+v", i, got[i], want[i])
		}
	}
}

func TestASectionKeepsItsLines(t *testing.T) {
	t.Parallel()
	page := "# A page\n```sh\nfirst\n```\n## One\n```sh\n## Two\n```\n### Still one\n" +
		"## Two\n```sh\ntwo\n```\n"
	for title, want := range map[string]string{
		"One": "\n\n\n\n## One\n```sh\n## Two\n```\n### Still one\n\n\n\n\n",
		"Two": "\n\n\n\n\n\n\n\n\n## Two\n```sh\ntwo\n```\n",
	} {
		got, err := Section(page, title)
		must.Succeed(t, err)
		if got != want {
			t.Errorf("%s: %q, want %q", title, got, want)
		}
	}
	if _, err := Section(page, "Three"); err == nil {
		t.Error("a section that is not there was found")
	}
}

func TestAPageThatCannotRunIsRefused(t *testing.T) {
	t.Parallel()
	for page, says := range map[string]string{
		"```sh\nls\n":                               "line 1: the block is not closed",
		"x\n```sh exit=0\nfalse\n```\n":             "line 2: exit=0: want a number",
		"```sh sometimes\nls\n```\n":                `a block "sh" cannot be "sometimes"`,
		"```yaml exit=1\na: 1\n```\n":               `a block "yaml" cannot be "exit=1"`,
		"```go\npackage main\n```\n":                "a go block begins with",
		"```go\n// file: ../x.go\npackage x\n```\n": "want a path inside",
		"```sql eventually\nSELECT 1\n```\n":        "no output is given",
		"```sh exit=1\nsleep 1 &\n```\n":            "ends with exit code 0",
	} {
		if _, err := Parse(page); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", page, err, says)
		}
	}
}

func TestOutputIsComparedWithWhatThePageSays(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		want, got     string
		whole, begins bool
	}{
		{"a\nb\n", "a  \nb", true, true},
		{"a\n", "\na\n\n", true, true},
		{"a", "a\nb", false, true},
		{"a\nb", "a", false, false},
		{"a\n…\nd", "a\nb\nc\nd\n", true, true},
		{"a\n…\nd", "a\nd\n", true, true},
		{"a\n…\nd", "a\nd\nb\nd", true, true},
		{"a\n…\nd", "a\nb\n", false, false},
		{"…", "", true, true},
		{"", "", true, true},
		{"", "a", false, true},
		{"made … at …, ok", "made slot at 0/1, ok", true, true},
		{"made … at …, ok", "made slot at 0/1, ok.", false, false},
		{"x…x", "x", false, false},
		{"…b…b…", "abcb", true, true},
		{"a.c", "abc", false, false},
	} {
		if err := Match(c.want, c.got); (err == nil) != c.whole {
			t.Errorf("Match(%q, %q): %v", c.want, c.got, err)
		}
		if err := MatchBegin(c.want, c.got); (err == nil) != c.begins {
			t.Errorf("MatchBegin(%q, %q): %v", c.want, c.got, err)
		}
	}
}
