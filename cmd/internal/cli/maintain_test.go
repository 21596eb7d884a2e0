package cli

import (
	"bytes"
	"context"
	"testing"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
)

// TestRoundsOfMaintainAddNothingToSuggestedCommands: the databases are named once, however often it looks
// into them.
func TestRoundsOfMaintainAddNothingToSuggestedCommands(t *testing.T) {
	t.Parallel()
	cfg, err := config.Load(config.Args{"postgres.url": "postgres://anna@127.0.0.1:1/db",
		"nats.url": "nats://127.0.0.1:1", "retain.stream.messages": "1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	where := wiring.WhereIs(cfg)
	a := &App{Name: "outflow", Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}, where: &where}
	c, err := a.maintenance(cfg, []string{"postgres://anna@127.0.0.1:1/texts"}, false)
	if err != nil {
		t.Fatal(err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	for range 3 {
		for _, part := range c.Parts {
			if err := part.Run(ended, &watch.Maintained{}); err == nil {
				t.Errorf("part %s worked without servers", part.Name)
			}
		}
	}
	if len(a.repeat) != 1 {
		t.Errorf("suggested commands would repeat %q", a.repeat)
	}
}
