package config

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// subscriptionsValue names a subscription for each cluster: "2=from_2,3=from_3", in the order of the numbers.
type subscriptionsValue struct{ p *string }

func (v subscriptionsValue) set(s string) error {
	all, err := parseSubscriptions(s)
	if err != nil {
		return err
	}
	entries := make([]string, 0, len(all))
	for _, n := range slices.Sorted(maps.Keys(all)) {
		entries = append(entries, fmt.Sprintf("%d=%s", n, all[n]))
	}
	*v.p = strings.Join(entries, ",")
	return nil
}

func (v subscriptionsValue) text() string { return *v.p }
func (v subscriptionsValue) kind() string { return "number=name,..." }

func parseSubscriptions(s string) (map[int]string, error) {
	all, named := map[int]string{}, map[string]bool{}
	if s == "" {
		return all, nil
	}
	for entry := range strings.SplitSeq(s, ",") {
		number, name, ok := strings.Cut(entry, "=")
		number, name = strings.TrimSpace(number), strings.TrimSpace(name)
		n, err := strconv.Atoi(number)
		switch {
		case !ok || err != nil || n < 1 || n > maxClusters || !identifier(name):
			return nil, errWant
		case all[n] != "":
			return nil, fmt.Errorf("cluster %d: there twice", n)
		case named[name]:
			return nil, fmt.Errorf("subscription %s: there twice", name)
		}
		all[n], named[name] = name, true
	}
	return all, nil
}

// numbersValue names clusters by their numbers, in order: "2,3".
type numbersValue struct{ p *string }

func (v numbersValue) set(s string) error {
	all, err := parseNumbers(s)
	if err != nil {
		return err
	}
	text := make([]string, 0, len(all))
	for _, n := range all {
		text = append(text, strconv.Itoa(n))
	}
	*v.p = strings.Join(text, ",")
	return nil
}

func (v numbersValue) text() string { return *v.p }
func (v numbersValue) kind() string { return "number,..." }

func parseNumbers(s string) (all []int, err error) {
	if s == "" {
		return nil, nil
	}
	for entry := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(entry))
		switch {
		case err != nil || n < 1 || n > maxClusters:
			return nil, errWant
		case slices.Contains(all, n):
			return nil, fmt.Errorf("cluster %d: there twice", n)
		}
		all = append(all, n)
	}
	slices.Sort(all)
	return all, nil
}
