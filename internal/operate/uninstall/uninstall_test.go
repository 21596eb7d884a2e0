package uninstall

import (
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/operate/parts"
)

// TestEachPartThatInitMakesHasAnInverse: a part that init makes and uninstall does not know can't be added.
func TestEachPartThatInitMakesHasAnInverse(t *testing.T) {
	t.Parallel()
	for _, part := range parts.All() {
		if inverses[part] == nil || !slices.Contains(order, part) {
			t.Errorf("what becomes of the %s?", part)
		}
	}
	if len(order) != len(parts.All()) || len(inverses) != len(order) {
		t.Errorf("%d parts, %d in the order, %d inverses", len(parts.All()), len(order), len(inverses))
	}
}
