package e2e

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestReplayOfRowsAlike: a replay of the table that was cut goes on by document, key and id. Between rows that have all three in common it
// does not: it would pass over those that are missing.
func TestReplayOfRowsAlike(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "replayalike")
	mustExec(t, conn, "CREATE TABLE outbox (doc_id text NOT NULL, seq_key text NOT NULL, payload jsonb NOT NULL)")
	o.init()
	mustExec(t, conn, `INSERT INTO outbox VALUES ('a', '1', '1'), ('a', '2', '2'), ('a', '3', '3'), ('a', '3', '4')`)
	s := js(t, ns.URL())
	args := []string{"replay", "--from", "table", "--to", "stream:ALIKE", "--replay-id", "once"}
	never := func(seq uint64) { // the last message never came
		t.Helper()
		st, err := s.Stream(t.Context(), "ALIKE")
		must(t, err)
		must(t, st.DeleteMsg(t.Context(), seq))
	}
	if _, errOut, code := o.exec(args...); code != 0 {
		t.Fatalf("exit code %d: %s", code, errOut)
	}
	never(4)
	o.fails(3, args, "2 rows of table public.outbox have document, key and id")
	never(3)
	out, errOut, code := o.exec(args...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, errOut)
	}
	o.mustSay("behind a row of its own", out, "2 events published")
}
