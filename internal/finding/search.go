package finding

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"unicode"

	"github.com/outflowhq/outflow/internal/lazyregexp"
)

// maxFound is how many findings [Search] returns at most.
const maxFound = 5

// code finds the code in the messages of commands, the lines of a log and the labels of a metric.
var code = lazyregexp.New(`\bcode\W{1,4}(\w+)`)

// Search returns the findings that a text is most likely about, the likeliest first: those whose code it
// says, otherwise those that share words with it. A word counts more the fewer findings have it.
func Search(text string) []Finding {
	var found []Finding
	for _, m := range code().FindAllStringSubmatch(text, -1) {
		f, ok := Of(m[1])
		if ok && !slices.ContainsFunc(found, func(other Finding) bool { return other.Code == f.Code }) {
			found = append(found, f)
		}
	}
	if found != nil {
		return found
	}
	all := All()
	titles, bodies, in := make([][]string, len(all)), make([][]string, len(all)), map[string]float64{}
	for i, f := range all {
		titles[i] = words(f.Title + " " + f.Code + " " + strings.ReplaceAll(f.Code, "_", " "))
		bodies[i] = words(f.Hint + " " + f.Runbook + " " + strings.Join(titles[i], " "))
		for _, w := range bodies[i] {
			in[w]++
		}
	}
	weight, wanted := map[string]float64{}, words(text)
	for i, f := range all {
		for _, w := range wanted {
			rare := math.Log(float64(len(all)) / in[w])
			if slices.Contains(bodies[i], w) {
				weight[f.Code] += rare
			}
			if slices.Contains(titles[i], w) {
				weight[f.Code] += 2 * rare
			}
		}
		if weight[f.Code] > 0 {
			found = append(found, f)
		}
	}
	slices.SortStableFunc(found, func(a, b Finding) int {
		return cmp.Compare(weight[b.Code], weight[a.Code])
	})
	return found[:min(len(found), maxFound)]
}

// words returns each word of a text once, in lower case; a name with underscores is one.
func words(text string) []string {
	all := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '_'
	})
	slices.Sort(all)
	return slices.Compact(all)
}
