package pipeline

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// maxGaps is how many open gaps the status names: the oldest.
const maxGaps = 5

// Gap is an open gap of gap mode: events of a document wait for counters that are missing.
type Gap struct {
	Doc   string `json:"doc_id"`
	Actor string `json:"actor_id,omitempty"`
	// of the sequence whose counters are missing, as in the Outflow header
	Sequence string `json:"sequence"`
	// the missing counters: "7" or "7 to 9", or "before 9" where the sequence is not remembered
	Missing string    `json:"missing"`
	Since   time.Time `json:"since"`   // commit time of the oldest event that waits
	Waiting int       `json:"waiting"` // events that wait
}

// maxName is how many bytes of a document or actor are shown.
const maxName = 100

func clip(name string) string {
	if len(name) <= maxName {
		return strings.Clone(name) // the event's bytes are not kept for it
	}
	return strings.ToValidUTF8(name[:maxName], "") + "..."
}

func missing(g *reorder.Gap) string {
	switch {
	case g.Cold:
		return fmt.Sprintf("before %d", g.Last+1)
	case g.First == g.Last:
		return fmt.Sprint(g.First)
	}
	return fmt.Sprintf("%d to %d", g.First, g.Last)
}

// openGaps names the oldest open gaps.
func (s *session) openGaps() []Gap {
	open := s.buffer.Gaps(maxGaps)
	gaps := make([]Gap, len(open))
	for i := range open {
		g := &open[i]
		gaps[i] = Gap{Doc: clip(g.Doc), Actor: clip(g.Actor), Missing: missing(g),
			Sequence: string(outbox.AppendSequence(nil, g.Sequence)), Since: relay.CommitTime(g.Since),
			Waiting: g.Waiting}
	}
	return gaps
}

// unlistedFor is how long more sequences wait than a checkpoint can list until that is logged.
const unlistedFor = time.Minute

// reportGaps shows the gaps that are open, and logs those that were given up, and what came late.
func (s *session) reportGaps(now time.Time) {
	n := s.buffer.OpenGaps()
	switch {
	case !s.buffer.TooManyHolds():
		s.unlisted = time.Time{}
	case s.unlisted.IsZero():
		s.unlisted = now
	case now.Sub(s.unlisted) >= unlistedFor:
		s.p.notices.unlisted.say(s.log, slog.LevelWarn, "so many sequences wait for missing counters that a "+
			"checkpoint can't list them: none is recorded, and PostgreSQL keeps WAL", "most", relay.MaxHolds,
			"since", s.unlisted, "open_gaps", n)
	}
	s.p.health.setGaps(n, s.openGaps(), s.unlisted)
	s.logGaps()
}

// gapLines is how many gaps that were given up the log names in a minute, and how many late events of each
// kind.
const gapLines = 32

// logGaps counts and logs what was given up and what came late since it was called last. The buffer names the
// first few of each.
func (s *session) logGaps() {
	n, seen, now := &s.p.notices, s.metrics.gapsSeen, s.buffer.GapCounts()
	s.metrics.addGaps(now)
	unnamed := now.Bound - seen.Bound + now.Size - seen.Size + now.Settings - seen.Settings +
		now.Cut - seen.Cut
	for _, g := range s.buffer.GivenUp() {
		unnamed--
		n.gaps.sayUpTo(gapLines, s.log, slog.LevelWarn, "missing counters are waited for no longer: their "+
			"transactions were rolled back, or will be late", "reason", g.Reason.String(),
			"doc_id", clip(g.Doc), "actor_id", clip(g.Actor), "missing", missing(&g.Gap))
	}
	n.gaps.suppressed += unnamed
	n.gaps.rest(s.log, "more gaps were given up than the log names")
	late := [...]uint64{reorder.Missed: now.Missed - seen.Missed, reorder.Repeat: now.Repeats - seen.Repeats,
		reorder.Reset: now.Resets - seen.Resets}
	for _, e := range s.buffer.LateEvents() {
		late[e.Why]--
		n.late[e.Why].sayUpTo(gapLines, s.log, slog.LevelWarn, lateWhat[e.Why], "doc_id", clip(e.Doc),
			"actor_id", clip(e.Actor), "counter", e.Counter)
	}
	for why, unnamed := range late {
		n.late[why].suppressed += unnamed
		n.late[why].rest(s.log, "more events came late than the log names")
	}
}

var lateWhat = map[reorder.Lateness]string{
	reorder.Missed: "a counter came that was waited for no longer: its event is published late",
	reorder.Repeat: "a counter came that its sequence had passed: it was used twice, or given up long ago",
	reorder.Reset: "a first counter came again: the sequence seems to begin anew, and the actor needs " +
		"another id",
}
