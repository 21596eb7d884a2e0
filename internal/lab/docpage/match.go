package docpage

import (
	"fmt"
	"strings"
)

const anything = "…"

// Match returns nil if an output is as a page has it: white space at the end of lines, and empty lines before
// and behind, do not count.
func Match(want, got string) error { return match(want, got, false) }

// MatchBegin is Match for a command that still runs: the output begins so, and may go on.
func MatchBegin(want, got string) error { return match(want, got, true) }

func match(want, got string, open bool) error {
	w, g := lines(want), lines(got)
	// far is the line of want up to which some reading of the wildcards came: where the outputs part.
	far := 0
	var from func(i, j int) bool
	tried := map[[2]int]bool{}
	from = func(i, j int) bool {
		far = max(far, i)
		if i == len(w) {
			return open || j == len(g)
		}
		if tried[[2]int{i, j}] {
			return false
		}
		tried[[2]int{i, j}] = true
		if strings.TrimSpace(w[i]) == anything && from(i+1, j) {
			return true
		}
		if j == len(g) {
			return false
		}
		if strings.TrimSpace(w[i]) == anything {
			return from(i, j+1)
		}
		return matchLine(w[i], g[j]) && from(i+1, j+1)
	}
	switch {
	case from(0, 0):
		return nil
	case far == len(w):
		return fmt.Errorf("the output goes on where the page's ends:\n%s", strings.Join(g, "\n"))
	default:
		return fmt.Errorf("the output has no line like %q of the page where it should be:\n%s", w[far],
			strings.Join(g, "\n"))
	}
}

func lines(text string) []string {
	all := strings.Split(strings.TrimSpace(strings.ReplaceAll(text, "\r\n", "\n")), "\n")
	for i := range all {
		all[i] = strings.TrimRight(all[i], " \t")
	}
	if len(all) == 1 && all[0] == "" {
		return nil
	}
	return all
}

// matchLine finds the pieces between the wildcards one behind the other.
func matchLine(want, got string) bool {
	pieces := strings.Split(want, anything)
	last := len(pieces) - 1
	if last == 0 {
		return want == got
	}
	rest, ok := strings.CutPrefix(got, pieces[0])
	if !ok {
		return false
	}
	for _, p := range pieces[1:last] {
		if _, rest, ok = strings.Cut(rest, p); !ok {
			return false
		}
	}
	return strings.HasSuffix(rest, pieces[last])
}
