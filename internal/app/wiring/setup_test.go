package wiring

import (
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
)

// A table that init makes has a column for each header that names none of the others.
func TestANewTableHasTheColumnsOfHeaders(t *testing.T) {
	t.Parallel()
	cfg, err := config.Load(nil, []string{"OUTFLOW_COLUMNS_DOC_ID=note",
		"OUTFLOW_HEADERS=traceparent=trace,Again=trace,Type=event_type," +
			"Doc=note,Role=doc_id,Key=seq_key,At=created_at"})
	must.Succeed(t, err)
	if got := Setup(cfg).Further; !slices.Equal(got, []string{"trace", "event_type"}) {
		t.Errorf("columns %q", got)
	}
}
