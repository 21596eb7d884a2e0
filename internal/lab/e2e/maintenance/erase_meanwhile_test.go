package maintenance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestCopiesAreErasedWhileASegmentIsLost: it may take long until it is back, and the erasure has not finished
// until then.
func TestCopiesAreErasedWhileASegmentIsLost(t *testing.T) {
	t.Parallel()
	const doc = "gone"
	dir := t.TempDir()
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "eraselost", "ARCHIVE_URL=file://"+dir)
	_, err := f.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "COPY",
		Sources: []*jetstream.StreamSource{{Name: f.Stream}}})
	harness.Must(t, err)
	harness.Insert(t, f.Conn, doc, 1, "{}")
	archived(t, f, 2)
	settle(t, f)
	all, err := filepath.Glob(filepath.Join(dir, "v1", "*", "*.zst"))
	harness.Must(t, err)
	away := filepath.Join(t.TempDir(), "away")
	harness.Must(t, os.Rename(all[0], away))
	c, said, code := erase(t, f, "--doc", doc, "--request", "r", "--yes", "--wait", "20s")
	if code == 0 || c.Finished != nil || !strings.Contains(said, "code archive_damaged") {
		t.Fatalf("exit code %d: %+v\n%s", code, c, said)
	}
	s, err := f.JS.Stream(t.Context(), "COPY")
	harness.Must(t, err)
	if m, err := s.GetLastMsgForSubject(t.Context(), "outbox."+doc); err == nil {
		t.Errorf("the copy still has message %d: %+v", m.Sequence, c)
	}
	harness.Must(t, os.Rename(away, all[0]))
	c = erased(t, f, "--doc", doc, "--request", "r")
	if c.Archived != 1 || len(c.Copies) != 1 || c.Copies[0].Messages != 1 {
		t.Errorf("%+v", c)
	}
	if found := filesWith(t, dir, "outbox."+doc); len(found) > 0 {
		t.Errorf("it is still in %q", found)
	}
	f.MustStop(t)
}

// TestACutThatAnotherRunHasJustNotedIsOfThisServer: two runs of a request, as by cron and by hand. The second
// one has read how far the server is before the first one notes its cut.
func TestACutThatAnotherRunHasJustNotedIsOfThisServer(t *testing.T) {
	t.Parallel()
	const doc = "gone"
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasetwo")
	harness.Insert(t, f.Conn, doc, 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	args := []string{"--doc", doc, "--request", "r", "--yes"}
	if c, said, code := erase(t, f, args...); code != 1 || !waits(said) {
		t.Fatalf("exit code %d: %+v\n%s", code, c, said)
	}
	first, err := pgx.Connect(t.Context(), f.URL)
	harness.Must(t, err)
	defer first.Close(context.Background()) //nolint:errcheck // the test is over
	harness.Exec(t, first, "BEGIN; LOCK TABLE outflow_erasures IN ACCESS EXCLUSIVE MODE")
	said := make(chan string, 1)
	go func() {
		_, text, code := f.Run(append([]string{"erase", "--json", "--wait", "0s"}, args...)...)
		said <- fmt.Sprintf("exit code %d: %s", code, text)
	}()
	harness.Eventually(t, "the second one waits for the first one", func() error {
		if harness.Value[int](t, f.Conn, "SELECT count(*) FROM pg_locks WHERE NOT granted AND "+
			"relation = 'outflow_erasures'::regclass") == 0 {
			return fmt.Errorf("it does not yet")
		}
		return nil
	})
	harness.Insert(t, f.Conn, "another", 2, "{}")
	harness.Exec(t, first, "UPDATE outflow_erasures SET cut = pg_current_wal_insert_lsn(); COMMIT")
	if text := <-said; strings.Contains(text, "erase_server") {
		t.Error(text)
	}
	f.MustStop(t)
}
