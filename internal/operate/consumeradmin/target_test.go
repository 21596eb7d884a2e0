package consumeradmin

import (
	"errors"
	"testing"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// A target that cannot be read is a usage error before a stream, a consumer or a connection is needed: Admin
// is empty here.
func TestTargetIsReadBeforeAnythingIsAsked(t *testing.T) {
	t.Parallel()
	for _, to := range []string{"", "elsewhere", "start:1", "seq:", "seq:0", "seq:-1", "seq:x", "position:x",
		"time:yesterday"} {
		var fault *outbox.Fault
		err := new(Admin).Rewind(t.Context(), Rewind{Name: "search", To: to})
		if !errors.As(err, &fault) || fault.Class != outbox.Usage || fault.Code != "rewind_to" {
			t.Errorf("--to %q: %v, want a usage error", to, err)
		}
	}
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	for to, want := range map[string]target{
		"start":                     {kind: "start", seq: 1},
		"seq:7":                     {kind: "seq", seq: 7},
		"position:0/10":             {kind: "position", position: outbox.Position{LSN: 16}},
		"position:0/10-3":           {kind: "position", position: outbox.Position{LSN: 16, Index: 3}},
		"time:2h":                   {kind: "time", time: now.Add(-2 * time.Hour)},
		"time:2026-01-30T00:00:00Z": {kind: "time", time: time.Date(2026, 1, 30, 0, 0, 0, 0, time.UTC)},
	} {
		if got, err := parseTarget(to, now); err != nil || got.kind != want.kind || got.seq != want.seq ||
			got.position != want.position ||
			!got.time.Equal(want.time) {
			t.Errorf("%s: %+v, %v, want %+v", to, got, err, want)
		}
	}
}
