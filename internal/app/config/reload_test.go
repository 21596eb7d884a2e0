package config

import (
	"log/slog"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

func TestOnlySomeSettingsAreReloaded(t *testing.T) {
	t.Parallel()
	was, err := loadText(t, "slot: a\nnats: {password: old, user: u}\n")
	must.Succeed(t, err)
	next, err := loadText(t, "slot: b\nnats: {password: new, user: u}\nlog: {level: warn}\n"+
		"sink: {on_poison: dead_letter}\n")
	must.Succeed(t, err)
	c, taken, others := was.Reload(next)
	if want := []string{"sink.on_poison", "log.level"}; !slices.Equal(taken, want) {
		t.Errorf("taken: %v", taken)
	}
	if want := []string{"nats.password", "slot"}; !slices.Equal(others, want) {
		t.Errorf("others: %v", others)
	}
	if c.Slot != "a" || c.NATS.Password != "old" || c.Sink.OnPoison != PoisonDeadLetter ||
		c.Log.Level != slog.LevelWarn || was.Log.Level != slog.LevelInfo {
		t.Errorf("%+v", c)
	}
	if _, taken, others := c.Reload(c); taken != nil || others != nil {
		t.Errorf("the same: %v, %v", taken, others)
	}
}
