package limits

import (
	"github.com/outflowhq/outflow/internal/lab/harness"
)

// spilled returns the greatest size of the scratch files so far.
func spilled(f *harness.Footprint) int64 {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	return f.Spill
}
