package maintenance

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAStreamThatIsRestoredIsRepairedAfterAnErasure: of messages that were erased from the archive when
// retention had taken them from the stream, the restored stream tells. A database that knows the request
// publishes what the archive does not have; one that is from before it does not.
func TestAStreamThatIsRestoredIsRepairedAfterAnErasure(t *testing.T) {
	t.Parallel()
	const each, doc = 3, "gone"
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasedrestored",
		"ARCHIVE_URL=file://"+t.TempDir())
	for i := range each {
		harness.Insert(t, f.Conn, doc, i+1, "{}")
		harness.Insert(t, f.Conn, "another", i+1, "{}")
	}
	archived(t, f, 2*each)
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(2*each+1)))
	erased(t, f, "--doc", doc, "--request", "r")
	harness.Insert(t, f.Conn, "another", each+1, "{}")
	settle(t, f)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
	f.MustRun("archive", "restore")

	harness.Exec(t, f.Conn, "CREATE TABLE requests AS SELECT * FROM outflow_erasures; "+
		"DELETE FROM outflow_erasures")
	f.MustFail(4, []string{"repair", "--accept", "stream_recreated"}, "code erase_forgotten")
	harness.Exec(t, f.Conn, "INSERT INTO outflow_erasures SELECT * FROM requests")
	report, said, code := f.Repair("--accept", "stream_recreated")
	if code != 0 || report.Published == 0 {
		t.Errorf("exit code %d: %+v\n%s", code, report, said)
	}
}

// TestAnErasureWaitsForARestoreOfItsStream, and of a copy, that is made again after it was erased from: what
// an older copy of the archive has comes back.
func TestAnErasureWaitsForARestoreOfItsStream(t *testing.T) {
	t.Parallel()
	const each = 3
	docs := []string{"gone", "gone_too"}
	dir, older := t.TempDir(), t.TempDir()
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasedanew", "ARCHIVE_URL=file://"+dir)
	for i := range each {
		for _, doc := range append(docs, "another") {
			harness.Insert(t, f.Conn, doc, i+1, "{}")
		}
	}
	archived(t, f, 3*each)
	harness.Must(t, os.CopyFS(older, os.DirFS(dir)))
	f.MustRun("archive", "restore", "--to", "RESTORED")
	begin := func(args []string, env ...string) *maintainer {
		t.Helper()
		r := (&retained{Installation: f, t: t}).runs(args, env...)
		harness.Eventually(t, "it sleeps", func() error {
			if !r.stopped() {
				return errors.New(r.log.String())
			}
			return nil
		}, r.child)
		return r
	}
	ends := func(r *maintainer, says string) {
		t.Helper()
		harness.Must(t, r.child.Signal(syscall.SIGCONT))
		if err := r.child.Wait(); err == nil || !strings.Contains(r.log.String(), says) {
			t.Errorf("%v, it does not say %q\n%s", err, says, r.log.String())
		}
	}
	erasing := func(doc string) *maintainer {
		t.Helper()
		settle(t, f)
		f.MustRun("archive", "run", "--now")
		return begin([]string{"erase", "--doc", doc, "--request", "r" + doc[4:], "--yes"},
			fmt.Sprint("OUTFLOW_FAILPOINT=stop.erase.copy:", each)) // all of them
	}
	anew := []string{"archive", "restore", "--to", "RESTORED"}

	erase := erasing(docs[0])
	harness.Must(t, f.JS.DeleteStream(t.Context(), "RESTORED"))
	restore := begin(anew, "OUTFLOW_ARCHIVE_URL=file://"+older, "OUTFLOW_FAILPOINT=stop.restore.message:1")
	ends(erase, "stream RESTORED is being restored")
	harness.Must(t, restore.child.Signal(syscall.SIGCONT))
	if err := restore.child.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, restore.log.String())
	}
	erased(t, f, "--doc", docs[0], "--request", "r"+docs[0][4:])
	s, err := f.JS.Stream(t.Context(), "RESTORED")
	harness.Must(t, err)
	info, err := s.Info(t.Context(), jetstream.WithSubjectFilter(">"))
	harness.Must(t, err)
	if all := fmt.Sprint(info.State.Subjects); strings.Contains(all, docs[0]+":") ||
		!strings.Contains(all, docs[1]+":") {
		t.Errorf("the copy has %s", all)
	}

	erase = erasing(docs[1])
	f.MustStop(t)
	harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
	f.MustRun("archive", "restore")
	ends(erase, "code stream_recreated")
}
