package maintenance

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// erased erases a document, and writes others until it can go.
func erased(t *testing.T, f *harness.Installation, args ...string) (c certificate) {
	t.Helper()
	harness.Eventually(t, "it is erased", func() error {
		settle(t, f)
		f.MustRun("archive", "run", "--now")
		var said string
		var code int
		c, said, code = erase(t, f, append(args, "--yes")...)
		if code == 1 && strings.Contains(said, "code erase_waits") {
			return fmt.Errorf("%v", c.Waiting)
		}
		if code != 0 {
			t.Fatalf("exit code %d: %+v\n%s", code, c, said)
		}
		return nil
	})
	return c
}

// putBack runs SQL in a transaction that outflow run passes over, as that of a backup does.
func putBack(t *testing.T, f *harness.Installation, sql string) {
	t.Helper()
	harness.Exec(t, f.Conn, "SELECT pg_replication_origin_session_setup('"+f.Slot+"')")
	harness.Exec(t, f.Conn, sql)
	harness.Exec(t, f.Conn, "SELECT pg_replication_origin_session_reset()")
}

// TestWhatWasErasedIsNotPublishedAgain: rows that come back from a backup, or from an older copy of the
// archive, are left out by repair, replay, a snapshot and archive rows; what was written later is not.
func TestWhatWasErasedIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	const each, doc = 3, "gone"
	dir, older := t.TempDir(), t.TempDir()
	nats := natstest.Server(t).URL()
	f := newPublishing(t, pgtest.Server(t), nats, "erasedagain", "ARCHIVE_URL=file://"+dir)
	for i := range each {
		harness.Insert(t, f.Conn, doc, i+1, "{}")
		harness.Insert(t, f.Conn, "another", i+1, "{}")
	}
	archived(t, f, 2*each)
	harness.Must(t, os.CopyFS(older, os.DirFS(dir)))
	const columns = "id, doc_id, actor_id, counter, payload"
	harness.Exec(t, f.Conn, "CREATE TABLE backup AS SELECT "+columns+" FROM outbox WHERE doc_id = '"+doc+"'")
	erased(t, f, "--doc", doc, "--request", "r")
	harness.Insert(t, f.Conn, doc, 100, "{}")
	settle(t, f)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)

	// of an older copy of the archive
	env := f.Env
	f.Set("ARCHIVE_URL=file://" + older)
	var rows struct{ Inserted, Erased int }
	harness.Must(t, json.Unmarshal([]byte(f.MustRun("archive", "rows", "--json")), &rows))
	if rows.Inserted != 0 || rows.Erased != each {
		t.Errorf("%+v of an older copy were put back", rows)
	}
	f.Env = env

	// of a backup; and one row that was written later is missing
	harness.Exec(t, f.Conn, "SELECT pg_replication_origin_create('"+f.Slot+"')")
	putBack(t, f, "INSERT INTO outbox ("+columns+") SELECT "+columns+" FROM backup")
	if report, said, code := f.Repair("--check"); code != 0 || report.Missing != 0 || report.Erased != each {
		t.Fatalf("exit code %d: %+v\n%s", code, report, said)
	}
	const insert = "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES "
	putBack(t, f, insert+"('"+doc+"', 'a', 101, '{}')")
	out := f.MustRun("replay", "--from", "table", "--to", "stdout", "--doc", doc)
	if n := strings.Count(out, `"document":"`+doc+`"`); n != 2 {
		t.Errorf("a replay of the table has %d events of it: %s", n, out)
	}
	var snapshot struct{ Rows, Erased int }
	s := harness.New(t, f.URL, nats, harness.SlotName("erasedagain_snapshot"))
	s.UseStream("ERASEDAGAIN_SNAPSHOT")
	all := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox")
	harness.Must(t, json.Unmarshal([]byte(s.MustRun("init", "--snapshot", "--json")), &snapshot))
	if snapshot.Erased != each || snapshot.Rows != all-each {
		t.Errorf("a snapshot of %d rows: %+v", all, snapshot)
	}

	// an erasure that has not finished, or that the database does not know
	const repair, despite = "rows_missing", "--despite-erasure"
	requests := "CREATE TABLE requests AS SELECT * FROM outflow_erasures; "
	for _, c := range []struct{ sql, code string }{
		{requests + "UPDATE outflow_erasures SET finished_at = NULL", "erase_unfinished"},
		{"DELETE FROM outflow_erasures", "erase_forgotten"},
	} {
		harness.Exec(t, f.Conn, c.sql)
		f.MustFail(4, []string{"repair", "--accept", repair}, "code "+c.code, despite)
		f.MustFail(4, []string{"repair", "--check", despite}, "`outflow repair --accept "+repair+" "+despite)
	}
	harness.Exec(t, f.Conn, "INSERT INTO outflow_erasures SELECT * FROM requests")
	if report, said, code := f.Repair("--accept", repair); code != 0 || report.Published != 1 ||
		report.Erased != each {
		t.Errorf("exit code %d: %+v\n%s", code, report, said)
	}
	harness.Exec(t, f.Conn, "UPDATE outflow_erasures SET finished_at = NULL")
	putBack(t, f, insert+"('"+doc+"', 'a', 102, '{}')")
	if report, said, code := f.Repair("--accept", repair, despite); code != 0 || report.Published != 1 {
		t.Errorf("exit code %d: %+v\n%s", code, report, said)
	}
}

