package finding

import (
	"strings"
	"testing"
)

// TestEachFindingIsCompleteAndUnique: no two findings have a code or a title in common, and each says the way
// out.
func TestEachFindingIsCompleteAndUnique(t *testing.T) {
	t.Parallel()
	titles, codes := map[string]string{}, map[string]bool{}
	for _, f := range All() {
		switch {
		case codes[f.Code]:
			t.Errorf("%s is there twice", f.Code)
		case titles[f.Title] != "":
			t.Errorf("%s and %s have the same title", f.Code, titles[f.Title])
		case f.Title == "" || strings.HasSuffix(f.Title, ".") || strings.ContainsAny(f.Title, "\n`"):
			t.Errorf("%s: the title is not one line of plain text without a period: %q", f.Code, f.Title)
		case !strings.HasSuffix(f.Hint, ".") && !strings.HasSuffix(f.Hint, "?"):
			t.Errorf("%s: the hint is not a sentence: %q", f.Code, f.Hint)
		case strings.ToLower(strings.Trim(f.Code, "_")) != f.Code:
			t.Errorf("%q is not a code", f.Code)
		}
		if got, ok := Of(f.Code); !ok || got.Title != f.Title {
			t.Errorf("Of(%q) is %q, %v", f.Code, got.Title, ok)
		}
		codes[f.Code], titles[f.Title] = true, f.Code
	}
}

// TestTextIsReadableWithoutMarkdown: on a terminal a link says where it leads, and no line is too long.
func TestTextIsReadableWithoutMarkdown(t *testing.T) {
	t.Parallel()
	f := Finding{Hint: "Do **this**.", Runbook: "See [there](postgres.md#settings), or [that](#that).\n\n- " +
		strings.Repeat("word ", 30) + "end\n\n    " + strings.Repeat("code ", 30) + "end"}
	want := "Do this.\n\nSee there (docs/postgres.md#settings), or that.\n\n- " +
		strings.TrimSuffix(strings.Repeat("word ", 19), " ") + "\n  " + strings.Repeat("word ", 11) +
		"end\n\n    " +
		strings.Repeat("code ", 30) + "end\n"
	if got := f.Text(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
