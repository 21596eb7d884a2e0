package checkpoint

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// CodeHome is the code of the fault of a home's rows, read on another server, that are not those which the
// home has counted.
const CodeHome = "cluster_count"

// CountDiffers is the fault of a home that has counted other events than a subscription has brought: want and
// have are the tallies of both up to to, and they were equal up to from. It is seen to happen: what was
// skipped does not come again.
func (c Config) CountDiffers(from, to outbox.LSN, want, have relay.Tally) error {
	what := "as many, and not the same"
	if want.Events != have.Events {
		what = fmt.Sprint(have.Events)
	}
	return &outbox.Fault{
		Class: outbox.Gap, Code: CodeHome, Observed: true, From: min(from, to), To: max(from, to),
		Message: fmt.Sprintf("the home has committed %d events up to %v since it began to count, at %v; "+
			"subscription %s has brought %s. Up to %v they were the same", want.Events, to, want.Since,
			c.Mapping.Subscription, what, from),
		Hint: c.hintOf(CodeHome, ""),
	}
}
