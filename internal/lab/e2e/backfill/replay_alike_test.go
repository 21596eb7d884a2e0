package backfill

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestACutReplayDoesNotResumeBetweenEqualRows: a replay of the table that was cut goes on by document, key
// and id. Between rows that have all three in common it does not: it would pass over those that are missing.
func TestACutReplayDoesNotResumeBetweenEqualRows(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "replayalike")
	harness.Exec(t, conn, "CREATE TABLE outbox (doc_id text NOT NULL, seq_key text NOT NULL, payload jsonb "+
		"NOT NULL)")
	o.Init()
	harness.Exec(t, conn,
		`INSERT INTO outbox VALUES ('a', '1', '1'), ('a', '2', '2'), ('a', '3', '3'), ('a', '3', '4')`)
	s := harness.JetStream(t, ns.URL())
	args := []string{"replay", "--from", "table", "--to", "stream:ALIKE", "--replay-id", "once"}
	never := func(seq uint64) { // the last message never came
		t.Helper()
		st, err := s.Stream(t.Context(), "ALIKE")
		harness.Must(t, err)
		harness.Must(t, st.DeleteMsg(t.Context(), seq))
	}
	o.MustRun(args...)
	never(4)
	o.MustFail(3, args, "2 rows of table public.outbox have document, key and id")
	never(3)
	out := o.MustRun(args...)
	o.MustContain("behind a row of its own", out, "2 events published")
}
