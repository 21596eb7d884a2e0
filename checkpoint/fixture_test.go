package checkpoint

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	epoch    = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	settings = relay.Settings{Horizon: relay.DefaultHorizon, MaxEvents: relay.DefaultMaxEvents,
		MaxBytes: relay.DefaultMaxBytes}
	publication = relay.PublicationIdentity{OID: 16401, Xmin: 730, RelOID: 16402, RelXmin: 730,
		TableOID: 16385}
	mapping = relay.Mapping{
		Table: "public.outbox", Doc: "doc_id", Actor: "actor_id", Counter: "counter", Key: "seq_key",
		Payload: "payload",
	}
	config = Config{
		Slot: "outflow", Stream: "OUTBOX", Publication: "outflow", Table: "public.outbox", Mapping: mapping,
		DurableAfter: 150 * time.Second,
	}
)

// at is a checkpoint on timeline 1, stored age ago.
func at(due outbox.LSN, seq uint64, age time.Duration) StoredCheckpoint {
	return StoredCheckpoint{Checkpoint: relay.Checkpoint{Due: due, Seq: seq, Settings: settings, Timeline: 1},
		Since: epoch.Add(-age)}
}

// gapSettings are those of gap mode.
var gapSettings = relay.Settings{Sort: outbox.ByGap, MaxEvents: relay.DefaultMaxEvents,
	MaxBytes: relay.DefaultMaxBytes, Gap: relay.Gap{Bound: relay.DefaultBound, Cold: relay.DefaultCold,
		Memory: relay.DefaultMemory, First: relay.DefaultFirst}}

// holding is a checkpoint in gap mode that holds an event whose commit record starts at from, none where that
// is 0, and that remembers so many messages.
func holding(p StoredCheckpoint, from outbox.LSN, remembered int) StoredCheckpoint {
	p.Checkpoint = inGap(p.Checkpoint, from)
	p.Remembered = remembered
	return p
}

func inGap(p relay.Checkpoint, from outbox.LSN) relay.Checkpoint {
	p.Settings = gapSettings
	if from > 0 {
		p.From = from
		p.Holds = []relay.Hold{{Sequence: 1, Base: 41, Oldest: outbox.Position{LSN: from + 8, Index: 2}}}
	}
	return p
}

func on(timeline uint32, p StoredCheckpoint) StoredCheckpoint { p.Timeline = timeline; return p }

func record(checkpoints ...StoredCheckpoint) *Record {
	return &Record{
		Slot: "outflow", Database: "app", SystemID: "7361530121234511111", Mapping: mapping, Stream: "OUTBOX",
		Created:     epoch.Add(-time.Hour),
		Publication: PublicationSeen{publication, 0x3000}, Checkpoints: checkpoints,
	}
}

// readings are those of a healthy set-up: three checkpoints, twelve messages, the newest checkpoint at the
// newest message.
func readings() Readings {
	return Readings{
		Slot: relay.SlotState{Exists: true, Plugin: "pgoutput", Database: "app", Confirmed: 0x1000,
			Restart: 0xF00, WALStatus: "reserved"},
		Record: record(at(0x1000, 5, 300*time.Second), at(0x2000, 9, 200*time.Second),
			at(0x3000, 12, 10*time.Second)),
		Stream: relay.StreamState{
			Exists: true, Created: epoch.Add(-time.Hour), LastSeq: 12, Messages: 12, NewestSeq: 12,
			Newest: &outbox.Header{Pos: outbox.Position{LSN: 0x2F00, Index: 2}, N: 2, Of: 3, Due: 0x3000,
				Thru: 0x3000, Timeline: 1},
		},
		Server: relay.ServerState{
			SystemID: "7361530121234511111", Database: "app", Version: 180001,
			History: relay.History{Timeline: 1}, WALEnd: 0x5000,
		},
		Publication: publication,
		Now:         epoch,
	}
}

// promoted is the history of a server that left timeline 1 at end and is on timeline 2.
func promoted(end outbox.LSN) relay.History {
	return relay.History{Timeline: 2, Switches: []relay.Switch{{Timeline: 1, End: end}}}
}
