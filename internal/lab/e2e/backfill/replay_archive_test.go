package backfill

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestArchiveAndStreamAreReplayedAsOne: whatever retention took from the stream and the table, a replay gives
// the same lines as before, and fills a new stream.
func TestArchiveAndStreamAreReplayedAsOne(t *testing.T) {
	t.Parallel()
	ns, folder := natstest.Server(t), t.TempDir()
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "replaypast", "ARCHIVE_URL=file://"+folder,
		"SINK_DURABLE_AFTER=0s")
	o.Init()
	o.Start()
	s := harness.JetStream(t, ns.URL())
	n := 0
	write := func(rows int) {
		for range rows {
			n++
			harness.Insert(t, conn, fmt.Sprintf("doc%d", n%3), n, fmt.Sprintf(`{"n": %d}`, n))
		}
		harness.AwaitMessages(t, s, o.Stream, n)
	}
	write(60)
	harness.Eventually(t, "40 messages are archived", func() error {
		write(1) // a checkpoint is confirmed when another one follows
		var r struct{ Archived uint64 }
		harness.Must(t, json.Unmarshal([]byte(o.MustRun("archive", "run", "--now", "--json")), &r))
		if r.Archived < 40 {
			return fmt.Errorf("archived up to %d", r.Archived)
		}
		return nil
	})
	write(5) // these are not archived
	ranges := [][]string{{}, {"--doc", "doc1"}, {"--seq", "10..50"}, {"--seq", "40.."}, {"--time", "1h.."},
		{"--filter", "outbox.doc2"}}
	before := make([]string, len(ranges))
	for i, args := range ranges {
		before[i] = o.MustRun(append([]string{"replay"}, args...)...)
	}
	live, err := s.Stream(t.Context(), o.Stream)
	harness.Must(t, err)
	harness.Must(t, live.Purge(t.Context(), jetstream.WithPurgeSequence(41)))
	harness.Exec(t, conn, "DELETE FROM outbox")
	for i, args := range ranges {
		if got := o.MustRun(append([]string{"replay"}, args...)...); got != before[i] {
			t.Errorf("replay %v:\n%s\nbefore it was\n%s", args, got, before[i])
		}
	}
	o.MustRun("replay", "--to", "stream:PROJECTION")
	made, err := s.Stream(t.Context(), "PROJECTION")
	harness.Must(t, err)
	if got := made.CachedInfo().State.Msgs; got != uint64(n) {
		t.Errorf("the new stream has %d of %d events", got, n)
	}

	objects, err := filepath.Glob(filepath.Join(folder, "v1", "*", "*.zst"))
	harness.Must(t, err)
	data, err := os.ReadFile(objects[0])
	harness.Must(t, err)
	data[len(data)/2] ^= 1
	harness.Must(t, os.WriteFile(objects[0], data, 0o600))
	o.MustFail(4, []string{"replay"}, "archive_damaged", strings.TrimPrefix(objects[0], folder+"/"))
	if got := o.MustRun("replay", "--seq", "45.."); !strings.Contains(before[3], got) || got == "" {
		t.Errorf("what is in the stream needs no archive: %s", got)
	}
	// nor does what the table has
	manifests, err := filepath.Glob(filepath.Join(folder, "v1", "*", "*.json"))
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(manifests[0], []byte("{}"), 0o600))
	write(3)
	o.MustRun("replay", "--from", "table", "--to", "stream:ROWS")
	o.MustStop(t)
}

// TestAReplayWhoseArchiveIsAwayIsNotMadeOfWhatTheTableHasLeft: of a volume that is not mounted nobody knows
// what it has, and what it has leaves the table.
func TestAReplayWhoseArchiveIsAwayIsNotMadeOfWhatTheTableHasLeft(t *testing.T) {
	t.Parallel()
	ns, folder := natstest.Server(t), t.TempDir()
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "replayaway", "ARCHIVE_URL=file://"+folder,
		"SINK_DURABLE_AFTER=0s")
	o.Init()
	o.Start()
	s := harness.JetStream(t, ns.URL())
	for n := range 30 {
		harness.Insert(t, conn, "doc", n+1, "{}")
	}
	harness.AwaitMessages(t, s, o.Stream, 30)
	live, err := s.Stream(t.Context(), o.Stream)
	harness.Must(t, err)
	harness.Must(t, live.Purge(t.Context(), jetstream.WithPurgeSequence(21)))
	harness.Exec(t, conn, "DELETE FROM outbox WHERE counter <= 10")
	for _, at := range []string{folder, folder + "/none"} {
		o.MustFail(3, []string{"replay", "--to", "stream:PROJECTION", "--archive.url", "file://" + at},
			"replay_unsure", "is archive.url the right one, and mounted?", "Decide: --from stream")
	}
	for _, from := range [][]string{{"--from", "table"}, {"--archive.url", ""}} {
		if n := strings.Count(o.MustRun(append([]string{"replay"}, from...)...), "\n"); n != 20 {
			t.Errorf("%v: %d events", from, n)
		}
	}
	o.MustRun("replay", "--seq", "25..")
	o.MustStop(t)
	harness.Must(t, s.DeleteStream(t.Context(), o.Stream))
	o.MustFail(3, []string{"replay"}, "replay_unsure", "does not exist", "nor is its archive read without it")
}

// TestAReplayOfTheTableSaysThatPartitionsHaveLeftIt: without archive.url nobody looks who has them, nor where
// the archive can't say what is selected.
func TestAReplayOfTheTableSaysThatPartitionsHaveLeftIt(t *testing.T) {
	t.Parallel()
	o, conn, _ := harness.Install(t, pgtest.Server(t), natstest.Server(t).URL(), "replayleft",
		"INIT_PARTITION_BY=written_at")
	o.Init()
	harness.Insert(t, conn, "doc", 1, "{}")
	o.MustRun("partition", "apply")
	for _, c := range []struct {
		sql, url string
		warns    bool
	}{
		{"SELECT", "", false},
		{"UPDATE outflow_partitions SET state = 'dropped' WHERE name IN (SELECT name " +
			"FROM outflow_partitions ORDER BY upper DESC LIMIT 2)", "", true},
		{"SELECT", "file://" + t.TempDir(), false},
	} {
		harness.Exec(t, conn, c.sql)
		out, said, code := o.Run("replay", "--from", "table", "--archive.url", c.url)
		warns := strings.Contains(said, "warning: 2 partitions have left table public.outbox, and "+
			"archive.url is not set")
		if code != 0 || strings.Count(out, "\n") != 1 || warns != c.warns {
			t.Errorf("%+v: exit code %d: %s%s", c, code, out, said)
		}
	}
	o.Set("COLUMNS_SEQ_KEY=counter")
	_, said, code := o.Run("replay", "--actor", "anna", "--archive.url", "file://"+t.TempDir())
	if code != 0 || !strings.Contains(said, "warning: 2 partitions have left table public.outbox, and the "+
		"archive's messages do not say what is selected") {
		t.Errorf("exit code %d: %s", code, said)
	}
}
