package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// headersValue is the mapping of columns to headers: a mapping in the file, "Name=column,Name=column" in a
// flag or the environment.
type headersValue struct{ p *[]Header }

func (v headersValue) set(s string) error {
	var headers []Header
	if s != "" {
		for entry := range strings.SplitSeq(s, ",") {
			name, column, ok := strings.Cut(entry, "=")
			if !ok {
				return fmt.Errorf("%q is not of the form Name=column", entry)
			}
			headers = append(headers, Header{strings.TrimSpace(name), strings.TrimSpace(column)})
		}
	}
	return v.setHeaders(headers)
}

// setHeaders checks the mapping and sorts it by name, so that the same mapping gives the same bytes however
// it was written.
func (v headersValue) setHeaders(headers []Header) error {
	slices.SortStableFunc(headers, func(a, b Header) int { return cmp.Compare(a.Name, b.Name) })
	seen := map[string]bool{}
	for _, h := range headers {
		lower := strings.ToLower(h.Name)
		switch {
		case !headerToken(h.Name):
			return fmt.Errorf("header name %q: only letters, digits and !#$%%&'*+-.^_`|~ may stand in it",
				h.Name)
		case strings.HasPrefix(lower, "nats-"), strings.HasPrefix(lower, "outflow"):
			return fmt.Errorf("header name %q: names that begin with Nats- or Outflow are taken", h.Name)
		case seen[lower]:
			return fmt.Errorf("header name %q: there twice", h.Name)
		case !identifier(h.Column):
			return fmt.Errorf("header %s: %q is not the name of a column", h.Name, h.Column)
		}
		seen[lower] = true
	}
	*v.p = headers
	return nil
}

func (v headersValue) text() string {
	entries := make([]string, len(*v.p))
	for i, h := range *v.p {
		entries[i] = h.Name + "=" + h.Column
	}
	return strings.Join(entries, ",")
}

func (v headersValue) kind() string { return "name=column,..." }

// headerToken reports whether s is a token as RFC 9110 defines it.
func headerToken(s string) bool {
	for i := range len(s) {
		if c := s[i]; !asciiAlnum(c) && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}
