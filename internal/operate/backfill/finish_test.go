package backfill

import (
	"testing"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestWhatIsConfirmedDoesNotComeAgain: of an idle outbox the record has a checkpoint for comparison before
// the durable one.
func TestWhatIsConfirmedDoesNotComeAgain(t *testing.T) {
	t.Parallel()
	at := func(due outbox.LSN, seq uint64) checkpoint.StoredCheckpoint {
		return checkpoint.StoredCheckpoint{Checkpoint: relay.Checkpoint{Due: due, Seq: seq}}
	}
	rd := Readings{}
	rd.Record = &checkpoint.Record{Checkpoints: []checkpoint.StoredCheckpoint{at(0x100, 10), at(0x200, 20),
		at(0x300, 20)}}
	rd.Stream.NewestSeq, rd.Stream.LastSeq = 17, 20
	for _, c := range []struct {
		exists    bool
		confirmed outbox.LSN
		end       uint64
	}{{true, 0x300, 20}, {true, 0x200, 20}, {true, 0x100, 17}, {false, 0, 17}} {
		if rd.Slot.Exists, rd.Slot.Confirmed = c.exists, c.confirmed; rd.End() != c.end {
			t.Errorf("%+v: the stream ends at %d", c, rd.End())
		}
	}
}
