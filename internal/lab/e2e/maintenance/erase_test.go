package maintenance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// certificate is what outflow erase --json prints.
type certificate struct {
	Finished *string `json:"finished"`
	Notified string  `json:"notified"`
	Rows     int     `json:"rows"`
	Messages int     `json:"messages"`
	Archived int     `json:"archived"`
	Parked   int     `json:"parked"`
	Copies   []struct {
		Stream   string `json:"stream"`
		Messages int    `json:"messages"`
	} `json:"copies"`
	Waiting    []string `json:"waiting"`
	NotReached []string `json:"not_reached"`
}

// erase runs outflow erase, and returns what it printed and its exit code.
func erase(t *testing.T, f *harness.Installation, args ...string) (c certificate, stderr string, code int) {
	t.Helper()
	out, stderr, code := f.Run(append([]string{"erase", "--json", "--wait", "0s"}, args...)...)
	if out != "" {
		if err := json.Unmarshal([]byte(out), &c); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	return c, stderr, code
}

// waits reports whether an erasure said that it has to wait: for others, or until the session of one that was
// killed has ended.
func waits(said string) bool {
	return strings.Contains(said, "code erase_waits") || strings.Contains(said, "code erase_busy")
}

// filesWith names the files below a folder that hold a text, also where they are compressed.
func filesWith(t *testing.T, dir, text string) (found []string) {
	t.Helper()
	dec, err := zstd.NewReader(nil)
	harness.Must(t, err)
	defer dec.Close()
	harness.Must(t, filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil // a file that the server has replaced
		}
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(name)
		if os.IsNotExist(err) {
			return nil
		}
		if strings.HasSuffix(name, ".zst") && err == nil {
			data, err = dec.DecodeAll(data, nil)
		}
		if bytes.Contains(data, []byte(text)) {
			found = append(found, name)
		}
		return err
	}))
	return found
}

// reader is a consumer of package consumer that notes which documents it has read.
type reader struct {
	t     *testing.T
	f     *harness.Installation
	pool  *pgxpool.Pool
	name  string
	parks string // the document that it can't process
	stop  context.CancelFunc
	ended chan error
}

func newReader(t *testing.T, f *harness.Installation, url, name string) *reader {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	harness.Must(t, err)
	t.Cleanup(pool.Close)
	harness.Exec(t, f.Conn, "CREATE TABLE seen_"+name+" (doc text, n text)")
	return &reader{t: t, f: f, pool: pool, name: name}
}

func (r *reader) start() {
	r.t.Helper()
	c, err := consume.New(r.f.JS, consume.Postgres(r.pool), consume.Config{Name: r.name, Stream: r.f.Stream,
		Partitions: 4, Log: slog.New(slog.NewTextHandler(r.f.Log, nil))})
	harness.Must(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	r.stop, r.ended = cancel, make(chan error, 1)
	go func() {
		r.ended <- c.Run(ctx, func(ctx context.Context, tx pgx.Tx, e *consume.Event) error {
			if e.Document == r.parks {
				return consume.Poison(errors.New("refused"))
			}
			_, err := tx.Exec(ctx, "INSERT INTO seen_"+r.name+" VALUES ($1, $2)", e.Document, e.Key)
			return err
		})
	}()
	r.t.Cleanup(cancel)
}

// reach waits until it has read so many events, and stops it.
func (r *reader) reach(n int) {
	r.t.Helper()
	harness.Eventually(r.t, fmt.Sprintf("consumer %s has %d events", r.name, n), func() error {
		select {
		case err := <-r.ended:
			r.t.Fatalf("consumer %s ended: %v", r.name, err)
		default:
		}
		got := harness.Value[int](r.t, r.f.Conn, "SELECT count(*) FROM seen_"+r.name)
		if got != n {
			return fmt.Errorf("%d events", got)
		}
		return nil
	})
	r.stop()
	harness.Must(r.t, <-r.ended)
}

// TestADocumentIsErasedEverywhere: killed at each step, and found again; then nothing of it is in any file of
// the server or the archive, and everything else goes on.
func TestADocumentIsErasedEverywhere(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			t.Parallel()
			aDocumentIsErasedEverywhere(t, pgtest.Own(t, major, "wal_level=logical"))
		})
	}
}

