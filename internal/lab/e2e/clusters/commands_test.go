package clusters

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// TestCommandsOfASharedStream: while another cluster makes the home's stream, a command works, or names the
// owner and the way out; elsewhere it says that it is for the home. None changes the stream or the records.
// A home that has lost its slot meanwhile is repaired, and nothing is missing.
func TestCommandsOfASharedStream(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	majors := awayMajors(t)
	s := newSharedHome(t, majors[len(majors)-1], 2)
	home, away := s.home.o, s.others[0]
	for _, o := range []*harness.Outflow{home, away} {
		o.Set("ARCHIVE_URL=file://"+t.TempDir(), "ARCHIVE_SEGMENT_AGE=0s")
	}
	home.Start()
	away.Start()
	away.AwaitState("standby")
	js := harness.JetStream(t, s.natsURL)
	harness.Exec(t, s.home.conn, harness.InsertNumbered, 1, 10)
	harness.AwaitMessages(t, js, home.Stream, 10)
	home.Kill()
	harness.Exec(t, s.home.conn, harness.InsertNumbered, 11, 20)
	s.awaitOwner("taken over", map[int]*harness.Outflow{2: away})
	s.awaitReplicated(2)
	away.Kill()

	// Why a command is refused.
	const owners, homes, all = "another cluster owns the stream", "this is not the home", ""
	state := func() (seqs []uint64) {
		for _, name := range []string{home.Stream, "KV_outflow-" + home.Stream} {
			stream, err := js.Stream(t.Context(), name)
			harness.Must(t, err)
			info, err := stream.Info(t.Context())
			harness.Must(t, err)
			seqs = append(seqs, info.State.Msgs, info.State.LastSeq)
		}
		return seqs
	}
	before := state()
	for _, c := range []struct{ args, refused string }{
		{"repair", owners},
		{"repair --check --where true", owners},
		{"repair --accept slot_missing", owners},
		{"drain", owners},
		{"init --dry-run", owners},
		{"init", owners},
		{"init --snapshot", owners},
		{"uninstall", owners},
		{"uninstall --with-stream --accept uninstall_unpublished --yes", owners},
		{"archive run --now", owners},
		{"stream plan", owners},
		{"stream apply", owners},
		{"partition plan", owners},
		{"partition apply", owners},
		{"maintain --once", owners},
		{"erase --doc doc1 --request r1", owners},
		{"erase --doc doc1 --request r1 --yes", owners},
		{"inspect", homes},
		{"replay --seq 1..3 --from stream", homes},
		{"replay --doc doc1 --from table", homes},
		{"archive list", homes},
		{"archive verify", homes},
		{"consumer list", homes},
		{"init --print", all},
		{"status", all},
		{"tail --last 3 --count 3", all},
		{"support --timeout 2s --output " + t.TempDir() + "/s.tar.gz", all},
	} {
		args := strings.Fields(c.args)
		switch {
		case c.refused == owners:
			home.MustFail(3, args, "cluster_owner", "cluster 2 makes stream HOME1", "`outflow run` here")
		case c.args == "archive verify": // it may read its archive, which has nothing
			home.MustFail(3, args, "archive_empty")
		default:
			home.MustRun(args...)
		}
		switch {
		case args[0] == "uninstall":
			away.MustFail(3, args, "cluster_owner")
		case c.refused == all || c.args == "init" || c.args == "init --dry-run":
			away.MustRun(args...)
		default:
			away.MustFail(3, args, "Run it at home")
		}
		after := state()
		if args[0] == "maintain" { // what it says of itself lies beside the record
			before[2], before[3] = after[2], after[3]
		}
		if !slices.Equal(before, after) {
			t.Fatalf("outflow %s: messages and last sequences of stream and bucket were %v, are %v", c.args,
				before, after)
		}
	}

	// A slot that was lost can't be made anew elsewhere, and outflow run can't take the stream back.
	away.Start()
	harness.Exec(t, s.home.conn, "SELECT pg_drop_replication_slot($1)", home.Slot)
	home.Start()
	home.MustEndInGap("slot_missing")
	const here = "actor_id = 'a'" // the others' rows are in the table, too
	home.MustFail(4, []string{"repair", "--where", here}, "slot_missing")
	if _, errOut, code := home.Repair("--accept", "slot_missing", "--where", here); code != 0 {
		t.Fatalf("outflow repair: exit code %d\n%s", code, errOut)
	}
	home.Start()
	s.awaitOwner("the home is repaired", map[int]*harness.Outflow{1: home})
	harness.Exec(t, s.home.conn, harness.InsertNumbered, 21, 30)
	s.awaitStored(30)

	home.MustStop(t)
	home.MustFail(3, []string{"uninstall", "--yes"}, "uninstall_standby", "cluster 2 stands by")
	away.Kill()
	away.MustRun("uninstall", "--yes")
	home.MustRun("uninstall", "--yes")
}
