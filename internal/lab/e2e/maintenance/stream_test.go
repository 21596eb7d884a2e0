package maintenance

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestTheStreamStaysSmall: outflow publishes in gap mode, the archive follows, and messages leave the front
// of the stream, with kills of either at every step. Each start of outflow finds what it remembers, the
// archive has no gap, and nothing is missing in the end.
func TestTheStreamStaysSmall(t *testing.T) {
	t.Parallel()
	const each, keep, memory = 30, 10, 5
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "small",
		"ARCHIVE_URL=file://"+t.TempDir(), "RETAIN_STREAM_MESSAGES="+fmt.Sprint(keep), "REORDER_MODE=gap",
		"REORDER_MEMORY="+fmt.Sprint(memory))
	first := func() uint64 {
		t.Helper()
		s, err := f.JS.Stream(t.Context(), f.Stream)
		harness.Must(t, err)
		return s.CachedInfo().State.FirstSeq
	}
	type report struct {
		First   uint64 `json:"first"`
		MayGo   uint64 `json:"may_go"`
		GoesTo  uint64 `json:"goes_to"`
		Applied bool   `json:"applied"`
	}
	run := func(args ...string) (r report) {
		t.Helper()
		out := f.MustRun(append(args, "--json")...)
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		return r
	}
	if r := run("stream", "plan"); r.GoesTo != 0 || r.MayGo != 0 {
		t.Errorf("of an empty stream %+v", r)
	}
	written := 0
	write := func(rows int) {
		t.Helper()
		for range rows {
			written++
			harness.Insert(t, f.Conn, fmt.Sprint("doc", written%3), (written+2)/3, "{}")
		}
	}
	for round, point := range []string{"", "verified", "checked", "purged"} {
		write(each)
		var plan report
		// the record keeps a checkpoint of a smaller sequence than the newest: it takes some more events
		harness.Eventually(t, "something may go", func() error {
			write(1)
			f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
			f.MustRun("archive", "run", "--now")
			if plan = run("stream", "plan"); plan.GoesTo < plan.First {
				return fmt.Errorf("%+v", plan)
			}
			return nil
		})
		if plan.GoesTo > uint64(written-keep) || plan.Applied || first() != plan.First {
			t.Fatalf("round %d: %+v, and the stream begins at %d", round, plan, first())
		}
		if point != "" {
			f.Set("FAILPOINT=stream." + point + ":1")
			cmd := exec.CommandContext(t.Context(), harness.Program(f.Env), "stream", "apply")
			cmd.Env = f.Env
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("stream.%s: %v\n%s", point, err, out)
			}
			f.Env = f.Env[:len(f.Env)-1]
		}
		f.Kill()
		run("stream", "apply")
		if now := first(); now <= plan.GoesTo || now > uint64(written-keep)+1 {
			t.Fatalf("after stream.%s the stream begins at %d: %+v", point, now, plan)
		}
		f.Start()
		f.AwaitReady()
	}
	var verified struct {
		Messages int `json:"messages"`
	}
	if err := json.Unmarshal([]byte(f.MustRun("archive", "verify", "--json")), &verified); err != nil {
		t.Fatal(err)
	}
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Eventually(t, "all is published", func() error {
		if info, err := s.Info(t.Context()); err != nil || info.State.LastSeq < uint64(written) {
			return fmt.Errorf("not %d yet: %w", written, err)
		}
		return nil
	})
	if state := s.CachedInfo().State; verified.Messages < int(state.FirstSeq)-1 ||
		state.LastSeq != uint64(written) {
		t.Errorf("messages are missing: %+v of %d, and the stream has %+v", verified, written, state)
	}
	write(40)
	f.AwaitConfirmed(f.Conn, harness.WALEnd(t, f.Conn))
	f.MustRun("archive", "run", "--now")
	f.MustStop(t) // or what may go would grow with the next checkpoint
	run("stream", "apply")
	f.MustContain("plan", f.MustRun("stream", "plan"), "gap mode remembers the 5 messages",
		"confirmed: up to", "archive: up to", "no message would go")
}
