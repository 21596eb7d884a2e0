package streamretain

import (
	"fmt"
	"strings"
	"time"
)

// Limits are the settings of a stream by which JetStream removes messages, and asks nobody.
type Limits struct {
	MaxAge     time.Duration `json:"max_age"`
	MaxBytes   int64         `json:"max_bytes"`
	MaxMsgs    int64         `json:"max_msgs"`
	PerSubject int64         `json:"max_msgs_per_subject"`
	Discard    string        `json:"discard"`

	// These don't remove anything: they keep everybody from it.
	DenyPurge bool `json:"deny_purge"`
	Sealed    bool `json:"sealed"`
}

// Denied names the setting that lets nobody remove messages; "": none does.
func (l Limits) Denied() string {
	switch {
	case l.Sealed:
		return "sealed"
	case l.DenyPurge:
		return "deny_purge"
	}
	return ""
}

// String names those that are set; "": none is.
func (l Limits) String() string {
	var all []string
	if l.MaxAge > 0 {
		all = append(all, fmt.Sprintf("max_age %v", l.MaxAge))
	}
	if l.Discard != "new" && l.MaxMsgs > 0 {
		all = append(all, fmt.Sprintf("max_msgs %d", l.MaxMsgs))
	}
	if l.Discard != "new" && l.MaxBytes > 0 {
		all = append(all, fmt.Sprintf("max_bytes %d", l.MaxBytes))
	}
	if l.PerSubject > 0 {
		all = append(all, fmt.Sprintf("max_msgs_per_subject %d", l.PerSubject))
	}
	return strings.Join(all, ", ")
}
