package streamretain

import (
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
)

// TestAJumpOfTheClockLetsNoYoungMessageGo: nor does it keep old ones. Of a thousand messages, one a minute,
// those of nine hundred minutes stay.
func TestAJumpOfTheClockLetsNoYoungMessageGo(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)
	const age, year = 900 * time.Minute, 365 * 24 * time.Hour
	for _, c := range []struct {
		name     string
		from, to uint64 // of these the time is wrong
		by       time.Duration
		want     uint64
	}{
		{"none", 0, 0, 0, 99},
		{"the clock was back in the middle", 490, 510, -year, 99},
		{"the clock was back at the newest", 990, 1000, -year, 99},
		{"the clock was a year ahead at the front", 1, 20, year, 99},
		{"the clock was a year ahead later", 60, 70, year, 99},
		{"the clock is back", 1, 1000, year, 0},
		{"the clock was a little ahead at the front", 1, 20, 700 * time.Minute, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			asked := 0
			got, err := older(1, 1000, now, age, func(from uint64) (*jsapi.Message, error) {
				asked++
				from += from % 2 // the others were deleted
				if from > 1000 {
					return nil, nil
				}
				at := now.Add(-time.Duration(1000-from) * time.Minute)
				if c.from <= from && from <= c.to {
					at = at.Add(c.by)
				}
				return &jsapi.Message{Seq: from, Time: at}, nil
			})
			must.Succeed(t, err)
			if got != c.want-c.want%2 || asked > 25 {
				t.Errorf("those up to %d are old, want %d; %d questions", got, c.want, asked)
			}
		})
	}
}
