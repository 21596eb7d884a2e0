package erase

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/sink"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// removing makes a stream with messages of this data, and returns it, the file that has them, and what the
// certificate of an erasure does not reach.
func removing(t *testing.T, o natsserver.Options, all ...string) (s jetstream.Stream, file func() []byte,
	notReached string) {
	t.Helper()
	o.Dir, o.SyncAlways = t.TempDir(), true
	conn, err := sink.Connect(t.Context(), sink.Config{Table: "public.outbox", Stream: "OUTBOX",
		URL: natstest.Server(t, o).URL()})
	must.Succeed(t, err)
	t.Cleanup(conn.Close)
	js, err := conn.API().JetStream()
	must.Succeed(t, err)
	s, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"o"}})
	must.Succeed(t, err)
	for _, data := range all {
		_, err := js.Publish(t.Context(), "o", []byte(data))
		must.Succeed(t, err)
	}
	files := os.DirFS(filepath.Join(o.Dir, "jetstream", "$G", "streams", "OUTBOX", "msgs"))
	c := &command{rep: &Report{}, l: &backfill.Conns{Conns: &conns.Conns{NATS: conn}}}
	c.limits()
	return s, func() []byte {
		t.Helper()
		block, err := fs.ReadFile(files, "1.blk")
		must.Succeed(t, err)
		return block
	}, strings.Join(c.rep.NotReached, "\n")
}

// TestWhatWasRemovedBeforeIsStillInTheServersFile, unlike what is deleted: no erasure reaches it, so each
// certificate says so.
func TestWhatWasRemovedBeforeIsStillInTheServersFile(t *testing.T) {
	t.Parallel()
	s, file, said := removing(t, natsserver.Options{}, "purged-message", "deleted-message", "left-message")
	must.Succeed(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(2)))
	must.Succeed(t, s.SecureDeleteMsg(t.Context(), 2))
	block := file()
	for text, want := range map[string]bool{"purged-": true, "deleted-": false, "left-": true} {
		if bytes.Contains(block, []byte(text)) != want {
			t.Errorf("%q is in the file: %v", text, !want)
		}
	}
	if !strings.Contains(said, "removed from a stream before") {
		t.Error(said)
	}
}

// TestAServerThatEncryptsOverwritesNothing: what was in its file before a deletion is there afterwards, so
// each certificate says so.
func TestAServerThatEncryptsOverwritesNothing(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "a key"} {
		s, file, said := removing(t, natsserver.Options{
			Tune: func(o *server.Options) { o.JetStreamKey = key }}, "deleted-message", "left-message")
		before := file()
		must.Succeed(t, s.SecureDeleteMsg(t.Context(), 1))
		if same := bytes.HasPrefix(file(), before); len(before) == 0 || same != (key != "") {
			t.Errorf("key %q: of %d bytes all are still there: %v", key, len(before), same)
		}
		if !strings.Contains(said, "where a NATS server encrypts its files") {
			t.Error(said)
		}
	}
}

// TestStatisticsHoldWhatWasDeleted: also behind a VACUUM, so each certificate says so.
func TestStatisticsHoldWhatWasDeleted(t *testing.T) {
	t.Parallel()
	db := outboxdb.New(t, pgtest.Server(t))
	db.Exec(outboxdb.PlainTable + " WITH (autovacuum_enabled = false)")
	db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT d, 'a', n, to_jsonb(d) FROM unnest(ARRAY['gone', 'left']) d, generate_series(1, 50) n`)
	db.Exec("ANALYZE outbox")
	db.Exec("DELETE FROM outbox WHERE doc_id = 'gone'")
	held := func(after string) bool {
		db.Exec(after)
		return strings.Contains(db.Text(`SELECT string_agg(concat(most_common_vals, histogram_bounds), ' ')
			FROM pg_stats WHERE tablename = 'outbox'`), "gone")
	}
	if !held("VACUUM outbox") || held("VACUUM ANALYZE outbox") {
		t.Error("the statistics have the document otherwise than it is said")
	}
	_, _, said := removing(t, natsserver.Options{})
	if !strings.Contains(said, "statistics, which hold values of rows, until ANALYZE") {
		t.Error(said)
	}
}

// TestACertificateNamesOtherClusters: what they have of the document lies where this one does not reach.
func TestACertificateNamesOtherClusters(t *testing.T) {
	t.Parallel()
	for _, id := range []int{0, 1} {
		c := &command{rep: &Report{}, l: &backfill.Conns{Conns: &conns.Conns{}}}
		c.cfg.Cluster.ID = id
		c.limits()
		said := strings.Contains(strings.Join(c.rep.NotReached, "\n"), "what clusters other than 1 have")
		if said != (id == 1) {
			t.Errorf("cluster %d: %q", id, c.rep.NotReached)
		}
	}
}
