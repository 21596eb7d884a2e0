package e2e

import "testing"

// TestReplayAcrossSubjects: the stream has messages from before the subject or the dead letters were configured otherwise. What they are about
// is not known, so a selection by document does not pass over them.
func TestReplayAcrossSubjects(t *testing.T) {
	slow(t)
	t.Parallel()
	o, conn, s := replayWorld(t, "resubject")
	o.set("SUBJECT=moved.{doc_id}")
	o.start()
	row(t, conn, "a", 7, `{"n": 7}`)
	awaitMessages(t, s, o.stream, 13)
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	for _, from := range []string{"", "stream"} {
		o.fails(3, []string{"replay", "--doc", "a", "--from", from}, "sequence 1 (outbox.a)", "does not say", "--from table")
	}
	if got := keys(o.replay("--doc", "a", "--from", "table")); got != "a/anna:002 a/anna:004 a/anna:006 a/anna:007 a/bert:001 a/bert:003 a/bert:005" {
		t.Errorf("the table tells: %s", got)
	}
	for _, args := range [][]string{{"--filter", "moved.*"}, {"--seq", "13..", "--doc", "a"}, {"--doc", "a", "--filter", "moved.>"}} {
		if got := o.replay(args...); len(got) != 1 || got[0].Sequence != 13 {
			t.Errorf("%v: %+v", args, got)
		}
	}
	// Dead letters from when they were configured: their bodies say which document.
	o.set("SUBJECT=outbox.{doc_id}", "SINK_ON_POISON=dead_letter", "SINK_MAX_PAYLOAD=1KiB")
	mustExec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('c', 'anna', 1, to_jsonb(repeat('x', 2000)))`)
	o.start()
	awaitMessages(t, s, o.stream, 14)
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	o.set("SINK_ON_POISON=stop", "SINK_MAX_PAYLOAD=1MiB")
	if got := o.replay("--doc", "c", "--seq", "14.."); len(got) != 1 || got[0].Sequence != 14 {
		t.Errorf("the dead letter: %+v", got)
	}
	if got := o.replay("--filter", "outbox.a"); len(got) != 6 {
		t.Errorf("by subject: %+v", got)
	}
}