func aDocumentIsErasedEverywhere(t *testing.T, pg *pgserver.Server) {
	const secret, doc, each = "S3CR3T", "customer 17", 10
	store, dir := t.TempDir(), t.TempDir()
	f := newPublishing(t, pg, natstest.Server(t, natsserver.Options{Dir: store}).URL(), "erased",
		"ARCHIVE_URL=file://"+dir)
	for _, config := range []jetstream.StreamConfig{
		{Name: "MIRROR", Mirror: &jetstream.StreamSource{Name: f.Stream}},
		{Name: "AGGREGATE", Sources: []*jetstream.StreamSource{{Name: "MIRROR"}}},
	} {
		_, err := f.JS.CreateStream(t.Context(), config)
		harness.Must(t, err)
	}
	counter := 0
	write := func(doc, payload string) {
		t.Helper()
		counter++
		harness.Insert(t, f.Conn, doc, counter, fmt.Sprintf(`{"n": %d, "of": "%s"}`, counter, payload))
	}
	for range each {
		write(doc, secret)
		write("another", "nobody")
	}
	harness.AwaitMessages(t, f.JS, f.Stream, 2*each)
	early := newReader(t, f, f.URL, "early") // it has read a part when the document is erased
	early.start()
	early.reach(2 * each)
	parker := newReader(t, f, f.URL, "parker")
	parker.parks = doc
	parker.start()
	parked := "SELECT count(*) FROM outflow_parked WHERE encode(data, 'escape') LIKE '%" + secret + "%'"
	harness.Eventually(t, "the document is parked", func() error {
		if n := harness.Value[int](t, f.Conn, parked); n != each {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
	parker.reach(each)
	archived(t, f, 2*each)
	f.MustRun("archive", "restore", "--to", "RESTORED")
	folders, err := filepath.Glob(filepath.Join(dir, "v1", "*"))
	harness.Must(t, err)
	left := filepath.Join(folders[0], ".new-LEFT") // by an archiver that was killed while it wrote
	harness.Must(t, os.WriteFile(left, []byte(secret), 0o600))
	for range each {
		write(doc, secret)
		write("another", "nobody")
	}
	f.MustRun("replay", "--to", "stream:PAST", "--from", "stream", "--doc", doc)
	all := func() int { return counter + harness.Value[int](t, f.Conn, settled) }
	harness.AwaitMessages(t, f.JS, "AGGREGATE", all())
	for _, where := range []string{store, dir} {
		if len(filesWith(t, where, secret)) == 0 {
			t.Fatalf("nothing to erase is in %s", where)
		}
	}

	// what it would do, and that it does nothing
	args := []string{"--doc", doc, "--request", "gdpr-1", "--copy", "PAST", "--notify", `{"erased": true}`}
	c, said, code := erase(t, f, args...)
	copies := map[string]int{}
	for _, k := range c.Copies {
		copies[k.Stream] = k.Messages
	}
	if code != 0 || c.Rows != 2*each || c.Messages != 2*each || c.Archived != each || c.Parked != each ||
		len(copies) != 4 || copies["MIRROR"] != 2*each || copies["AGGREGATE"] != 2*each ||
		copies["RESTORED"] != each || copies["PAST"] < each {
		t.Fatalf("exit code %d: %+v\n%s", code, c, said)
	}
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = $1", doc); n != 2*each {
		t.Fatalf("%d rows are left by a run without --yes", n)
	}

	args = append(args, "--yes")
	for _, point := range []string{"begun", "notified", "rows", "deleted", "cut", "confirmed", "saved",
		"noted", "message", "messages", "object", "manifest", "replaced", "archived", "copy", "copies",
		"parked", "finished"} {
		harness.Eventually(t, "it is killed at erase."+point, func() error {
			settle(t, f)
			f.MustRun("archive", "run", "--now")
			env := f.Env
			f.Set("FAILPOINT=erase." + point + ":1")
			cmd := exec.CommandContext(t.Context(), harness.Program(f.Env), append([]string{"erase", "--wait",
				"0s"}, args...)...)
			cmd.Env = f.Env
			out, err := cmd.CombinedOutput()
			f.Env = env
			switch {
			case err == nil:
				t.Fatalf("erase.%s is not reached: %s", point, out)
			case strings.Contains(err.Error(), "killed"):
				return nil
			case waits(string(out)), harness.Unanswered(t, "erase", string(out)):
				return fmt.Errorf("%s", out)
			}
			t.Fatalf("erase.%s: %v: %s", point, err, out)
			return nil
		})
	}
	harness.Eventually(t, "the one that was killed is gone", func() error {
		if c, said, code = erase(t, f, args...); code == 1 && waits(said) {
			return errors.New(said)
		}
		return nil
	})
	if code != 0 || c.Finished == nil || c.Rows != 2*each || c.Messages != 2*each || c.Archived < each ||
		c.Parked != each ||
		c.Notified == "" || len(c.Waiting) != 0 || len(c.NotReached) == 0 {
		t.Fatalf("exit code %d: %+v\n%s", code, c, said)
	}
	for _, where := range []string{store, dir} {
		if found := filesWith(t, where, secret); len(found) > 0 {
			t.Errorf("it is still in %v", found)
		}
	}
	if found := filesWith(t, dir, string(outbox.AppendToken(nil, doc))); len(found) > 1 {
		t.Errorf("the document is named in %v", found) // one has the last event
	}
	if n := harness.Value[int](t, f.Conn, parked); n != 0 {
		t.Errorf("%d events are still parked", n)
	}
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = $1", doc); n != 1 {
		t.Errorf("%d rows are left", n)
	}
	restored, err := f.JS.Stream(t.Context(), "RESTORED")
	harness.Must(t, err)
	if restored.CachedInfo().Config.Metadata[outbox.MetadataErased] == "" {
		t.Error("the restored stream does not say what was erased from it")
	}
	f.MustFail(2, append([]string{"erase", "--doc", "other", "--request", "gdpr-1"}, "--yes"),
		"code erase_request")

	// everything goes on
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.Start()
	write(doc, "later")
	write("another", "nobody")
	harness.Eventually(t, "what is written later is published", func() error {
		if found := harness.Messages(t, f.JS, f.Stream); len(found) != all()-2*each+1 {
			return fmt.Errorf("%d messages, of %d", len(found), all()-2*each+1)
		}
		return nil
	})
	early.start()
	early.reach(all() - each + 1) // it had read the first half
	parker.parks = ""
	parker.start()
	parker.reach(all() - 2*each + 1)
	late := newReader(t, f, f.URL, "late")
	late.start()
	late.reach(all() - 2*each + 1)
	archived(t, f, ends(f))
	f.MustRun("archive", "verify")
	out := f.MustRun("replay", "--to", "stdout", "--doc", doc)
	if n := strings.Count(out, `"document":"`+doc+`"`); n != 2 || strings.Contains(out, secret) {
		t.Errorf("a replay has %d events of it: %s", n, out)
	}
	f.MustRun("archive", "restore", "--to", "PAST_AGAIN")
	got := harness.Messages(t, f.JS, "PAST_AGAIN")
	if slices.ContainsFunc(got, func(m *oracle.Message) bool {
		return bytes.Contains(m.Data, []byte(secret))
	}) {
		t.Error("a restored stream has what was erased")
	}
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	if report, said, code := f.Repair("--check"); code != 0 {
		t.Errorf("repair: exit code %d: %+v\n%s", code, report, said)
	}
}

// TestAnErasureWaitsForReplicas: one that was away would hear of what was erased by a snapshot, and then keep
// it in its files. So nothing is erased while one is away. One that goes away afterwards is named.
func TestAnErasureWaitsForReplicas(t *testing.T) {
	t.Parallel()
	const secret, doc, each = "S3CR3T", "gone", 3
	cluster := natstest.Cluster(t, 3)
	f := newPublishing(t, pgtest.Server(t), cluster.URLs(), "erasereplicas", "INIT_REPLICAS=3")
	for i := range each {
		harness.Insert(t, f.Conn, doc, i+1, `{"of": "`+secret+`"}`)
	}
	harness.AwaitMessages(t, f.JS, f.Stream, each)
	settle(t, f)
	args := []string{"--doc", doc, "--request", "r", "--yes"}
	run := func(want func(c certificate, code int) bool) (c certificate) {
		t.Helper()
		harness.Eventually(t, "an erasure ends as it should", func() error {
			settle(t, f)
			var said string
			var code int
			c, said, code = erase(t, f, args...)
			if code != 0 && !waits(said) && !harness.Unanswered(t, "erase", said) {
				t.Fatalf("exit code %d: %+v\n%s", code, c, said)
			}
			if !want(c, code) {
				return fmt.Errorf("exit code %d: %+v\n%s", code, c, said)
			}
			return nil
		})
		return c
	}
	stop := func() (node int) {
		t.Helper()
		leader, err := cluster.WaitLeader(f.Stream, 3*time.Minute)
		harness.Must(t, err)
		node = (leader + 1) % 3
		cluster.Stop(node)
		return node
	}
	start := func(node int) {
		t.Helper()
		harness.Must(t, cluster.Start(node))
		harness.Must(t, cluster.WaitReady(3*time.Minute))
	}
	node := stop()
	name := fmt.Sprint("node", node)
	run(func(c certificate, code int) bool {
		return code == 1 && strings.Contains(fmt.Sprint(c.Waiting), "replicas of stream "+f.Stream) &&
			strings.Contains(fmt.Sprint(c.Waiting), name)
	})
	found := 0
	for _, m := range harness.Messages(t, f.JS, f.Stream) {
		if bytes.Contains(m.Data, []byte(secret)) {
			found++
		}
	}
	if found != each {
		t.Errorf("%d messages are left while a replica is away", found)
	}
	start(node)
	c := run(func(_ certificate, code int) bool { return code == 0 })
	if c.Messages != each || strings.Contains(fmt.Sprint(c.NotReached), "replica ") {
		t.Errorf("%+v", c)
	}
	for i := range 3 { // but for the logs of Raft, which the certificate names
		if found := filesWith(t, filepath.Join(cluster.Dir(i), "jetstream", "$G"), secret); len(found) > 0 {
			t.Errorf("it is still in %v", found)
		}
	}
	if !strings.Contains(fmt.Sprint(c.NotReached), "Raft") {
		t.Errorf("the logs of Raft are not named: %q", c.NotReached)
	}

	node = stop()
	name = fmt.Sprint("replica node", node, " of stream ", f.Stream)
	run(func(_ certificate, code int) bool { return code == 1 })
	start(node)
	for range 2 { // and the certificate goes on saying so
		c = run(func(_ certificate, code int) bool { return code == 0 })
		if !strings.Contains(fmt.Sprint(c.NotReached), name) {
			t.Errorf("%s is not named: %q", name, c.NotReached)
		}
	}
}

// settled is how many rows settle has written.
const settled = "SELECT count(*) FROM outbox WHERE doc_id = 'now'"

// TestAnErasureReachesDetachedPartitions, killed where it does, and they go afterwards as if nothing had
// been: no row counts as never published.
func TestAnErasureReachesDetachedPartitions(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		anErasureReachesDetachedPartitions(t, pg)
	})
}

