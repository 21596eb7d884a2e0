package e2e

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestReplayOfMessages: where events are messages in the WAL, only the stream can be read again, and is never taken for more than it has.
func TestReplayOfMessages(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	for source, says := range map[string]string{"message": "source is message: there is no outbox table", "both": "not the events that were messages (source: both)"} {
		o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "replaymsg_"+source, "SOURCE="+source, "REORDER_HORIZON=0s")
		o.init()
		o.start()
		for i := range 3 {
			mustExec(t, conn, emitEvent, content("doc", "anna", i, `{"n": 1}`))
		}
		events := 3
		if source == "both" {
			row(t, conn, "doc", 9, `{}`)
			events++
		}
		s := js(t, ns.URL())
		awaitMessages(t, s, o.stream, events)
		if got := o.replay("--doc", "doc"); len(got) != events || got[1].ID != "m-doc-anna-1" || string(got[1].Data) != `{"n": 1}` {
			t.Errorf("%s: %+v", source, got)
		}
		o.fails(3, []string{"replay", "--actor", "anna"}, "--actor: the stream's messages do not say it")
		if got := o.replay("--id", "m-doc-anna-2"); len(got) != 1 {
			t.Errorf("%s: by id: %+v", source, got)
		}
		live, err := s.Stream(t.Context(), o.stream)
		must(t, err)
		must(t, live.Purge(t.Context(), jetstream.WithPurgeSequence(2)))
		o.fails(3, []string{"replay", "--doc", "doc"}, "1 older messages are gone", says)
		if got := o.replay("--doc", "doc", "--from", "stream"); len(got) != events-1 {
			t.Errorf("%s: what is left: %+v", source, got)
		}
		out, errOut, code := o.exec("replay", "--from", "table")
		switch source {
		case "message":
			if code != 3 || !strings.Contains(errOut, says) {
				t.Errorf("%s: exit code %d: %s", source, code, errOut)
			}
		case "both":
			if code != 0 || strings.Count(out, "\n") != 1 || !strings.Contains(errOut, "events that were messages are in the stream alone") {
				t.Errorf("%s: exit code %d: %s%s", source, code, out, errOut)
			}
		}
	}
}
