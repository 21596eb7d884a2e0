package relay

import (
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

// TestWhatIsLeftFromAMessageOnIsThatAndWhatFollows: of commits up to an LSN.
func TestWhatIsLeftFromAMessageOnIsThatAndWhatFollows(t *testing.T) {
	t.Parallel()
	// two windows, in their order
	messages := []outbox.Header{{Due: 100, N: 0}, {Due: 100, N: 1}, {Due: 108, N: 0}, {Due: 108, N: 1}}
	for from := range messages {
		for i := range messages {
			h := messages[i]
			for lsn, within := range map[outbox.LSN]bool{50: true, 51: false} {
				h.Pos.LSN = lsn
				if got := LeftFrom(&messages[from], 50).Covers(&h); got != (within && i >= from) {
					t.Errorf("left from message %d on, message %d at %v: %t", from, i, lsn, got)
				}
			}
		}
	}
}
