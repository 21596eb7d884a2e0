package outbox

import (
	"errors"
	"fmt"
	"testing"
)

func TestNulls(t *testing.T) {
	t.Parallel()
	e := Event{Extra: make([]string, MaxExtra)}
	e.SetExtraNull(0)
	e.SetExtraNull(MaxExtra - 1)
	if e.Null&(NullDoc|NullActor|NullKey|NullID|NullPayload) != 0 {
		t.Error("the columns of a role became NULL")
	}
	for i := range MaxExtra {
		if got, want := e.ExtraNull(i), i == 0 || i == MaxExtra-1; got != want {
			t.Errorf("Extra[%d] is NULL: %v", i, got)
		}
	}
}

func TestEventSize(t *testing.T) {
	t.Parallel()
	e := Event{Doc: "12", Actor: "345", Key: "6789", ID: "not counted", PayloadSize: 10, Extra: []string{"not counted"}}
	if got := e.Size(); got != 19+EventOverhead {
		t.Errorf("got %d", got)
	}
}

func TestFaults(t *testing.T) {
	t.Parallel()
	cause := errors.New("connection reset")
	f := &Fault{Class: Gap, Code: "slot_lost", What: "slot outflow is lost", Cure: "Run x.", From: 1, To: 2, Err: cause}
	if got, want := f.Error(), "slot outflow is lost; LSN range 0/1 to 0/2: connection reset. Run x."; got != want {
		t.Errorf("got %q", got)
	}
	err := fmt.Errorf("session: %w", f)
	if FaultOf(err) != f || ClassOf(err) != Gap || !errors.Is(err, cause) {
		t.Error("a wrapped fault is not found")
	}
	if FaultOf(cause) != nil || ClassOf(cause) != Transient || ClassOf(nil) != Transient {
		t.Error("an error without a class is transient")
	}
	for class, want := range map[Class]string{Transient: "transient", Fatal: "fatal", Gap: "gap", Poison: "poison", Usage: "usage"} {
		if class.String() != want {
			t.Errorf("%d is %s", class, class)
		}
	}
}
