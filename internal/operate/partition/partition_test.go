package partition

import (
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
)

// TestOnlyShardsOfOneDivisionAreApart: others may have rows in common, so the repair of one may need what the
// other lets go.
func TestOnlyShardsOfOneDivisionAreApart(t *testing.T) {
	t.Parallel()
	of := func(doc string, index, of int) relay.Mapping {
		return relay.Mapping{Doc: doc, Shard: relay.Shard{Index: index, Of: of}}
	}
	for _, c := range []struct {
		a, b  relay.Mapping
		apart bool
	}{
		{of("doc", 0, 2), of("doc", 1, 2), true},
		{of("doc", 0, 2), of("doc", 0, 2), false},
		{of("doc", 0, 2), of("doc", 1, 3), false},
		{of("doc", 0, 2), of("actor", 1, 2), false},
		{of("doc", 0, 2), relay.Mapping{Doc: "doc"}, false},
		{relay.Mapping{Doc: "doc"}, relay.Mapping{Doc: "doc"}, false},
	} {
		if apart(c.a, c.b) != c.apart || apart(c.b, c.a) != c.apart {
			t.Errorf("%v and %v: not %v", c.a.Shard, c.b.Shard, c.apart)
		}
	}
}
