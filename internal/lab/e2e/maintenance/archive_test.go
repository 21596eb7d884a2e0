package maintenance

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAStreamIsRestoredFromTheArchive: the stream is deleted, and most rows are gone as well. The archive
// brings the stream back, a repair what was not archived yet, and outflow run goes on.
func TestAStreamIsRestoredFromTheArchive(t *testing.T) {
	t.Parallel()
	r := newRetained(t, pgtest.Server(t), "restored", "ARCHIVE_URL=file://"+t.TempDir())
	r.Init()
	r.Start()
	for day := 1; day <= 3; day++ {
		r.write(day, 400)
	}
	harness.AwaitMessages(t, r.JS, r.Stream, 1200)
	r.settle()
	harness.Exec(t, r.Conn, "DROP TABLE day_1, day_2, day_3")
	harness.Exec(t, r.Conn, "CREATE TABLE day_4 PARTITION OF outbox FOR VALUES FROM ('2024-05-04') TO "+
		"('2024-05-05')")
	var archived struct{ Archived uint64 }
	harness.Eventually(t, "all of the dropped rows are archived", func() error {
		r.write(4, 1) // a checkpoint is confirmed when another one follows
		r.settle()
		harness.Must(t, json.Unmarshal([]byte(r.MustRun("archive", "run", "--now", "--json")), &archived))
		if archived.Archived < 1200 {
			return fmt.Errorf("archived up to %d", archived.Archived)
		}
		return nil
	})
	r.write(4, 2)
	harness.AwaitMessages(t, r.JS, r.Stream, r.counter)
	r.settle()
	r.MustStop(t)
	harness.AwaitSlotFree(t, r.Conn, r.Slot)
	want := harness.Messages(t, r.JS, r.Stream)
	harness.Must(t, r.JS.DeleteStream(t.Context(), r.Stream))

	r.MustFailInGap("stream_missing", "run")
	env := r.Env
	r.Set("FAILPOINT=restore.message:200")
	if out, _, code := r.Run("archive", "restore"); code == 0 {
		t.Fatalf("it was not killed: %s", out)
	}
	r.Env = env
	r.MustFail(4, []string{"run"}, "code restore_unfinished", "outflow archive restore")
	report, stderr, code := r.Repair("--accept", "restore_unfinished")
	if code != 4 || !strings.Contains(stderr, "restore_unfinished") {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	r.MustContain("restore", r.MustRun("archive", "restore"),
		fmt.Sprintf("restored %d messages, 1 to %[1]d\n", archived.Archived))
	if report, stderr, code := r.Repair("--accept", "stream_recreated"); code != 0 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	r.Start()
	r.write(4, 1)
	harness.AwaitMessages(t, r.JS, r.Stream, r.counter)
	r.MustStop(t)

	got := harness.Messages(t, r.JS, r.Stream)
	if len(got) != len(want)+1 {
		t.Fatalf("%d messages, %d before", len(got), len(want))
	}
	ids := map[string]int{} // of what a repair published: the order between documents is another one
	for i, w := range want {
		g := got[i]
		if g.Seq > archived.Archived {
			ids[g.Outflow.ID]++
			ids[w.Outflow.ID]--
			continue
		}
		if g.Seq != w.Seq || g.Subject != w.Subject || !bytes.Equal(g.Data, w.Data) ||
			!maps.EqualFunc(headers(g), headers(w), slices.Equal) {
			t.Fatalf("%+v, it was %+v", g, w)
		}
	}
	for id, n := range ids {
		if n != 0 {
			t.Errorf("event %s is %d times more in the stream than before", id, n)
		}
	}
}

// headers are those that say something to consumers.
func headers(m *oracle.Message) map[string][]string {
	h := maps.Clone(m.Header)
	maps.DeleteFunc(h, func(name string, _ []string) bool { return strings.HasPrefix(name, "Nats-") })
	return h
}
