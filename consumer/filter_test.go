package consumer

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/consumer/internal/stream"
)

// A filter that can match nothing is a mistake that would otherwise look like a consumer without work.
func TestFiltersThatCanMatchNothingAreRefused(t *testing.T) {
	t.Parallel()
	hooks := stream.Hooks{Source: newMemoryStream()}
	for want, filters := range map[string][]string{
		`"acct-*" they are part of one`:      {"outbox.acct-*"},
		"it has to be the last":              {"outbox.>.x"},
		"has an empty token":                 {"outbox..x"},
		"has white space":                    {"outbox.a b"},
		`match both "outbox.*" and`:          {"outbox.>", "outbox.*"},
		`"outbox.a" and "outbox.a"`:          {"outbox.a", "outbox.b", "outbox.a"},
		`published to "outbox.{doc_id}"`:     {"orders.>"},
		`"outbox.*.*" can match no event`:    {"outbox.*.*"},
		`has an empty token: want tokens wi`: {""},
	} {
		_, err := New(nil, Memory(), Config{Name: "a", Stream: "B", Filters: filters, hooks: hooks})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", filters, err, want)
		}
	}
}

func TestFiltersOfEventsAndDeadLettersAreTaken(t *testing.T) {
	t.Parallel()
	hooks := stream.Hooks{Source: newMemoryStream()}
	given := []string{"outbox.b.*", "B.dead_letter", "outbox.a.>"}
	c, err := New(nil, Memory(), Config{Name: "a", Stream: "B", Filters: given,
		Subject: "outbox.{kind}.{doc_id}", hooks: hooks})
	if err != nil || !slices.Equal(c.cfg.Filters, []string{"B.dead_letter", "outbox.a.>", "outbox.b.*"}) ||
		given[0] != "outbox.b.*" {
		t.Errorf("%v, %v", c, err)
	}
	if c, err = New(nil, Memory(), Config{Name: "a", Stream: "B", hooks: hooks}); err != nil ||
		!c.cfg.readsAll() {
		t.Errorf("%v, %v", c, err)
	}
}
