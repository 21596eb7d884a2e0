package maintenance

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAnErasureThatTheServerWouldRefuseChangesNothing: once the rows had gone nothing could finish the
// request, and what is noted as erased keeps the archive waiting.
func TestAnErasureThatTheServerWouldRefuseChangesNothing(t *testing.T) {
	t.Parallel()
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasedenied")
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1+harness.Value[int](t, f.Conn, settled))
	_, err := f.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "MIRROR", DenyDelete: true,
		Mirror: &jetstream.StreamSource{Name: f.Stream}})
	harness.Must(t, err)
	harness.AwaitMessages(t, f.JS, "MIRROR", 1)
	refused := func(stream string) {
		t.Helper()
		for _, args := range [][]string{nil, {"--yes"}} {
			_, said, code := erase(t, f, append([]string{"--doc", "gone", "--request", "r"}, args...)...)
			if code != 3 || !strings.Contains(said, "stream "+stream+" has messages of the document, and "+
				"deny_delete") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}
	}
	refused("MIRROR")
	harness.Must(t, f.JS.DeleteStream(t.Context(), "MIRROR"))
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	config := s.CachedInfo().Config
	config.DenyDelete = true
	_, err = f.JS.UpdateStream(t.Context(), config)
	harness.Must(t, err)
	refused(f.Stream)
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = 'gone'"); n != 1 {
		t.Errorf("%d rows are left", n)
	}
	if harness.Value[bool](t, f.Conn, "SELECT to_regclass('outflow_erasures') IS NOT NULL") {
		t.Error("a request is begun")
	}
	f.MustStop(t)
}
