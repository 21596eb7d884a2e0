package config

import "strings"

// Nearest returns the name that word was most likely meant to be, "" if none is near: then more than a third
// of its letters would be wrong. A word that is right but for its section (horizon for reorder.horizon)
// counts as one letter off; dots and underscores between sections are the same.
func Nearest(word string, names []string) string {
	best, least := "", 0
	whole, last := flat(word), leaf(word)
	for _, name := range names {
		d := min(distance(whole, flat(name)), distance(last, leaf(name))+1)
		if min(len(last), len(leaf(name))) >= 3 &&
			(strings.HasPrefix(last, leaf(name)) || strings.HasPrefix(leaf(name), last)) {
			d = min(d, 1) // one is short for the other
		}
		if best == "" || d < least {
			best, least = name, d
		}
	}
	if least > max(1, len(leaf(best))/3) {
		return ""
	}
	return best
}

// orAll is the hint for an unknown name: the nearest one, if there is one.
func orAll(near string) string {
	if near == "" {
		return "`outflow help settings` lists all"
	}
	return "The nearest is " + near
}

func flat(s string) string { return strings.ToLower(strings.ReplaceAll(s, ".", "_")) }

func leaf(s string) string { return strings.ToLower(s[strings.LastIndexByte(s, '.')+1:]) }

// distance is the Levenshtein distance in bytes, of the first 100 of each.
func distance(a, b string) int {
	a, b = a[:min(len(a), 100)], b[:min(len(b), 100)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
