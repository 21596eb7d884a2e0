package e2e

import (
	"errors"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestSnapshotOfPrepared: transactions that are prepared, with savepoints, on either side of the slot's beginning are published once: one that is
// prepared when the slot is made is waited for.
func TestSnapshotOfPrepared(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Own(t, 0, "max_prepared_transactions=5"), ns.URL(), "prepared", 100)
	prepare := func(doc string) {
		t.Helper()
		mustExec(t, f.conn, "BEGIN")
		row(t, f.conn, doc, 1, "{}")
		mustExec(t, f.conn, "SAVEPOINT one")
		row(t, f.conn, doc, 2, "{}")
		mustExec(t, f.conn, "ROLLBACK TO one")
		mustExec(t, f.conn, "SAVEPOINT two")
		row(t, f.conn, doc, 3, "{}")
		mustExec(t, f.conn, "PREPARE TRANSACTION '"+doc+"'")
	}
	prepare("before")
	f.set("FAILPOINT=stop.snapshot.made:1")
	k := f.taking(t)
	f.env = f.env[:len(f.env)-1]
	eventually(t, "the slot waits", func() error {
		var waits bool
		err := f.conn.QueryRow(t.Context(), "SELECT count(*) = 1 FROM pg_replication_slots WHERE slot_name = $1 AND active", f.slot).Scan(&waits)
		if err == nil && !waits {
			err = errors.New("not yet")
		}
		return err
	})
	prepare("after") // the slot brings it, or is waited for as well
	mustExec(t, f.conn, "COMMIT PREPARED 'before'")
	mustExec(t, f.conn, "COMMIT PREPARED 'after'")
	k.asleep(t)
	prepare("behind")
	must(t, k.child.Resume())
	if code, stderr := k.ends(t); code != 0 {
		t.Fatalf("exit code %d\n%s", code, stderr)
	}
	f.start()
	mustExec(t, f.conn, "COMMIT PREPARED 'behind'")
	f.complete(t, ns.URL(), 0)
	if c := judgeSnapshots(t, messages(t, f.js, f.stream), docOfSubject); c.snapshot+c.live != 106 || c.live < 2 {
		t.Errorf("%+v", c)
	}
}