// TestRowsThatArePutBackMeanwhileAreErased: archive rows may have read their segment before the erasure
// began.
func TestRowsThatArePutBackMeanwhileAreErased(t *testing.T) {
	t.Parallel()
	const doc, others = "gone", 600 // more than archive rows writes at once
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasedmeanwhile",
		"ARCHIVE_URL=file://"+t.TempDir())
	const insert = "INSERT INTO outbox (doc_id, actor_id, counter, payload) "
	harness.Exec(t, f.Conn, insert+fmt.Sprintf("SELECT 'another', 'a', i, '{}' FROM generate_series(1, %d) i",
		others))
	harness.Insert(t, f.Conn, doc, 1, "{}")
	archived(t, f, others+1)
	harness.Exec(t, f.Conn, "DELETE FROM outbox")
	rows := (&retained{Installation: f, t: t}).runs([]string{"archive", "rows"},
		"OUTFLOW_FAILPOINT=stop.rows.written:1")
	harness.Eventually(t, "it sleeps", func() error {
		if !rows.stopped() {
			return errors.New(rows.log.String())
		}
		return nil
	}, rows.child)
	if c, said, code := erase(t, f, "--doc", doc, "--request", "r", "--yes"); code != 1 ||
		!strings.Contains(said, "code erase_busy") {
		t.Errorf("exit code %d: %+v\n%s", code, c, said)
	}
	harness.Must(t, rows.child.Signal(syscall.SIGCONT))
	harness.Must(t, rows.child.Wait())
	erased(t, f, "--doc", doc, "--request", "r")
	f.MustRun("archive", "rows")
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = '"+doc+"'"); n > 0 {
		t.Errorf("%d rows of an erased document are in the table again\n%s", n, rows.log.String())
	}
	f.MustStop(t)
}

// TestWhatAnArchiverLinksBeforeItIsKilledIsErased: it was writing an object when the archive was erased.
func TestWhatAnArchiverLinksBeforeItIsKilledIsErased(t *testing.T) {
	t.Parallel()
	const doc = "gone"
	dir := t.TempDir()
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasedlinked",
		"ARCHIVE_URL=file://"+dir)
	harness.Insert(t, f.Conn, doc, 1, "{}")
	archived(t, f, 2)
	objects, err := filepath.Glob(filepath.Join(dir, "v1", "*", "*.jsonl.zst"))
	harness.Must(t, err)
	data, err := os.ReadFile(objects[0])
	harness.Must(t, err)
	// The archiver began before the erasure, with a segment that ends elsewhere, and was overtaken.
	in := filepath.Dir(objects[0])
	writing := filepath.Join(in, ".new-SLOW")
	slow, err := os.Create(writing)
	harness.Must(t, err)
	defer func() { _ = slow.Close() }()
	harness.Must(t, syscall.Flock(int(slow.Fd()), syscall.LOCK_EX))
	_, err = slow.Write(data)
	harness.Must(t, err)
	settle(t, f)
	erasing := (&retained{Installation: f, t: t}).runs([]string{"erase", "--doc", doc, "--request", "r",
		"--yes", "--wait", "10m"})
	erasing.says("waiting for whoever is writing to archive")
	linked := filepath.Join(in, "00000000000000000001-00000000000000000999.jsonl.zst")
	harness.Must(t, os.Link(writing, linked))
	harness.Must(t, os.Remove(writing))
	harness.Must(t, slow.Close()) // and it is killed
	if err := erasing.child.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, erasing.log.String())
	}
	if found := filesWith(t, dir, "outbox."+doc); len(found) > 0 {
		t.Errorf("an erasure that has finished left the document in %q\n%s", found, erasing.log.String())
	}
	f.MustStop(t)
}

