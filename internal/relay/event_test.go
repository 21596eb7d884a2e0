package relay

import (
	"testing"
)

func TestAnEventKnowsWhichValuesAreNull(t *testing.T) {
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

func TestTheSizeOfAnEventCountsWhatIsKept(t *testing.T) {
	t.Parallel()
	e := Event{Doc: "12", Actor: "345", Key: "6789", ID: "not counted", PayloadSize: 10,
		Extra: []string{"not counted"}}
	if got := e.Size(); got != 19+EventOverhead {
		t.Errorf("got %d", got)
	}
}
