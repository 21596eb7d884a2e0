package erase

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/sink"
)

// TestWhatWasRemovedBeforeIsStillInTheServersFile, unlike what is deleted: no erasure reaches it, so each
// certificate says so.
func TestWhatWasRemovedBeforeIsStillInTheServersFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	conn, err := sink.Connect(t.Context(), sink.Config{Table: "public.outbox", Stream: "OUTBOX",
		URL: natstest.Server(t, natsserver.Options{Dir: dir}).URL()})
	must.Succeed(t, err)
	defer conn.Close()
	js, err := conn.API().JetStream()
	must.Succeed(t, err)
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"o"}})
	must.Succeed(t, err)
	for _, data := range []string{"purged-message", "deleted-message", "left-message"} {
		_, err := js.Publish(t.Context(), "o", []byte(data))
		must.Succeed(t, err)
	}
	must.Succeed(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(2)))
	must.Succeed(t, s.SecureDeleteMsg(t.Context(), 2))
	files := os.DirFS(filepath.Join(dir, "jetstream", "$G", "streams", "OUTBOX", "msgs"))
	block, err := fs.ReadFile(files, "1.blk")
	must.Succeed(t, err)
	for text, want := range map[string]bool{"purged-": true, "deleted-": false, "left-": true} {
		if bytes.Contains(block, []byte(text)) != want {
			t.Errorf("%q is in the file: %v", text, !want)
		}
	}
	c := &command{rep: &Report{}, l: &backfill.Conns{Conns: &conns.Conns{NATS: conn}}}
	c.limits()
	if said := strings.Join(c.rep.NotReached, "\n"); !strings.Contains(said, "removed from a stream before") {
		t.Error(said)
	}
}
