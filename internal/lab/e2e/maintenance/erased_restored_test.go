package maintenance

import (
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
