package torture

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/outflowhq/outflow/internal/lab/oracle"
)

// The values of reorder.mode.
const (
	modeHorizon = "horizon"
	modeGap     = "gap"
)

// settingsOf are the ordering settings that the outflows begin with.
func settingsOf(o *Options) oracle.Settings {
	if o.Mode == modeGap {
		return gapSettings(rand.New(rand.NewPCG(o.Seed, 1<<35)))
	}
	s := horizonSettings()
	s.Horizon = o.Horizon
	if o.Sort == oracle.ByCommit.String() {
		s.Sort = oracle.ByCommit
	}
	return s
}

// columnsOf are the table's columns: in gap mode events take several counters with half of the seeds.
func columnsOf(o *Options) oracle.Columns {
	c := oracle.DefaultColumns
	if o.Mode == modeGap && rand.New(rand.NewPCG(o.Seed, 1<<36)).IntN(2) == 0 {
		c.Span = "span"
	}
	return c
}

func horizonSettings() oracle.Settings {
	s := oracle.DefaultSettings
	s.MaxBytes = maxBytes
	return s
}

// gapSettings chooses settings of gap mode: transactions of the load stay open for longer than some of the
// bounds, and not all memories hold all of its sequences.
func gapSettings(r *rand.Rand) oracle.Settings {
	s := horizonSettings()
	s.Horizon, s.Sort, s.Gap = 0, oracle.ByGap, oracle.DefaultGap
	s.Gap.Bound = []time.Duration{100 * time.Millisecond, time.Second, 3 * time.Second}[r.IntN(3)]
	s.Gap.Cold = []time.Duration{0, 20 * time.Millisecond}[r.IntN(2)]
	s.Gap.Memory = []int{4, 64, 16384}[r.IntN(3)]
	s.Gap.Document = r.IntN(2) == 0
	return s
}

// anySettings chooses settings of either mode.
func anySettings(r *rand.Rand) oracle.Settings {
	if r.IntN(2) == 0 {
		return gapSettings(r)
	}
	s := horizonSettings()
	s.Horizon = []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond,
		200 * time.Millisecond}[r.IntN(4)]
	s.Sort = []oracle.Sort{oracle.BySeqKey, oracle.ByCommit}[r.IntN(2)]
	return s
}

func scopeOf(s oracle.Settings) string {
	if s.Gap.Document {
		return "document"
	}
	return "sequence"
}

// environOf are ordering settings as an instance's environment takes them.
func environOf(s oracle.Settings) string {
	if s.Sort == oracle.ByGap {
		return fmt.Sprintf("OUTFLOW_REORDER_MODE=gap OUTFLOW_REORDER_BOUND=%v OUTFLOW_REORDER_COLD=%v "+
			"OUTFLOW_REORDER_MEMORY=%d OUTFLOW_REORDER_GAP_SCOPE=%s", s.Gap.Bound, s.Gap.Cold, s.Gap.Memory,
			scopeOf(s))
	}
	return fmt.Sprintf("OUTFLOW_REORDER_HORIZON=%v OUTFLOW_REORDER_SORT=%v", s.Horizon, s.Sort)
}

// textOf says in a report how the outflows order.
func textOf(w *shape) string {
	s := w.settings
	if s.Sort == oracle.ByGap {
		return fmt.Sprintf("mode=gap bound=%v cold=%v memory=%d scope=%s spans=%t", s.Gap.Bound, s.Gap.Cold,
			s.Gap.Memory, scopeOf(s), w.columns.Span != "")
	}
	return fmt.Sprintf("horizon=%v sort=%v", s.Horizon, s.Sort)
}
