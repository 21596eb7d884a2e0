package maintenance

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// day makes the partition of the first day again, with rows that are published and confirmed, and detaches
// it. It returns the sequence of the first row.
func (r *retained) day(rows int) (first int) {
	r.t.Helper()
	first = ends(r.Installation) + 1
	// in one transaction: an outflow maintain detaches a partition as soon as it sees it
	harness.Must(r.t, pgx.BeginFunc(r.t.Context(), r.Conn, func(pgx.Tx) error {
		harness.Exec(r.t, r.Conn, "CREATE TABLE IF NOT EXISTS day_1 PARTITION OF outbox FOR VALUES FROM "+
			"('2024-05-01') TO ('2024-05-02')")
		r.write(1, rows)
		return nil
	}))
	r.settle()
	harness.Eventually(r.t, "partition apply", func() error {
		out, said, code := r.Run("partition", "apply")
		if code != 0 && !strings.Contains(said, "code partition_busy") { // an outflow maintain is at it
			r.t.Fatalf("exit code %d\n%s%s", code, out, said)
		}
		if code != 0 {
			return errors.New(said)
		}
		return nil
	})
	r.settle()
	return first
}

// newPublishing makes an installation that publishes, and confirms what is published at once.
func newPublishing(t *testing.T, pg *pgserver.Server, natsURL, name string,
	settings ...string) *harness.Installation {
	t.Helper()
	f := harness.NewInstallation(t, pg, natsURL, name, append(settings, "SINK_DURABLE_AFTER=0s")...)
	harness.Exec(t, f.Conn, harness.GeneratedKey)
	f.Init()
	f.Start()
	return f
}

// settle writes a row, and waits until all is confirmed. The record says of what is confirmed only when there
// is something behind it.
func settle(t *testing.T, f *harness.Installation) {
	t.Helper()
	harness.Insert(t, f.Conn, "now", int(time.Now().UnixNano()), "{}")
	f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
}

// ends is the last sequence of the stream.
func ends(f *harness.Installation) int {
	f.T.Helper()
	s, err := f.JS.Stream(f.T.Context(), f.Stream)
	harness.Must(f.T, err)
	return int(s.CachedInfo().State.LastSeq)
}

// archived archives until the archive ends at a sequence.
func archived(t *testing.T, f *harness.Installation, seq int, args ...string) {
	t.Helper()
	harness.Eventually(t, "the confirmed messages are archived", func() error {
		settle(t, f)
		var r struct{ Archived int }
		out := f.MustRun(append([]string{"archive", "run", "--now", "--json"}, args...)...)
		if err := json.Unmarshal([]byte(out), &r); err != nil || r.Archived < seq {
			return fmt.Errorf("want %d: %v, %s", seq, err, out)
		}
		return nil
	})
}

// refused applies until rows are refused.
func refused(t *testing.T, f *harness.Installation, says ...string) {
	t.Helper()
	harness.Eventually(t, "rows are refused", func() error {
		settle(t, f)
		f.MustRun("archive", "run", "--now")
		out, said, code := f.Run("partition", "apply")
		for _, text := range append(says, "partition_unpublished") {
			if code != 4 || !strings.Contains(said, text) {
				return fmt.Errorf("exit code %d, want %q: %s%s", code, text, out, said)
			}
		}
		return nil
	})
}

// TestNothingGoesBeforeTheArchiveHasIt: neither what it has not come to, nor what it has lost, nor rows whose
// messages were gone before they were archived; and retain.table.keep does not count.
func TestNothingGoesBeforeTheArchiveHasIt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := newRetained(t, pgtest.Server(t), "archived", "ARCHIVE_URL=file://"+dir, "RETAIN_TABLE_KEEP=1000h")
	r.Init()
	r.Start()
	stays := func(what string) {
		t.Helper()
		if got := r.left(); !strings.Contains(got, "day_1") {
			t.Fatalf("%s: left: %q", what, got)
		}
	}
	goes := func(what string, args ...string) {
		t.Helper()
		harness.Eventually(t, what, func() error {
			settle(t, r.Installation)
			r.MustRun("archive", "run", "--now")
			out := r.MustRun(append([]string{"partition", "apply"}, args...)...)
			if got := r.left(); got != "" {
				return fmt.Errorf("left: %q\n%s", got, out)
			}
			return nil
		})
	}
	stream, err := r.JS.Stream(t.Context(), r.Stream)
	harness.Must(t, err)

	r.day(10)
	const waits = "the archive ends at sequence 0, complete below"
	r.MustContain("apply", r.MustRun("partition", "apply"), waits)
	r.MustContain("plan", r.MustRun("partition", "plan"), waits)
	stays("before it is archived")
	archived(t, r.Installation, ends(r.Installation))
	goes("when it is archived")

	// an object is lost
	r.day(10)
	archived(t, r.Installation, ends(r.Installation))
	objects, err := filepath.Glob(filepath.Join(dir, "v1", "*", "*.jsonl.zst"))
	if err != nil || len(objects) < 2 {
		t.Fatalf("%v, %v", objects, err)
	}
	lost := objects[len(objects)-1] // names sort
	harness.Must(t, os.Rename(lost, dir+"/kept"))
	harness.Eventually(t, "the lost object is named", func() error {
		settle(t, r.Installation)
		r.MustRun("archive", "run", "--now")
		_, said, code := r.Run("partition", "apply")
		if code != 4 || !strings.Contains(said, "archive_damaged") ||
			!strings.Contains(said, filepath.Base(lost)) {
			return fmt.Errorf("exit code %d: %s", code, said)
		}
		return nil
	})
	stays("while an object is lost")
	harness.Must(t, os.Rename(dir+"/kept", lost))
	goes("when it is there again")

	// a message was deleted before it was archived
	first := r.day(10)
	harness.Must(t, stream.DeleteMsg(t.Context(), uint64(first+4)))
	archived(t, r.Installation, first+9)
	refused(t, r.Installation, "1 row of partition", "no message of the archive has their id")
	stays("while a message is missing")
	goes("when that is accepted", "--accept-unpublished", "1")

	// the stream's limits were faster, and that is accepted
	first = r.day(10)
	harness.Must(t, stream.Purge(t.Context(), jetstream.WithPurgeSequence(uint64(first+6))))
	archived(t, r.Installation, first+9, "--accept-gap", fmt.Sprintf("1-%d", first+5))
	refused(t, r.Installation, "6 rows of partition")
	stays("in an accepted gap")
	goes("when that is accepted as well", "--accept-unpublished", "6")

	// the stream is made anew: what the archive had of the one before says nothing of it
	r.day(10)
	archived(t, r.Installation, ends(r.Installation))
	r.MustStop(t)
	harness.AwaitSlotFree(t, r.Conn, r.Slot)
	harness.Must(t, r.JS.DeleteStream(t.Context(), r.Stream))
	r.MustFail(3, []string{"repair", "--accept", "stream_missing"}, "code repair_archived")
	if report, stderr, code := r.Repair("--accept", "stream_missing", "--archive.url", ""); code != 0 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	r.MustContain("with another stream", r.MustRun("partition", "apply"), waits)
	stays("with another stream")
	r.Start()
	archived(t, r.Installation, ends(r.Installation))
	goes("when its archive has it")
	r.MustStop(t)
}

