package clusters

import (
	"errors"
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// TestAPromotedHomeTakesTheStreamBack: a standby of the home's server is promoted while another cluster makes
// its stream. With the home's slot on it, which PostgreSQL 17 and newer synchronise, the home takes the
// stream back; without it, when it is repaired. Each event is in the stream once.
func TestAPromotedHomeTakesTheStreamBack(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	majors := awayMajors(t)
	major := majors[len(majors)-1]
	s := newSharedHome(t, major, 2)
	home, away := s.home.o, s.others[0]
	js := harness.JetStream(t, s.natsURL)
	home.Start()
	away.Start()
	away.AwaitState("standby")
	harness.Exec(t, s.home.conn, harness.InsertNumbered, 1, 10)
	harness.AwaitMessages(t, js, home.Stream, 10)
	settings := map[string]string{}
	if major >= 17 {
		settings["sync_replication_slots"] = "off" // it is asked to
	}
	standby, err := s.home.pg.Standby(t.Context(), "physical", settings)
	harness.Must(t, err)
	t.Cleanup(func() { _ = standby.Remove() }) // the test is over
	on := harness.Connect(t, standby.URL("app"))
	if major >= 17 {
		primary := harness.Connect(t, s.home.pg.URL("postgres"))
		harness.Eventually(t, "the slot is synchronised", func() error {
			harness.Exec(t, primary, "SELECT pg_log_standby_snapshot()")
			if _, err := on.Exec(t.Context(), "SELECT pg_sync_replication_slots()"); err != nil {
				return err
			}
			if n := harness.Value[int](t, on, "SELECT count(*)::int FROM pg_replication_slots WHERE "+
				"slot_name = $1 AND synced AND NOT temporary", home.Slot); n == 0 {
				return errors.New("it is not")
			}
			return nil
		})
	}
	home.Kill()
	harness.Exec(t, s.home.conn, harness.InsertNumbered, 11, 20)
	s.awaitOwner("taken over", map[int]*harness.Outflow{2: away})
	s.awaitReplicated(2)
	end := harness.WALEnd(t, s.home.conn)
	harness.Eventually(t, "the standby has everything", func() error {
		if at := harness.LSN(t, on, "SELECT pg_last_wal_replay_lsn()::text"); at < end {
			return fmt.Errorf("%v of %v", at, end)
		}
		return nil
	})
	harness.Must(t, s.home.pg.Kill())
	harness.Must(t, standby.Promote(t.Context()))
	home.Set("POSTGRES_URL=" + standby.URL("app"))
	if major < 17 {
		home.Start()
		home.MustEndInGap("slot_missing")
		_, errOut, code := home.Repair("--accept", "slot_missing", "--where", "actor_id = 'a'")
		if code != 0 {
			t.Fatalf("outflow repair: exit code %d\n%s", code, errOut)
		}
	}
	home.Start()
	s.awaitOwner("the home is back", map[int]*harness.Outflow{1: home})
	harness.Exec(t, harness.Connect(t, standby.URL("app")), harness.InsertNumbered, 21, 30)
	s.awaitStored(30)
}
