package stream

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// A server doesn't let anybody create these, but another version or an update may show them.
func TestConfigsThatNoServerCreatesAreRefused(t *testing.T) {
	t.Parallel()
	c := Config{
		Name: "S", Subjects: []string{"_outflow.a.>"}, Retention: "limits",
		Transform: &subjectTransform{transformSource, transformDest},
	}
	must.Succeed(t, c.check())
	for code, change := range map[string]func(*Config){
		"stream_sealed":   func(c *Config) { c.Sealed = true },
		"stream_subjects": func(c *Config) { c.Subjects = nil },
	} {
		refused := c
		change(&refused)
		if f := outbox.FaultOf(refused.check()); f == nil || f.Class != outbox.Fatal || f.Code != code {
			t.Errorf("got %v, want a fault with code %s", f, code)
		}
	}
}
