package archive

import (
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
)

// Report says what was archived. The JSON names are stable.
type Report struct {
	Folder   string    `json:"folder"`
	Segments []Segment `json:"segments"`  // that this run has written
	Archived uint64    `json:"archived"`  // the sequence up to which all is archived
	Stands   uint64    `json:"confirmed"` // the newest message that may be archived
	// when the oldest message was stored that may be archived and is not; zero: there is none
	Waits time.Time `json:"waits_since,omitzero"`
}

// Segment is a segment of the archive. The JSON names are stable.
type Segment struct {
	First    uint64          `json:"first"`
	Last     uint64          `json:"last"`
	Messages uint64          `json:"messages"`
	Missing  uint64          `json:"missing"`
	Erased   uint64          `json:"erased,omitempty"` // of these sequences
	Gaps     []archive.Range `json:"gaps,omitempty"`   // lost before they could be archived
	From     time.Time       `json:"from"`
	To       time.Time       `json:"to"`
	Bytes    int64           `json:"bytes"`
	Raw      int64           `json:"raw_bytes"`
	Object   string          `json:"object"`
}

func segmentOf(a *archive.Archive, m *archive.Manifest) Segment {
	return Segment{
		First: m.First, Last: m.Last, Messages: m.Count, Missing: m.Last - m.First + 1 - m.Count,
		Gaps: m.Gaps, Erased: m.Erased.Count(),
		From: m.From, To: m.To, Bytes: m.Bytes, Raw: m.Raw, Object: a.ObjectName(m),
	}
}

func (s Segment) String() string {
	text := fmt.Sprintf("%d to %d: %s", s.First, s.Last, units.Of(s.Messages, "message"))
	if s.Missing > 0 {
		text += fmt.Sprintf(", %d missing", s.Missing)
	}
	if s.Erased > 0 {
		text += fmt.Sprintf(", %d erased", s.Erased)
	}
	for _, g := range s.Gaps[:min(len(s.Gaps), maxNamed)] {
		text += fmt.Sprintf(", gap %d-%d", g.From, g.To)
	}
	if n := len(s.Gaps) - maxNamed; n > 0 {
		text += fmt.Sprintf(" and %s", units.Of(n, "other"))
	}
	if s.Messages == 0 {
		return text
	}
	return text + fmt.Sprintf(", %v to %v, %d bytes of %d", s.From.Format(time.RFC3339),
		s.To.Format(time.RFC3339), s.Bytes, s.Raw)
}