// TestRowsAreDeletedWhenTheArchiveHasThem: those of a plain table.
func TestRowsAreDeletedWhenTheArchiveHasThem(t *testing.T) {
	t.Parallel()
	f := newPublishing(t, pgtest.Own(t, 0, "wal_level=logical"), natstest.Server(t).URL(),
		"coldrows", "ARCHIVE_URL=file://"+t.TempDir(), "RETAIN_TABLE_METHOD=delete")
	for i := range 10 {
		harness.Insert(t, f.Conn, fmt.Sprint("doc", i%3), i, "{}")
	}
	rows := func() int {
		t.Helper()
		return harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id <> 'now'")
	}
	harness.AwaitMessages(t, f.JS, f.Stream, 10)
	f.MustRun("partition", "apply")
	f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
	f.MustContain("plan", f.MustRun("partition", "plan"), "the archive ends at sequence 0, complete below")
	f.MustContain("apply", f.MustRun("partition", "apply"), "the archive ends at sequence 0, complete below")
	if n := rows(); n != 10 {
		t.Fatalf("%d rows", n)
	}
	stream, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, stream.DeleteMsg(t.Context(), 4))
	archived(t, f, 10)
	refused(t, f, "1 row of")
	if n := rows(); n != 1 {
		t.Fatalf("%d rows", n)
	}
	f.MustRun("partition", "apply", "--accept-unpublished", "1")
	if n := rows(); n != 0 {
		t.Fatalf("%d rows", n)
	}
	f.MustStop(t)
}

// TestRowsWhoseMessagesALimitTookStay: one for each subject, before they were archived. There is no id
// column, so nobody knows which rows they are of, and all stay until that is accepted.
func TestRowsWhoseMessagesALimitTookStay(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Own(t, 0, "wal_level=logical"), natstest.Server(t).URL(), "taken",
		"ARCHIVE_URL=file://"+t.TempDir(), "RETAIN_TABLE_METHOD=delete", "SINK_DURABLE_AFTER=0s")
	harness.Exec(t, f.Conn, `CREATE TABLE outbox (doc_id text NOT NULL, actor_id text NOT NULL,
		counter bigint NOT NULL, seq_key text NOT NULL GENERATED ALWAYS AS
		(actor_id || ':' || lpad(counter::text, 20, '0')) STORED, payload jsonb NOT NULL)`)
	f.Init()
	f.Start()
	f.MustRun("partition", "apply")
	rows := func() int {
		t.Helper()
		return harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id <> 'now'")
	}
	goes := func() {
		t.Helper()
		harness.Eventually(t, "rows go", func() error {
			settle(t, f)
			f.MustRun("archive", "run", "--now")
			out := f.MustRun("partition", "apply")
			if n := rows(); n > 0 {
				return fmt.Errorf("%d rows are left: %s", n, out)
			}
			return nil
		})
	}
	harness.Insert(t, f.Conn, "first", 1, "{}") // its message stays at the front of the stream
	goes()
	for n := range 5 {
		harness.Insert(t, f.Conn, "doc", n+2, "{}")
	}
	settle(t, f)
	stream, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	limited := stream.CachedInfo().Config
	limited.MaxMsgsPerSubject = 1
	_, err = f.JS.UpdateStream(t.Context(), limited)
	harness.Must(t, err)
	refused(t, f, "its archive has a gap")
	if n := rows(); n != 5 {
		t.Fatalf("%d of 5 rows are left", n)
	}
	f.MustStop(t)
}
