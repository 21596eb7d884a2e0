package maintenance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestTheDocumentedRightsAreEnoughToErase: a role and a user with what docs/erasure.md says erase a document,
// and without any of it the error says what is missing.
func TestTheDocumentedRightsAreEnoughToErase(t *testing.T) {
	t.Parallel()
	nats := documentedRights(t, "erasure.md", "Rights, exit codes", 1)
	f := harness.NewInstallation(t, pgtest.Server(t), nats.as("admin"), "eraserights",
		"SINK_DURABLE_AFTER=0s")
	f.UseStream("OUTBOX") // that of the page
	harness.Exec(t, f.Conn, harness.GeneratedKey)
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	settle(t, f)

	run, owner := f.Slot+"_run", f.Slot+"_owner"
	harness.Exec(t, f.Conn, "CREATE ROLE "+run+" LOGIN REPLICATION")
	harness.Exec(t, f.Conn, "CREATE ROLE "+owner+" LOGIN")
	harness.Exec(t, f.Conn, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	harness.Exec(t, f.Conn, "ALTER TABLE outbox OWNER TO "+owner)
	url := func(role string) string { return strings.Replace(f.URL, "postgres@", role+"@", 1) }
	args := []string{"erase", "--doc", "gone", "--request", "r", "--wait", "0s", "--yes"}
	env := f.Env
	f.Set("POSTGRES_URL="+url(run), "NATS_URL="+nats.as(nats.documented))
	f.MustFail(3, args, "code no_right", "retain.postgres_url", "role "+owner)
	if out, _, _ := f.Run(args...); out != "" {
		t.Errorf("it has counted nothing, and reports:\n%s", out)
	}
	f.Set("RETAIN_POSTGRES_URL=" + url(owner))
	f.MustFail(3, args, "code no_right", "CREATE on schema")
	harness.Exec(t, f.Conn, "GRANT CREATE ON SCHEMA public TO "+owner)
	least := f.Env

	// erases runs it until nothing has to be waited for.
	erases := func(user string) (c certificate, said string, code int) {
		harness.Eventually(t, "nothing has to be waited for", func() error {
			f.Env = env
			settle(t, f)
			f.Env = least
			f.Set("NATS_URL=" + nats.as(user))
			c, said, code = erase(t, f, args[1:]...)
			if code == 1 && strings.Contains(said, "code erase_waits") {
				return fmt.Errorf("%v", c.Waiting)
			}
			return nil
		})
		return c, said, code
	}
	for _, l := range nats.lacking { // in the order in which they are needed
		if _, said, code := erases(l[0]); code != 3 || !strings.Contains(said, "nats_permission") {
			t.Errorf("without %s: exit code %d: %s", l[1], code, said)
		}
	}
	done, said, code := erases(nats.documented)
	if code != 0 || done.Finished == nil || done.Messages != 1 {
		t.Errorf("exit code %d: %+v\n%s", code, done, said)
	}

	// afterwards
	f.Env = env
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.Set("POSTGRES_URL=" + url(run))
	harness.Exec(t, f.Conn, "GRANT SELECT ON outbox TO "+run)
	f.MustRun("repair", "--check")
	for _, table := range []string{"outflow_erased_rows", "outflow_erasures"} {
		harness.Exec(t, f.Conn, "REVOKE SELECT ON "+table+" FROM "+run)
		f.MustFail(3, []string{"repair", "--check"}, "code no_right", "GRANT SELECT ON", table)
		harness.Exec(t, f.Conn, "GRANT SELECT ON "+table+" TO "+run)
	}
	harness.Exec(t, f.Conn, "UPDATE outflow_erasures SET cut_sequence = 1000") // the stream has lost its end
	harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot('"+f.Slot+"')")
	f.MustFail(3, []string{"repair"}, "code no_right", "retain.postgres_url", "write table")
	f.Set("RETAIN_POSTGRES_URL=" + url(owner))
	f.MustFail(4, []string{"repair"}, "code slot_missing")
}
