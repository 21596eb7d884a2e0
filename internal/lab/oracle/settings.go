package oracle

import (
	"regexp"
	"strconv"
	"time"
)

// Settings are the ordering settings.
type Settings struct {
	Horizon   time.Duration
	Sort      Sort
	MaxEvents int
	MaxBytes  int64
	Gap       Gap // where Sort is ByGap, and Horizon 0
}

// DefaultSettings are those that init takes where nothing else is said.
var DefaultSettings = Settings{20 * time.Millisecond, BySeqKey, 65536, 64 << 20, Gap{}}

// change is a change of settings that was written for a slot.
type change struct {
	slot     string
	settings Settings
}

var settingsForm = regexp.MustCompile(
	`^v=0*1 slot=([^ ]+) horizon=([^ ]+) sort=(seq_key|commit) max_events=([0-9]+) max_bytes=([0-9]+)$`)

var gapForm = regexp.MustCompile(`^v=0*2 slot=([^ ]+) mode=gap bound=([^ ]+) cold=([^ ]+) ` +
	`memory=([0-9]+) first_counter=([01]) gap_scope=(sequence|document) max_events=([0-9]+) ` +
	`max_bytes=([0-9]+)$`)

// parseChange reads the content of a settings message; false: malformed, or of another version.
func parseChange(content string) (change, bool) {
	if m := gapForm.FindStringSubmatch(content); m != nil {
		return parseGapChange(m)
	}
	m := settingsForm.FindStringSubmatch(content)
	if m == nil {
		return change{}, false
	}
	c := change{slot: m[1]}
	s := &c.settings
	var errs [3]error
	s.Horizon, errs[0] = time.ParseDuration(m[2])
	if m[3] == "commit" {
		s.Sort = ByCommit
	}
	s.MaxEvents, errs[1] = strconv.Atoi(m[4])
	s.MaxBytes, errs[2] = strconv.ParseInt(m[5], 10, 64)
	return c, errs == [3]error{} && s.Horizon >= 0 && s.Horizon <= 24*time.Hour &&
		s.Horizon%time.Microsecond == 0 && s.limited()
}

func parseGapChange(m []string) (change, bool) {
	c := change{slot: m[1], settings: Settings{Sort: ByGap}}
	s := &c.settings
	g := &s.Gap
	var errs [5]error
	g.Bound, errs[0] = time.ParseDuration(m[2])
	g.Cold, errs[1] = time.ParseDuration(m[3])
	g.Memory, errs[2] = strconv.Atoi(m[4])
	if m[5] == "1" {
		g.First = 1
	}
	g.Document = m[6] == "document"
	s.MaxEvents, errs[3] = strconv.Atoi(m[7])
	s.MaxBytes, errs[4] = strconv.ParseInt(m[8], 10, 64)
	return c, errs == [5]error{} && g.Bound > 0 && g.Bound <= 24*time.Hour && g.Bound%time.Microsecond == 0 &&
		g.Cold >= 0 && g.Cold <= g.Bound && g.Cold%time.Microsecond == 0 &&
		g.Memory > 0 && g.Memory <= 1<<20 && s.limited()
}

func (s *Settings) limited() bool {
	return s.MaxEvents > 0 && s.MaxEvents <= 4<<20 && s.MaxBytes > 0 && s.MaxBytes <= 1<<30
}
