package tier

import (
	"runtime"
	"testing"
)

// outcome is a test that records how it ended.
type outcome struct {
	testing.TB
	how string
}

func (o *outcome) Helper()               {}
func (o *outcome) Skipf(string, ...any)  { o.how = "skipped"; runtime.Goexit() }
func (o *outcome) Fatalf(string, ...any) { o.how = "failed"; runtime.Goexit() }

func of(run func(t testing.TB)) string {
	o := &outcome{how: "ran"}
	done := make(chan struct{})
	go func() {
		defer close(done)
		run(o)
	}()
	<-done
	return o.how
}

func TestARequiredThingThatIsMissingFailsATest(t *testing.T) {
	for list, want := range map[string]string{
		"":                    "skipped",
		"pg14,psql":           "failed",
		"psql":                "failed",
		"pg14,psqlx,xpsql":    "skipped",
		"pg14,browser,x,race": "skipped",
	} {
		t.Setenv("OUTFLOW_TEST_REQUIRE", list)
		if got := of(func(t testing.TB) { Missing(t, "psql", "psql is not here") }); got != want {
			t.Errorf("OUTFLOW_TEST_REQUIRE=%s: %s, want %s", list, got, want)
		}
	}
}

func TestLongTestsRunWhenAsked(t *testing.T) {
	for value, want := range map[string]string{"": "skipped", "1": "ran"} {
		t.Setenv("OUTFLOW_TEST_LONG", value)
		if got := of(func(t testing.TB) { OnlyLong(t, "it takes hours") }); got != want {
			t.Errorf("OUTFLOW_TEST_LONG=%s: %s, want %s", value, got, want)
		}
	}
}
