package status

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/watch"
)

// JetStream takes almost any name for a consumer, and a terminal obeys escape sequences.
func TestAConsumersNameSendsNothingToTheTerminal(t *testing.T) {
	t.Parallel()
	r := Report{Report: &overview.Report{}}
	r.Consumers = []watch.Consumer{{Name: "a\x1b[2Jb\u009b"}}
	r.Stream.DurablesAffected = []string{"c\x1b[2Jd"}
	var b strings.Builder
	if err := r.Print(&b, Style{}); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); strings.ContainsAny(got, "\x1b\u009b") || !strings.Contains(got, "a?[2Jb?:") ||
		!strings.Contains(got, "c?[2Jd") {
		t.Errorf("%q", got)
	}
}
