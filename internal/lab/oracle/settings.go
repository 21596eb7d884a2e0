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
}

// DefaultSettings are those that init takes where nothing else is said.
var DefaultSettings = Settings{20 * time.Millisecond, BySeqKey, 65536, 64 << 20}

// change is a change of settings that was written for a slot.
type change struct {
	slot     string
	settings Settings
}

var settingsForm = regexp.MustCompile(
	`^v=0*1 slot=([^ ]+) horizon=([^ ]+) sort=(seq_key|commit) max_events=([0-9]+) max_bytes=([0-9]+)$`)

// parseChange reads the content of a settings message; false: malformed, or of another version.
func parseChange(content string) (change, bool) {
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
	valid := errs == [3]error{} && s.Horizon >= 0 && s.Horizon <= 24*time.Hour &&
		s.Horizon%time.Microsecond == 0 && s.MaxEvents > 0 && s.MaxEvents <= 4<<20 &&
		s.MaxBytes > 0 && s.MaxBytes <= 1<<30
	return c, valid
}
