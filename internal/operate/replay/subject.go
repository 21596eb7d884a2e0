package replay

import (
	"fmt"
	"strings"
)

// checkFilter says what is wrong with a subject that may have wildcards.
func checkFilter(filter string) error {
	tokens := strings.Split(filter, ".")
	for i, token := range tokens {
		switch {
		case token == "":
			return fmt.Errorf("an empty token")
		case strings.ContainsAny(token, " \t\r\n"):
			return fmt.Errorf("white space")
		case token == ">" && i < len(tokens)-1:
			return fmt.Errorf("> is not at the end")
		case len(token) > 1 && strings.ContainsAny(token, "*>"):
			return fmt.Errorf("token %q: a wildcard is a token by itself", token)
		}
	}
	return nil
}

// covers reports whether every subject that matches b matches a. b may be a subject without wildcards.
func covers(a, b string) bool {
	one, two := strings.Split(a, "."), strings.Split(b, ".")
	for i, f := range one {
		switch {
		case f == ">":
			return len(two) > i
		case len(two) <= i || two[i] == ">" || f != "*" && f != two[i]:
			return false
		}
	}
	return len(one) == len(two)
}

// overlap reports whether some subject matches both filters.
func overlap(a, b string) bool {
	one, two := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; ; i++ {
		switch {
		case i == len(one) || i == len(two):
			return len(one) == len(two)
		case one[i] == ">" || two[i] == ">":
			return true
		case one[i] != "*" && two[i] != "*" && one[i] != two[i]:
			return false
		}
	}
}

// intersect returns a filter for what matches both; ok is false if nothing does.
func intersect(a, b string) (string, bool) {
	if !overlap(a, b) {
		return "", false
	}
	one, two := strings.Split(a, "."), strings.Split(b, ".")
	var out []string
	for i := 0; i < len(one) && i < len(two); i++ {
		switch {
		case one[i] == ">":
			return strings.Join(append(out, two[i:]...), "."), true
		case two[i] == ">":
			return strings.Join(append(out, one[i:]...), "."), true
		case one[i] == "*":
			out = append(out, two[i])
		default:
			out = append(out, one[i])
		}
	}
	return strings.Join(out, "."), true
}
