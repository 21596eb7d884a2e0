package erasure

import (
	"testing"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// TestManyErasedMessagesAreComparedAtOnce: as many as a stream can note, each by itself, of many requests, or
// of none that is known any more.
func TestManyErasedMessagesAreComparedAtOnce(t *testing.T) {
	t.Parallel()
	const each, requests = 25, 2000
	var erased outbox.Sequences
	for i := range uint64(each * requests) {
		erased = append(erased, outbox.SequenceRange{From: 2*i + 1, To: 2*i + 1})
	}
	var all []*Record
	for i := range requests {
		all = append(all, &Record{Slot: "s", Erased: erased[each*i : each*(i+1)]})
	}
	begun := time.Now()
	if got := Unknown(nil, "s", "S", erased); got.String() != erased.String() {
		t.Errorf("%d of them are unknown", got.Count())
	}
	if got := Unknown(all[1:], "s", "S", erased); got.String() != erased[:each].String() {
		t.Errorf("%d are unknown, want %d", got.Count(), each)
	}
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
}
