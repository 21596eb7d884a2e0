package e2e

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestZombie: the owner of the slot is frozen, the slot is taken from it, another outflow takes over and publishes, and the frozen one
// wakes up with messages in its hands. What it still sends is the very message that is there, or is refused: nothing comes twice.
func TestZombie(t *testing.T) {
	slow(t)
	t.Parallel()
	const ops = 6000
	for _, horizon := range []string{"0s", "20ms"} {
		t.Run("horizon="+horizon, func(t *testing.T) {
			t.Parallel()
			s := startTwins(t, pgtest.Own(t, 0), natstest.Server(t).URL(), "zombie", "REORDER_HORIZON="+horizon)
			other := newOutflow(t, s.url, s.nats.URL(), s.victim.slot, "REORDER_HORIZON="+horizon)
			other.named(s.victim.stream)
			s.victim.state("running")
			other.start()
			other.state("standby")

			l := startLoad(t, s.url, traces(t, ops), 8, 1000, 11)
			written := func(more int) {
				from := int(l.written.Load())
				eventually(t, fmt.Sprintf("%d more written", more), func() error {
					if got := int(l.written.Load()) - from; got < more && from+more < ops {
						return fmt.Errorf("%d", got)
					}
					return nil
				})
			}
			owner, standby := s.victim, other
			for round := range 3 {
				written(300)
				must(t, owner.child.Pause())
				mustExec(t, s.conn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active", s.victim.slot)
				standby.state("running")
				written(200 + 100*round)
				must(t, owner.child.Resume())
				owner.state("standby")
				owner, standby = standby, owner
			}
			l.wait(t)
			s.equal(ops)
			for _, o := range []*outflow{owner, standby} {
				if code := o.term(); code != 0 {
					t.Errorf("stop: exit code %d", code)
				}
			}
		})
	}
}
