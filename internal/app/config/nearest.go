package config

import "strings"

// Nearest returns the name that word was most likely meant to be, "" if none is near: then more than a third
// of its letters would be wrong. A word that is right but for its section (horizon for reorder.horizon)
// counts as one letter off; dots and underscores between sections are the same. Of names that are equally
// near it is the one that the whole word is nearest to.
func Nearest(word string, names []string) string {
	best, least, rest := "", 0, 0
	whole := flat(word)
	for _, name := range names {
		all := distance(whole, flat(name))
		d := min(all, ofLeaf(whole, leaf(name)))
		if best == "" || d < least || d == least && all < rest {
			best, least, rest = name, d, all
		}
	}
	if least > max(1, len(leaf(best))/3) {
		return ""
	}
	return best
}

// ofLeaf is how far the end of a word is from a name's last part. Where the section ends is not known: in the
// environment all of a name is written with underscores.
func ofLeaf(word, leaf string) int {
	least := len(word) + len(leaf)
	for {
		d := distance(word, leaf) + 1
		if min(len(word), len(leaf)) >= 3 &&
			(strings.HasPrefix(word, leaf) || strings.HasPrefix(leaf, word)) {
			d = min(d, 1) // one is short for the other
		}
		least = min(least, d)
		var more bool
		if _, word, more = strings.Cut(word, "_"); !more {
			return least
		}
	}
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