func anErasureReachesDetachedPartitions(t *testing.T, pg *pgserver.Server) {
	r := newRetained(t, pg, "erasedparts", "ARCHIVE_URL=file://"+t.TempDir())
	r.Init()
	r.Start()
	r.day(12)
	if got := r.left(); !strings.Contains(got, "day_1") {
		t.Fatalf("left: %q", got)
	}
	f := r.Installation
	args := []string{"--doc", "doc1", "--request", "r", "--yes"}
	env := f.Env
	f.Set("FAILPOINT=erase.detached:1")
	if _, said, code := erase(t, f, args...); code != -1 {
		t.Fatalf("it was not killed: %d, %s", code, said)
	}
	f.Env = env
	harness.Eventually(t, "it is erased", func() error {
		r.beat()
		f.MustRun("archive", "run", "--now")
		c, said, code := erase(t, f, args...)
		if code == 1 && waits(said) {
			return errors.New(said)
		}
		if code != 0 || c.Rows != 4 || c.Messages != 4 {
			t.Fatalf("exit code %d: %+v\n%s", code, c, said)
		}
		return nil
	})
	if n := harness.Value[int](t, r.Conn, "SELECT count(*) FROM day_1"); n != 8 {
		t.Errorf("the partition has %d rows", n)
	}
	harness.Eventually(t, "the partition goes", func() error {
		r.beat()
		f.MustRun("archive", "run", "--now")
		out := f.MustRun("partition", "apply")
		if got := r.left(); strings.Contains(got, "day_1") {
			return fmt.Errorf("left: %q\n%s", got, out)
		}
		return nil
	})
	r.MustStop(t)
}

