package partition

import (
	"testing"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// TestARowThatWasNeverPublishedTakesNoOthersWithIt: rows that were compared count as published when the
// stream has their messages no more, also beside one that was never published.
func TestARowThatWasNeverPublishedTakesNoOthersWithIt(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = time.Hour
	w.insert(0, 10, true)
	w.insert(0, 1, false)
	for range 2 {
		w.settle()
	}
	clear(w.published)
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
	_, err := w.remove()
	if f := wantFault(t, err, outbox.Gap, codeUnpublished); w.rows() != "1" {
		t.Errorf("%s rows are left: %v", w.rows(), f)
	}
}