// TestWhatAKilledArchiverLeftBehindTheChainIsErased, also if its messages were taken from the stream since,
// so that nothing of that is erased which the archive has to come beyond.
func TestWhatAKilledArchiverLeftBehindTheChainIsErased(t *testing.T) {
	t.Parallel()
	const doc = "gone"
	dir := t.TempDir()
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasedbehind",
		"ARCHIVE_URL=file://"+dir)
	harness.Insert(t, f.Conn, "another", 1, "{}")
	archived(t, f, 2)
	harness.Insert(t, f.Conn, doc, 1, "{}")
	settle(t, f)
	settle(t, f)
	env := f.Env
	f.Set("FAILPOINT=archive.written:1")
	if out, said, code := f.Run("archive", "run", "--now"); code == 0 {
		t.Fatalf("it was not killed: %s%s", out, said)
	}
	f.Env = env
	if found := filesWith(t, dir, "outbox."+doc); len(found) != 1 {
		t.Fatalf("it left %q", found)
	}
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSubject("outbox."+doc)))
	settle(t, f)
	c, said, code := erase(t, f, "--doc", doc, "--request", "r", "--yes", "--wait", "20s")
	if in := filesWith(t, dir, "outbox."+doc); code != 1 || len(c.Waiting) != 1 ||
		!strings.Contains(c.Waiting[0], filepath.Base(in[0])) {
		t.Errorf("exit code %d, the document is in %q: %+v\n%s", code, in, c, said)
	}
	archived(t, f, ends(f))
	erased(t, f, "--doc", doc, "--request", "r")
	if found := filesWith(t, dir, "outbox."+doc); len(found) > 0 {
		t.Errorf("it is still in %q", found)
	}
	f.MustStop(t)
}

// purged is an outflow with an archive, whose stream has only the last of its messages. Those of a document
// are the last but one.
func purged(t *testing.T, pg *pgserver.Server, name, doc string) *harness.Installation {
	t.Helper()
	const others = 5
	f := newPublishing(t, pg, natstest.Server(t).URL(), name, "ARCHIVE_URL=file://"+t.TempDir())
	for i := range others {
		harness.Insert(t, f.Conn, "another", i+1, "{}")
	}
	harness.Insert(t, f.Conn, doc, 1, "{}")
	archived(t, f, others+2)
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(others+2)))
	return f
}

var replayPast = []string{"replay", "--from", "stream", "--to", "stream:PAST"}

// stoppedReplay is a replay of the archive into stream PAST that has published one message, and was stopped.
func stoppedReplay(t *testing.T, f *harness.Installation, settings ...string) *maintainer {
	t.Helper()
	replay := (&retained{Installation: f, t: t}).runs(replayPast, append(settings,
		"OUTFLOW_FAILPOINT=stop.replay.published:1")...)
	harness.Eventually(t, "it sleeps", func() error {
		if !replay.stopped() {
			return errors.New(replay.log.String())
		}
		return nil
	}, replay.child)
	return replay
}

// replayed says which subjects a replay has published.
func replayed(t *testing.T, f *harness.Installation) string {
	t.Helper()
	past, err := f.JS.Stream(t.Context(), "PAST")
	harness.Must(t, err)
	info, err := past.Info(t.Context(), jetstream.WithSubjectFilter(">"))
	harness.Must(t, err)
	return fmt.Sprint(info.State.Subjects)
}

