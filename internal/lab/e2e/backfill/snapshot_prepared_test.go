package backfill

import (
	"errors"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestASnapshotPublishesPreparedTransactionsOnce: transactions that are prepared, with savepoints, on either
// side of the slot's beginning are published once: one that is prepared when the slot is made is waited for.
func TestASnapshotPublishesPreparedTransactionsOnce(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := older(t, pgtest.Own(t, 0, "max_prepared_transactions=5"), ns.URL(), "prepared", 100)
	prepare := func(doc string) {
		t.Helper()
		harness.Exec(t, f.Conn, "BEGIN")
		harness.Insert(t, f.Conn, doc, 1, "{}")
		harness.Exec(t, f.Conn, "SAVEPOINT one")
		harness.Insert(t, f.Conn, doc, 2, "{}")
		harness.Exec(t, f.Conn, "ROLLBACK TO one")
		harness.Exec(t, f.Conn, "SAVEPOINT two")
		harness.Insert(t, f.Conn, doc, 3, "{}")
		harness.Exec(t, f.Conn, "PREPARE TRANSACTION '"+doc+"'")
	}
	prepare("before")
	f.Set("FAILPOINT=stop.snapshot.made:1")
	k := startTaking(f, t)
	f.Env = f.Env[:len(f.Env)-1]
	harness.Eventually(t, "the slot waits", func() error {
		var waits bool
		err := f.Conn.QueryRow(t.Context(), "SELECT count(*) = 1 FROM pg_replication_slots WHERE slot_name "+
			"= $1 AND active", f.Slot).Scan(&waits)
		if err == nil && !waits {
			err = errors.New("not yet")
		}
		return err
	})
	prepare("after") // the slot brings it, or is waited for as well
	harness.Exec(t, f.Conn, "COMMIT PREPARED 'before'")
	harness.Exec(t, f.Conn, "COMMIT PREPARED 'after'")
	k.asleep(t)
	prepare("behind")
	harness.Must(t, k.child.Resume())
	if code, stderr := k.ends(t); code != 0 {
		t.Fatalf("exit code %d\n%s", code, stderr)
	}
	f.Start()
	harness.Exec(t, f.Conn, "COMMIT PREPARED 'behind'")
	f.AwaitComplete(t, ns.URL(), 0)
	if c := judgeSnapshots(t, harness.Messages(t, f.JS, f.Stream), docOfSubject); c.snapshot+c.live != 106 ||
		c.live < 2 {
		t.Errorf("%+v", c)
	}
}
