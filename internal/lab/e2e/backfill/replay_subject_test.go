package backfill

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// TestReplayByDocumentDoesNotPassOverUnknownSubjects: the stream has messages from before the subject or the
// dead letters were configured otherwise. What they are about is not known, so a selection by document does
// not pass over them.
func TestReplayByDocumentDoesNotPassOverUnknownSubjects(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	o, conn, s := harness.ReplayableStream(t, "resubject")
	o.Set("SUBJECT=moved.{doc_id}")
	o.Start()
	harness.Insert(t, conn, "a", 7, `{"n": 7}`)
	harness.AwaitMessages(t, s, o.Stream, 13)
	o.MustStop(t)
	for _, from := range []string{"", "stream"} {
		o.MustFail(3, []string{"replay", "--doc", "a", "--from", from}, "sequence 1 (outbox.a)",
			"does not say", "--from table")
	}
	if got := keys(o.Replay("--doc", "a", "--from", "table")); got != "a/anna:002 a/anna:004 a/anna:006 "+
		"a/anna:007 a/bert:001 a/bert:003 a/bert:005" {
		t.Errorf("the table tells: %s", got)
	}
	for _, args := range [][]string{{"--filter", "moved.*"}, {"--seq", "13..", "--doc", "a"},
		{"--doc", "a", "--filter", "moved.>"}} {
		if got := o.Replay(args...); len(got) != 1 || got[0].Sequence != 13 {
			t.Errorf("%v: %+v", args, got)
		}
	}
	// Dead letters from when they were configured: their bodies say which document.
	o.Set("SUBJECT=outbox.{doc_id}", "SINK_ON_POISON=dead_letter", "SINK_MAX_PAYLOAD=1KiB")
	harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
			VALUES ('c', 'anna', 1, to_jsonb(repeat('x', 2000)))`)
	o.Start()
	harness.AwaitMessages(t, s, o.Stream, 14)
	o.MustStop(t)
	o.Set("SINK_ON_POISON=stop", "SINK_MAX_PAYLOAD=1MiB")
	if got := o.Replay("--doc", "c", "--seq", "14.."); len(got) != 1 || got[0].Sequence != 14 {
		t.Errorf("the dead letter: %+v", got)
	}
	if got := o.Replay("--filter", "outbox.a"); len(got) != 6 {
		t.Errorf("by subject: %+v", got)
	}
}
