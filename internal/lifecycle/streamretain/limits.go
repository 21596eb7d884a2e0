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
