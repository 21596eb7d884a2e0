package consumeradmin

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/operate/args"
	"github.com/outflowhq/outflow/outbox"
)

// target is where a consumer is moved back to: the first event that is delivered again.
type target struct {
	kind     string // start, seq, position or time
	seq      uint64 // of start and seq
	position outbox.Position
	time     time.Time
}

// parseTarget reads start, seq:N, position:P or time:T. It needs no server, so mistakes are reported first.
func parseTarget(to string, now time.Time) (p target, err error) {
	kind, value, _ := strings.Cut(to, ":")
	p.kind = kind
	switch kind {
	case "start":
		p.seq = 1
		if value != "" {
			err = errors.New("start has no value")
		}
	case "seq":
		if p.seq, err = strconv.ParseUint(value, 10, 63); err != nil || p.seq == 0 {
			err = errors.New("not a sequence: they begin at 1")
		}
	case "position":
		p.position, err = args.FirstPosition(value)
	case "time":
		p.time, err = args.Time(value, now)
	default:
		err = errors.New("not a place")
	}
	if err != nil {
		return p, usage("rewind_to", fmt.Sprintf("--to %q: %v", to, err),
			"Write start, seq:N, position:LSN-i or time:2026-01-31T12:00:00Z (or time:2h, for two hours ago)")
	}
	return p, nil
}
