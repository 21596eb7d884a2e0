package consumer

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestTheConsumerExampleReadsOneDocumentInOrder runs the example of the documentation: it reads one document
// in order, and a durable one goes on where it was.
func TestTheConsumerExampleReadsOneDocumentInOrder(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Server(t)
	o := harness.New(t, url, nats.URL(), "consumer_example", "REORDER_SORT=commit")
	o.Init()
	o.Start()
	ops := harness.RecordedOps(t, 900)
	harness.StartLoad(t, url, ops, 1, 0, 1).Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), o.Stream, len(ops))

	example := filepath.Join(t.TempDir(), "consumer")
	if out, err := exec.Command("go", "-C", "../../../../examples", "build", "-o", example,
		"./consumer").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var want []string
	for _, op := range ops {
		if op.Doc == ops[0].Doc {
			want = append(want, fmt.Sprintf("%s:%020d", op.Actor, op.Counter))
		}
	}
	var read func(args ...string) []string
	read = func(args ...string) []string {
		ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
		defer cancel()
		args = append([]string{"-server", nats.URL(), "-doc", ops[0].Doc}, args...)
		out, err := exec.CommandContext(ctx, example, args...).CombinedOutput()
		// and it has had nothing
		if err != nil && !strings.Contains(string(out), ops[0].Actor) &&
			harness.Unanswered(t, args, string(out)) {
			return read(args[4:]...)
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		var keys []string
		for line := range strings.Lines(string(out)) {
			key, _, _ := strings.Cut(line, " ")
			keys = append(keys, key)
		}
		return keys
	}
	half := len(want) / 2
	for name, got := range map[string][]string{
		"ordered": read("-count", fmt.Sprint(len(want))),
		"durable": append(read("-durable", "reader", "-count", fmt.Sprint(half)),
			read("-durable", "reader", "-count", fmt.Sprint(len(want)-half))...),
	} {
		if strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("%s: %d keys, want %d in the order of the trace", name, len(got), len(want))
		}
	}
}