// TestWhatAReplayIsAboutToPublishIsErased: it may have read it before the erasure began.
func TestWhatAReplayIsAboutToPublishIsErased(t *testing.T) {
	t.Parallel()
	const doc = "gone"
	f := purged(t, pgtest.Server(t), "erasedreplay", doc)
	replay := stoppedReplay(t, f)
	args := []string{"--doc", doc, "--request", "r", "--copy", "PAST"}
	if c, said, code := erase(t, f, append(args, "--yes")...); code != 1 ||
		!strings.Contains(said, "code erase_busy") {
		t.Errorf("exit code %d: %+v\n%s", code, c, said)
	}
	harness.Must(t, replay.child.Signal(syscall.SIGCONT))
	harness.Must(t, replay.child.Wait())
	if all := replayed(t, f); !strings.Contains(all, doc) {
		t.Errorf("it published %s", all)
	}
	c := erased(t, f, args...)
	if all := replayed(t, f); strings.Contains(all, doc) {
		t.Errorf("the copy has %s: %+v\n%s", all, c, replay.log.String())
	}
	f.MustStop(t)
}

// TestAReplayThatWasStoppedPublishesNothingThatWasErased: PostgreSQL ends its session after a minute, and an
// erasure begins.
func TestAReplayThatWasStoppedPublishesNothingThatWasErased(t *testing.T) {
	t.Parallel()
	tier.OnlyLong(t, "it waits for a minute")
	const doc = "gone"
	f := purged(t, pgtest.Server(t), "erasedstopped", doc)
	replay := stoppedReplay(t, f)
	tries := 0
	harness.Eventually(t, "its session has ended", func() error {
		n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND "+
			"mode = 'ShareLock' AND database = (SELECT oid FROM pg_database WHERE datname = "+
			"current_database())")
		if tries++; n > 0 {
			return fmt.Errorf("asked %d times", tries)
		}
		return nil
	})
	erased(t, f, "--doc", doc, "--request", "r", "--copy", "PAST")
	harness.Must(t, replay.child.Signal(syscall.SIGCONT))
	if err := replay.child.Wait(); err == nil || !strings.Contains(replay.log.String(), "--replay-id") {
		t.Errorf("%v\n%s", err, replay.log.String())
	}
	if all := replayed(t, f); strings.Contains(all, doc) {
		t.Errorf("the copy has %s\n%s", all, replay.log.String())
	}
	f.MustStop(t)
}

// TestAReplayWhoseServerIsGoneSaysSo: the server with its lock is cut off, as when its machine dies and
// another one takes over. Its sessions end there, and nobody tells the replay.
func TestAReplayWhoseServerIsGoneSaysSo(t *testing.T) {
	t.Parallel()
	tier.OnlyLong(t, "it waits for a minute")
	const doc = "gone"
	f := purged(t, pgtest.Server(t), "erasedcut", doc)
	proxy, url, err := faultproxy.To(f.URL)
	harness.Must(t, err)
	t.Cleanup(proxy.Close)
	replay := stoppedReplay(t, f, "OUTFLOW_POSTGRES_URL="+url)
	proxy.Mute(faultproxy.ToServer, true)
	proxy.Mute(faultproxy.ToClient, true)
	harness.Exec(t, f.Conn, "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND "+
		"mode = 'ShareLock' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
	erased(t, f, "--doc", doc, "--request", "r", "--copy", "PAST")
	harness.Must(t, replay.child.Signal(syscall.SIGCONT))
	if err := replay.child.Wait(); err == nil || !strings.Contains(replay.log.String(), "ended since 20") {
		t.Errorf("%v; the copy has %s\n%s", err, replayed(t, f), replay.log.String())
	}
	f.MustStop(t)
}

// TestAReplayThatPublishesNeedsThePrimary: an advisory lock of a standby keeps nobody away.
func TestAReplayThatPublishesNeedsThePrimary(t *testing.T) {
	t.Parallel()
	pg := pgtest.Own(t, 0)
	f := purged(t, pg, "erasedstandby", "gone")
	standby, err := pg.Standby(t.Context(), "standby", nil)
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, standby.Remove()) })
	database := harness.Value[string](t, f.Conn, "SELECT current_database()::text")
	replay := (&retained{Installation: f, t: t}).runs(replayPast,
		"OUTFLOW_POSTGRES_URL="+standby.URL(database))
	if err := replay.child.Wait(); err == nil || !strings.Contains(replay.log.String(), "code in_recovery") ||
		!strings.Contains(replay.log.String(), "postgres.url") {
		t.Errorf("%v\n%s", err, replay.log.String())
	}
	if _, err := f.JS.Stream(t.Context(), "PAST"); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("it made the copy: %v", err)
	}
	f.MustStop(t)
}
