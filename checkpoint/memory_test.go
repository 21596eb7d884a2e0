package checkpoint

import (
	"testing"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

func TestMemoryIsReadBackFromTheNewestMessages(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		remembered int
		holes      []Range
		accepted   uint64
		above      uint64
	}{
		"nothing":             {remembered: 0, above: 100},
		"all there ever were": {remembered: 100},
		"the newest":          {remembered: 40, above: 60},
		"behind a hole":       {remembered: 40, holes: []Range{{50, 59}}, above: 60},
		"around holes": {remembered: 40, holes: []Range{{20, 21}, {61, 69}, {95, 95}},
			above: 50},
		"not in a hole above":            {remembered: 40, holes: []Range{{101, 110}}, above: 60},
		"what a repair has not accepted": {remembered: 40, accepted: 60, above: 60},
		"what a repair has accepted":     {remembered: 40, accepted: 61},
	} {
		s := Start{Checkpoint: holding(at(0x2000, 100, 0), 0x1800, c.remembered).Checkpoint, Holes: c.holes,
			Accepted: c.accepted, Thru: 0x3000}
		above, upTo, n := s.Memory()
		if above != c.above || upTo != 100 || n != c.remembered {
			t.Errorf("%s: %d messages above %d and up to %d", name, n, above, upTo)
		}
		if err := config.CheckMemory(s, n); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n > 0 {
			f := outbox.FaultOf(config.CheckMemory(s, n-1))
			refused(t, f, "memory_lost", outbox.Gap, "0/1800 to 0/3000", nil)
			if f.From != 0x1800 || f.To != 0x3000 || f.Observed {
				t.Errorf("%s: %+v", name, f)
			}
		}
	}
}

// The hole below the oldest checkpoint's sequence stays in the record: else the start that reads back what
// lies around it would miss a message.
func TestHolesBetweenRememberedMessagesStay(t *testing.T) {
	t.Parallel()
	r := readings()
	r.Record = record(holding(at(0x1000, 5, 300*time.Second), 0, 3),
		holding(at(0x3000, 12, 10*time.Second), 0, 10))
	r.Record.Holes = []Range{{1, 1}, {4, 4}}
	start, err := Resolve(config, r)
	if err != nil {
		t.Fatal(err)
	}
	if above, upTo, n := start.Memory(); above != 1 || upTo != 5 || n != 3 {
		t.Errorf("%d messages above %d and up to %d", n, above, upTo)
	}
	update := NewTracker(config, start, epoch).BeginSave(epoch)
	if len(update.Holes) != 1 || update.Holes[0] != (Range{4, 4}) {
		t.Errorf("saves holes %v", update.Holes)
	}
}

func TestLimitsThatCanRemoveWhatIsRememberedAreRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limits Limits
		bad    bool
	}{
		"none":                      {Limits{}, false},
		"an age":                    {Limits{Age: 365 * 24 * time.Hour}, true},
		"a limit for each subject":  {Limits{PerSubject: 1 << 40}, true},
		"room for fewer than twice": {Limits{Messages: 1999}, true},
		"room for twice":            {Limits{Messages: 2000}, false},
		"bytes for fewer":           {Limits{Bytes: 2000*300 - 1, Average: 300}, true},
		"bytes for twice":           {Limits{Bytes: 2000 * 300, Average: 300}, false},
		"bytes of an empty stream":  {Limits{Bytes: 1}, false},
	} {
		err := config.CheckLimits(1000, c.limits)
		if c.bad {
			refused(t, err, "memory_limits", outbox.Fatal, "", nil)
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
