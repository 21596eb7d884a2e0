package repair

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
)

// archived makes an installation that has archived at least so many messages, and is stopped. It has n rows,
// each of which is published.
func archived(t *testing.T, name string, rows int) (f *harness.Installation, s jetstream.Stream, n int) {
	t.Helper()
	f = harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), name,
		"ARCHIVE_URL=file://"+t.TempDir(), "SINK_DURABLE_AFTER=0s")
	f.Init()
	f.Start()
	harness.Exec(t, f.Conn, fmt.Sprintf("INSERT INTO outbox (doc_id, actor_id, counter, payload) "+
		"SELECT 'd' || i, 'a', i, '{}' FROM generate_series(1, %d) i", rows))
	n = rows
	harness.AwaitMessages(t, f.JS, f.Stream, n)
	harness.Eventually(t, "they are archived", func() error {
		n++
		harness.Insert(t, f.Conn, "doc", n, "{}") // a checkpoint is confirmed when another one follows
		harness.AwaitMessages(t, f.JS, f.Stream, n)
		var r struct{ Archived uint64 }
		harness.Must(t, json.Unmarshal([]byte(f.MustRun("archive", "run", "--now", "--json")), &r))
		if r.Archived < uint64(rows) {
			return fmt.Errorf("archived up to %d", r.Archived)
		}
		return nil
	})
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	return f, s, n
}

// TestARepairReadsWhatIsArchived: messages that retention took from the stream are in the archive, so no
// condition has to tell their rows from missing ones. Messages that somebody took before they were archived
// are still asked for.
func TestARepairReadsWhatIsArchived(t *testing.T) {
	t.Parallel()
	f, s, n := archived(t, "cold", 20)
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(11)))
	f.DropSlot(t)
	loseRows(f, t)
	r, stderr, code := f.Repair("--accept", "slot_missing")
	if code != 0 || r.Rows != n+meanwhile || r.Published != meanwhile {
		t.Fatalf("exit code %d, %+v\n%s", code, r, stderr)
	}
	f.DropSlot(t)
	harness.Insert(t, f.Conn, "doc", n+1, "{}")
	harness.Must(t, s.DeleteMsg(t.Context(), 15))
	if _, stderr, code := f.Repair(); code != 3 || !strings.Contains(stderr, "1 message of stream") ||
		!strings.Contains(stderr, "repair_removed") {
		t.Errorf("a message was removed from within: exit code %d, %s", code, stderr)
	}
}

// TestAnArchiveOfAnotherPastIsNotRead: the stream was put back from a backup and went on differently. What
// the archive has of its front is not what was there, so its events need not have been published.
func TestAnArchiveOfAnotherPastIsNotRead(t *testing.T) {
	t.Parallel()
	f, s, n := archived(t, "otherpast", 20)
	dir := t.TempDir()
	store, err := archive.Open(t.Context(), "file://"+dir)
	harness.Must(t, err)
	a, err := archive.Load(t.Context(), store, archive.FolderOf(f.Stream, s.CachedInfo().Created), nil)
	harness.Must(t, err)
	segment, err := a.NewSegment()
	harness.Must(t, err)
	for seq := range uint64(n) {
		m, err := s.GetMsg(t.Context(), seq+1)
		harness.Must(t, err)
		harness.Must(t, segment.Add(&archive.Message{Seq: m.Sequence, Time: m.Time.Add(time.Second),
			Subject: m.Subject, Header: m.Header, Data: m.Data}))
	}
	_, err = a.Append(t.Context(), segment, 0)
	harness.Must(t, err)
	harness.Must(t, store.Close())
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(11)))
	f.DropSlot(t)
	f.Set("ARCHIVE_URL=file://" + dir)
	if r, stderr, code := f.Repair("--accept", "slot_missing"); code != 4 ||
		!strings.Contains(stderr, "archive_differs") {
		t.Errorf("exit code %d, %+v\n%s", code, r, stderr)
	}
}

// TestRetentionWhileARepairReadsTheArchive: what it takes then is not published again. It goes on whenever
// the repair has asked for the stream's first message.
func TestRetentionWhileARepairReadsTheArchive(t *testing.T) {
	t.Parallel()
	const rows = 20_000
	f, s, _ := archived(t, "taken", rows)
	var first atomic.Uint64
	first.Store(1000)
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(first.Load())))
	f.DropSlot(t)
	sub, err := f.JS.Conn().Subscribe("$JS.API.STREAM.MSG.GET."+f.Stream, func(m *nats.Msg) {
		if strings.Contains(string(m.Data), `"next_by_subj"`) && first.Load() < rows-1000 {
			_ = s.Purge(t.Context(), jetstream.WithPurgeSequence(first.Add(1000)))
		}
	})
	harness.Must(t, err)
	harness.Must(t, f.JS.Conn().Flush())
	r, stderr, code := f.Repair("--accept", "slot_missing")
	harness.Must(t, sub.Unsubscribe())
	if first.Load() == 1000 {
		t.Error("nothing was taken meanwhile")
	}
	if code != 0 || r.Published != 0 {
		t.Errorf("exit code %d: %d events that were in the stream are published again: %+v\n%s", code,
			r.Published, r, stderr)
	}
}

// TestAKilledRepairOfAPurgedStreamGoesOn: the stream was purged, and --where says which rows are to come
// again. The first messages that it publishes do not make those behind them count as archived.
func TestAKilledRepairOfAPurgedStreamGoesOn(t *testing.T) {
	t.Parallel()
	f, s, n := archived(t, "purged", 20_000)
	for try := 1; ; try++ {
		harness.Must(t, s.Purge(t.Context()))
		f.DropSlot(t)
		if msgs := killedAtItsFirstMessages(t, f, s); msgs > 0 && msgs < uint64(n) {
			break
		}
		if try == harness.Tries {
			t.Fatal("it was never killed in between")
		}
	}
	r, stderr, code := f.Repair("--accept", "slot_missing", "--where", "true")
	if code != 0 {
		t.Fatalf("exit code %d, %+v\n%s", code, r, stderr)
	}
	info, err := s.Info(t.Context())
	harness.Must(t, err)
	if info.State.Msgs != uint64(n) {
		t.Errorf("it says that it is done: %d of %d events are in the stream. %+v\n%s", info.State.Msgs, n, r,
			stderr)
	}
}

// killedAtItsFirstMessages kills a repair when it has begun to publish, and returns how many messages there
// are then.
func killedAtItsFirstMessages(t *testing.T, f *harness.Installation, s jetstream.Stream) uint64 {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), harness.Program(f.Env), "repair", "--accept", "slot_missing",
		"--where", "true")
	cmd.Env = f.Env
	harness.Must(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // it is killed, or its state is looked at
	}()
	for running := true; running; {
		info, err := s.Info(t.Context())
		harness.Must(t, err)
		if info.State.Msgs > 0 {
			_ = cmd.Process.Kill() // it may just have ended
		}
		select {
		case <-ended:
			running = false
		default:
		}
	}
	info, err := s.Info(t.Context())
	harness.Must(t, err)
	return info.State.Msgs
}
