package consumer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/outbox"
)

// checkFilters returns the subject filters sorted, ">" for all, or says which one can't be meant.
func checkFilters(filters []string) ([]string, error) {
	if len(filters) == 0 {
		return []string{">"}, nil
	}
	filters = slices.Sorted(slices.Values(filters))
	for i, f := range filters {
		if err := checkFilter(f); err != nil {
			return nil, fmt.Errorf("consumer: Filters: %q %w", f, err)
		}
		for _, earlier := range filters[:i] {
			if overlap(earlier, f) {
				return nil, fmt.Errorf("consumer: Filters: a subject can match both %q and %q: leave one "+
					"out, or make them narrower", earlier, f)
			}
		}
	}
	return filters, nil
}

func checkFilter(filter string) error {
	tokens := strings.Split(filter, ".")
	for i, token := range tokens {
		switch {
		case token == "":
			return fmt.Errorf("has an empty token: want tokens with dots between them, such as outbox.>")
		case strings.ContainsAny(token, " \t\r\n\f\x00"):
			return fmt.Errorf("has white space, which no subject has")
		case token == ">" && i < len(tokens)-1:
			return fmt.Errorf("can match nothing: > stands for all further tokens, so it has to be the " +
				"last; * stands for one")
		case token != "*" && token != ">" && strings.ContainsAny(token, "*>"):
			return fmt.Errorf("can match nothing: * and > stand for whole tokens, and in %q they are part "+
				"of one. Filter by whole tokens (a subject such as outbox.{kind}.{doc_id} has one for each "+
				"kind), or read all and let the handler pass over what it does not want", token)
		}
	}
	return nil
}

// matchesTemplate says if a filter can match no event of a template, nor the dead letters of a stream.
func matchesTemplate(filters []string, template *outbox.SubjectTemplate, stream string) error {
	made := template.Filter(func(string) (string, bool) { return "", false })
	for _, f := range filters {
		if !overlap(f, made) && !overlap(f, stream+".dead_letter") {
			return fmt.Errorf("Config.Filters: %q can match no event: Config.Subject says that they are "+
				"published to %q. Give the subject of outflow's configuration, or a filter of such subjects",
				f, template)
		}
	}
	return nil
}

// overlap reports whether a subject can match both filters.
func overlap(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; i < len(x) && i < len(y); i++ {
		switch {
		case x[i] == ">" || y[i] == ">":
			return true
		case x[i] != y[i] && x[i] != "*" && y[i] != "*":
			return false
		}
	}
	return len(x) == len(y)
}
