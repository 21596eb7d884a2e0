package outbox

import (
	"errors"
	"fmt"
	"testing"
)

func TestAWrappedFaultIsFoundAndSaysItsHint(t *testing.T) {
	t.Parallel()
	cause := errors.New("connection reset")
	f := &Fault{Class: Gap, Code: "slot_lost", Message: "slot outflow is lost", Hint: "Run x.", From: 1,
		To: 2, Err: cause}
	if got, want := f.Error(),
		"slot outflow is lost; LSN range 0/1 to 0/2: connection reset. Run x."; got != want {
		t.Errorf("got %q", got)
	}
	all := &Fault{Message: "stream S does not exist", To: 2}
	if got := all.Error(); got != "stream S does not exist; LSN range 0/0 to 0/2, which is all from the "+
		"beginning" {
		t.Errorf("got %q", got)
	}
	err := fmt.Errorf("session: %w", f)
	if FaultOf(err) != f || ClassOf(err) != Gap || !errors.Is(err, cause) {
		t.Error("a wrapped fault is not found")
	}
	if kind := (&Fault{Code: "slot_lost"}); !errors.Is(fmt.Errorf("run: %w", f), kind) ||
		errors.Is(f, &Fault{Code: "slot"}) ||
		errors.Is(&Fault{}, &Fault{}) {
		t.Error("a fault is one of its code, and of no other")
	}
	if FaultOf(cause) != nil || ClassOf(cause) != Transient || ClassOf(nil) != Transient {
		t.Error("an error without a class is transient")
	}
	for class, want := range map[Class]string{Transient: "transient", Fatal: "fatal", Gap: "gap",
		Poison: "poison", Usage: "usage"} {
		if class.String() != want {
			t.Errorf("%d is %s", class, class)
		}
	}
}
