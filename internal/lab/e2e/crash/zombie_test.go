package crash

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAZombieStoresNothingTwice: the owner of the slot is frozen, the slot is taken from it, another outflow
// takes over and publishes, and the frozen one wakes up with messages in its hands. What it still sends is
// the very message that is there, or is refused: nothing comes twice.
func TestAZombieStoresNothingTwice(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const ops = 6000
	for _, horizon := range []string{"0s", "20ms"} {
		t.Run("horizon="+horizon, func(t *testing.T) {
			t.Parallel()
			s := startTwins(t, pgtest.Own(t, 0), natstest.Server(t).URL(), "zombie", "REORDER_HORIZON="+
				horizon)
			other := harness.New(t, s.URL, s.NATS.URL(), s.Instance.Slot, "REORDER_HORIZON="+horizon)
			other.UseStream(s.Instance.Stream)
			other.Start()
			owner, standby := harness.AwaitRoles(s.Instance, other)

			l := harness.StartLoad(t, s.URL, harness.RecordedOps(t, ops), 8, 1000, 11)
			written := func(more int) {
				from := int(l.Written.Load())
				harness.Eventually(t, fmt.Sprintf("%d more written", more), func() error {
					if got := int(l.Written.Load()) - from; got < more && from+more < ops {
						return fmt.Errorf("%d", got)
					}
					return nil
				})
			}
			for round := range 3 {
				written(300)
				harness.Must(t, owner.Process.Pause())
				harness.Exec(t, s.Conn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "+
					"WHERE slot_name = $1 AND active", s.Instance.Slot)
				standby.AwaitState("running")
				written(200 + 100*round)
				harness.Must(t, owner.Process.Resume())
				// On a machine that stands still, the slot may have gone back to the one that was paused.
				owner, standby = harness.AwaitRoles(standby, owner)
			}
			l.Wait(t)
			s.MustBeEqual(ops)
			for _, o := range []*harness.Outflow{owner, standby} {
				o.MustStop(t)
			}
		})
	}
}
