package stream

import (
	"slices"
	"testing"
	"time"

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

// TestNothingHidesThatAStreamIsOpened: other changes that are refused, made at once with it, are not the
// first thing that is said.
func TestNothingHidesThatAStreamIsOpened(t *testing.T) {
	t.Parallel()
	closed := Config{
		Name: "S", Subjects: []string{"_outflow.a.>"}, Retention: "limits",
		Transform: &subjectTransform{transformSource, transformDest},
	}
	opened := map[string]func(*Config){
		"stream_subjects":      func(c *Config) { c.Subjects = append(c.Subjects, "public.>") },
		"stream_sources":       func(c *Config) { c.Sources = make([]struct{}, 1) },
		"stream_delete_marker": func(c *Config) { c.DeleteMarkerTTL = time.Hour },
	}
	if len(opened) != len(opens) {
		t.Errorf("not all of %q are tried", opens)
	}
	for code, open := range opened {
		c := closed
		open(&c)
		c.Transform, c.Sealed, c.Retention, c.PersistMode = nil, true, "interest", "async"
		c.NoAck, c.AllowCounter = true, true
		if f := outbox.FaultOf(c.check()); f == nil || f.Code != code || !slices.Contains(opens, code) {
			t.Errorf("%v, want %s", f, code)
		}
	}
}
