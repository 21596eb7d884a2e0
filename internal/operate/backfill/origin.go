package backfill

import (
	"context"
	"fmt"
	"strings"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// CheckOrigin refuses a table into which subscriptions bring rows of other servers, where only those are to
// be published that were written here: the table does not say which they are.
func CheckOrigin(ctx context.Context, snap *tablesnapshot.Snapshot, hint string) error {
	names, err := catalog.BroughtBy(ctx, snap.Querier(), snap.Table().OID)
	if err != nil || len(names) == 0 {
		return err
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "rows_replicated",
		Message: fmt.Sprintf("subscriptions bring rows of other servers into table %s.%s: %s",
			snap.Table().Schema, snap.Table().Name, strings.Join(names, ", ")),
		Hint: hint,
	}
}
