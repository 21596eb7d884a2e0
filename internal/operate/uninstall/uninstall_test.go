package uninstall

import (
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/operate/parts"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
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

// TestOfAServerThatIsAwayTheWayOutIsNamed: it may be gone for good.
func TestOfAServerThatIsAwayTheWayOutIsNamed(t *testing.T) {
	t.Parallel()
	const nowhere = "127.0.0.1:1"
	for _, c := range []struct{ nats, code, way string }{
		{"nats://" + nowhere, sink.CodeConnect, "outflow uninstall --gone nats"},
		{natstest.Server(t).URL(), postgres.CodeConnect, "outflow uninstall --gone postgres"},
	} {
		cfg, err := config.Load(config.Args{"postgres.url": "postgres://postgres@" + nowhere + "/outflow",
			"nats.url": c.nats}, nil)
		must.Succeed(t, err)
		_, err = Run(t.Context(), cfg, slog.New(slog.DiscardHandler), Options{})
		if f := outbox.FaultOf(err); f == nil || f.Code != c.code || !strings.Contains(f.Hint, c.way) {
			t.Errorf("%v, want %s and %s", err, c.code, c.way)
		}
	}
}
