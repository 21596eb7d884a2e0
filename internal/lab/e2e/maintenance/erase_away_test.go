package maintenance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAnErasureDoesNotTakeAnArchiveThatIsAwayForOneOfNothing: retention has taken the document's messages
// from the stream, and nothing else would show that the certificate leaves out the archive.
func TestAnErasureDoesNotTakeAnArchiveThatIsAwayForOneOfNothing(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "archive")
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "eraseaway", "ARCHIVE_URL=file://"+dir)
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	settle(t, f)
	settle(t, f) // the record says of the former one that it is confirmed
	f.MustRun("archive", "run", "--now")
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(2)))
	settle(t, f)
	harness.Must(t, os.Rename(dir, dir+".away"))
	args := []string{"--doc", "gone", "--request", "r", "--yes", "--wait", "1m"}
	c, said, code := erase(t, f, args...)
	if code != 3 || !strings.Contains(said, "archive_empty") || !strings.Contains(said, dir) {
		t.Errorf("exit code %d, %+v: %s", code, c, said)
	}
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = 'gone'"); n != 1 {
		t.Errorf("%d rows are left", n)
	}
	harness.Must(t, os.Mkdir(dir, 0o700)) // where it is to be mounted
	c, said, code = erase(t, f, args...)
	if code != 0 || !strings.Contains(strings.Join(c.NotReached, "\n"), ", from 1 to ") {
		t.Errorf("exit code %d, %+v: %s", code, c, said)
	}
	harness.Must(t, os.RemoveAll(dir))
	harness.Must(t, os.Rename(dir+".away", dir))
	c, said, code = erase(t, f, args...)
	if code != 0 || c.Archived != 1 || c.Finished == nil ||
		strings.Contains(strings.Join(c.NotReached, "\n"), "which the archive lacks") {
		t.Errorf("exit code %d, %+v: %s", code, c, said)
	}
	f.MustStop(t)
}