// TestWhatAStartNeedsIsErasedLater: the newest messages, and those that gap mode remembers, are named and
// stay until others follow. A start at any time finds what it needs.
func TestWhatAStartNeedsIsErasedLater(t *testing.T) {
	t.Parallel()
	const memory = 4
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasedlater",
		"REORDER_MODE=gap", fmt.Sprint("REORDER_MEMORY=", memory))
	for i := range 8 {
		harness.Insert(t, f.Conn, "gone", i+1, "{}")
	}
	harness.AwaitMessages(t, f.JS, f.Stream, 8)
	f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
	left := func() (n int) {
		for _, m := range harness.Messages(t, f.JS, f.Stream) {
			if strings.HasSuffix(m.Subject, "gone") {
				n++
			}
		}
		return n
	}
	restart := func() {
		f.Kill()
		f.Start()
		f.AwaitReady()
	}
	args := []string{"--doc", "gone", "--request", "r", "--yes"}
	harness.Eventually(t, "something has to wait", func() error {
		c, said, code := erase(t, f, args...)
		if code != 1 || !strings.Contains(said, "code erase_waits") {
			t.Fatalf("exit code %d: %+v\n%s", code, c, said)
		}
		if !strings.Contains(fmt.Sprint(c.Waiting), "messages of the stream") {
			return fmt.Errorf("%v", c.Waiting) // a slot
		}
		return nil
	})
	if n := left(); n < memory {
		t.Errorf("only %d messages are left", n)
	}
	restart()
	other := 0
	harness.Eventually(t, "the rest is erased when others have followed", func() error {
		other++
		harness.Insert(t, f.Conn, "other", other, "{}")
		f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
		c, said, code := erase(t, f, args...)
		switch {
		case code == 1 && strings.Contains(said, "code erase_waits"):
			return fmt.Errorf("%v", c.Waiting)
		case code != 0 || c.Messages != 8:
			t.Fatalf("exit code %d: %+v\n%s", code, c, said)
		}
		return nil
	})
	if n := left(); n != 0 || other < memory {
		t.Errorf("%d messages are left behind %d others", n, other)
	}
	restart()
	f.MustStop(t)
}
