package clusters

import (
	"path/filepath"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// TestAnOlderHomeDoesNotTakeTheStreamBack: the home's server is put back to an older copy while another
// cluster makes its stream. The home stops, as ever, takes nothing and changes nothing; repaired, while that
// cluster lives, it goes on, and what it published before the copy was put back stays in the stream, once.
func TestAnOlderHomeDoesNotTakeTheStreamBack(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	majors := awayMajors(t)
	s := newSharedHome(t, majors[len(majors)-1], 2)
	home, away, pg := s.home.o, s.others[0], s.home.pg
	js := harness.JetStream(t, s.natsURL)
	write := func(from, to int) {
		t.Helper()
		harness.Exec(t, harness.Connect(t, s.home.url), harness.InsertNumbered, from, to)
	}
	restart := func(copied func(string) error) {
		t.Helper()
		harness.Must(t, pg.Stop("fast"))
		harness.Must(t, copied(filepath.Join(pg.Dir, "backup")))
		harness.Must(t, pg.Start(t.Context()))
	}
	home.Start()
	away.Start()
	away.AwaitState("standby")
	write(1, 10)
	harness.AwaitMessages(t, js, home.Stream, 10)
	home.MustStop(t)
	restart(pg.Backup)
	home.Start()
	s.awaitOwner("the home has the stream", map[int]*harness.Outflow{1: home})
	write(11, 30)
	harness.AwaitMessages(t, js, home.Stream, 30)
	home.Kill()
	s.awaitOwner("taken over", map[int]*harness.Outflow{2: away})
	restart(pg.Restore)

	home.Start()
	home.MustEndInGap("server_behind")
	home.MustFail(4, []string{"repair", "--where", "actor_id = 'a'"}, "server_behind")
	if n := s.stored(); n != 30 {
		t.Errorf("%d events in the stream, want 30", n)
	}
	if n := owner(away); n != 2 {
		t.Errorf("cluster %d makes the stream, want 2", n)
	}
	if _, errOut, code := home.Repair("--accept", "server_behind", "--where", "actor_id = 'a'"); code != 0 {
		t.Fatalf("outflow repair: exit code %d\n%s", code, errOut)
	}
	home.Start()
	s.awaitOwner("the home is repaired", map[int]*harness.Outflow{1: home})
	write(31, 40)
	s.awaitStored(40)
}
