package backfill

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestMessagesAreReplayedFromTheStreamOnly: where events are messages in the WAL, only the stream can be read
// again, and is never taken for more than it has.
func TestMessagesAreReplayedFromTheStreamOnly(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	for source, says := range map[string]string{"message": "source is message: there is no outbox table",
		"both": "not the events that were messages (source: both)"} {
		o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "replaymsg_"+source, "SOURCE="+source,
			"REORDER_HORIZON=0s")
		o.Init()
		o.Start()
		for i := range 3 {
			harness.Exec(t, conn, harness.EmitEvent, harness.EventContent("doc", "anna", i, `{"n": 1}`))
		}
		events := 3
		if source == "both" {
			harness.Insert(t, conn, "doc", 9, `{}`)
			events++
		}
		s := harness.JetStream(t, ns.URL())
		harness.AwaitMessages(t, s, o.Stream, events)
		if got := o.Replay("--doc", "doc"); len(got) != events || got[1].ID != "m-doc-anna-1" ||
			string(got[1].Data) != `{"n": 1}` {
			t.Errorf("%s: %+v", source, got)
		}
		o.MustFail(3, []string{"replay", "--actor", "anna"}, "--actor: the stream's messages do not say it")
		if got := o.Replay("--id", "m-doc-anna-2"); len(got) != 1 {
			t.Errorf("%s: by id: %+v", source, got)
		}
		live, err := s.Stream(t.Context(), o.Stream)
		harness.Must(t, err)
		harness.Must(t, live.Purge(t.Context(), jetstream.WithPurgeSequence(2)))
		o.MustFail(3, []string{"replay", "--doc", "doc"}, "1 older messages are gone", says)
		if got := o.Replay("--doc", "doc", "--from", "stream"); len(got) != events-1 {
			t.Errorf("%s: what is left: %+v", source, got)
		}
		out, errOut, code := o.Run("replay", "--from", "table")
		switch source {
		case "message":
			if code != 3 || !strings.Contains(errOut, says) {
				t.Errorf("%s: exit code %d: %s", source, code, errOut)
			}
		case "both":
			if code != 0 || strings.Count(out, "\n") != 1 ||
				!strings.Contains(errOut, "events that were messages are in the stream alone") {
				t.Errorf("%s: exit code %d: %s%s", source, code, out, errOut)
			}
		}
	}
}
