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
	DenyPurge  bool `json:"deny_purge"`
	DenyDelete bool `json:"deny_delete"`
	Sealed     bool `json:"sealed"`
}

// PurgeDenied names the setting that lets nobody purge messages; "": none does.
func (l Limits) PurgeDenied() string { return l.denied("deny_purge", l.DenyPurge) }

// DeleteDenied names the setting that lets nobody delete a message; "": none does.
func (l Limits) DeleteDenied() string { return l.denied("deny_delete", l.DenyDelete) }

func (l Limits) denied(name string, set bool) string {
	switch {
	case l.Sealed:
		return "sealed"
	case set:
		return name
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
