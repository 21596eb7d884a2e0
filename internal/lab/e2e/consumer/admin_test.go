package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer" // consumer is a helper of these tests
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// journal is a consumer that writes down the key of each event, in the order of the effects.
type journal struct {
	t    *testing.T
	o    *harness.Outflow
	js   jetstream.JetStream
	pool *pgxpool.Pool

	bad  atomic.Pointer[string] // the key of an event that fails for good
	hold atomic.Pointer[string] // the handler waits with the events of this document
}

func newJournal(t *testing.T, o *harness.Outflow, url string, js jetstream.JetStream) *journal {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	harness.Must(t, err)
	t.Cleanup(pool.Close)
	_, err = pool.Exec(t.Context(), "CREATE TABLE journal (n bigserial, doc text, key text)")
	harness.Must(t, err)
	return &journal{t: t, o: o, js: js, pool: pool}
}

func (j *journal) handle(ctx context.Context, tx pgx.Tx, e *consume.Event) error {
	if bad := j.bad.Load(); bad != nil && *bad == e.Document+" "+e.Key {
		return consume.Poison(errors.New("as the test wants it"))
	}
	for hold := j.hold.Load(); hold != nil && *hold == e.Document; hold = j.hold.Load() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	_, err := tx.Exec(ctx, "INSERT INTO journal (doc, key) VALUES ($1, $2)", e.Document, e.Key)
	return err
}

// start runs an instance; what it returns stops it.
func (j *journal) start() (stop func()) {
	j.t.Helper()
	c, err := consume.New(j.js, consume.Postgres(j.pool), consume.Config{Name: "journal", Stream: j.o.Stream,
		Lease: 2 * time.Second, Log: slog.New(slog.NewTextHandler(j.o.Log, nil))})
	harness.Must(j.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, j.handle) }()
	var once atomic.Bool
	stop = func() {
		if once.Swap(true) {
			return
		}
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				j.t.Error(err)
			}
		case <-time.After(harness.Patience):
			j.t.Error("the instance did not stop")
		}
	}
	j.t.Cleanup(stop)
	return stop
}

// effects are the keys of a document's effects, in their order.
func (j *journal) effects(doc string) []string {
	j.t.Helper()
	rows, err := j.pool.Query(j.t.Context(), "SELECT key FROM journal WHERE doc = $1 ORDER BY n", doc)
	harness.Must(j.t, err)
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	harness.Must(j.t, err)
	return keys
}

// await waits until there are so many effects.
func (j *journal) await(n int) {
	j.t.Helper()
	harness.Eventually(j.t, fmt.Sprintf("%d effects", n), func() error {
		var got int
		harness.Must(j.t, j.pool.QueryRow(j.t.Context(), "SELECT count(*) FROM journal").Scan(&got))
		if got < n {
			return fmt.Errorf("%d effects", got)
		}
		return nil
	})
}

// listed waits until the list says so of the consumer.
func (j *journal) listed(what string, is func(c map[string]any) bool) {
	j.t.Helper()
	harness.Eventually(j.t, what, func() error {
		if c := consumers(j.o)["journal"]; c == nil || !is(c) {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
}

// mustBe compares the effects of documents with what they have to be.
func (j *journal) mustBe(written map[string][]string) {
	j.t.Helper()
	for doc, keys := range written {
		if got := j.effects(doc); !slices.Equal(got, keys) {
			j.t.Errorf("document %s has the effects %q, want %q", doc, got, keys)
		}
	}
}

// recorded are operations of a recorded trace as those of several documents, and the keys of each.
func recorded(t *testing.T, conn *pgx.Conn, docs, each, from int) map[string][]string {
	t.Helper()
	ops, err := recording.Load(recording.FriendsForever)
	harness.Must(t, err)
	written := map[string][]string{}
	for i, op := range ops[from : from+docs*each] {
		doc := fmt.Sprint("doc ", i%docs)
		harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
			VALUES ($1, 'a', $2, $3)`, doc, from+i, string(op.Payload))
		written[doc] = append(written[doc], fmt.Sprintf("a:%020d", from+i))
	}
	return written
}

// TestARunningConsumerIsSetBackAndDivided: two instances that have nothing to do notice that they were set
// back; a change of the number of partitions that waits survives its command's kill -9, is shown, taken up
// again and done by them, and no event's effect is lost, repeated or out of order.
func TestARunningConsumerIsSetBackAndDivided(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), "divided", "REORDER_HORIZON=0s")
	o.Init()
	o.Start()
	j := newJournal(t, o, url, harness.JetStream(t, ns.URL()))
	stopOne, stopOther := j.start(), j.start()
	written := recorded(t, conn, 6, 10, 0)
	j.await(60)
	j.listed("two instances share the partitions", func(c map[string]any) bool {
		members, _ := c["members"].([]any)
		return len(members) == 2 && c["unowned"] == nil && c["pending"].(float64) == 0
	})
	o.MustFail(3, []string{"consumer", "rewind", "journal", "--to", "start", "--yes"},
		"consumer journal runs", "--running")
	o.MustFail(3, []string{"consumer", "delete", "journal", "--yes"}, "consumer journal runs")
	o.MustRun("consumer", "rewind", "journal", "--to", "start", "--running", "--yes")
	j.await(120)
	for doc, keys := range written {
		written[doc] = append(slices.Clone(keys), keys...)
	}
	j.mustBe(written)

	held := "doc 1"
	j.hold.Store(&held)
	for doc, keys := range recorded(t, conn, 6, 5, 60) {
		written[doc] = append(written[doc], keys...)
	}
	j.await(120 + 5) // others go on
	command := exec.CommandContext(t.Context(), harness.Binary, "consumer", "repartition", "journal",
		"--partitions", "5", "--yes")
	command.Env = o.Env
	harness.Must(t, command.Start())
	j.listed("the change is under way", func(c map[string]any) bool { return c["change"] != nil })
	harness.Must(t, command.Process.Kill())
	_ = command.Wait() // killed
	o.MustFail(3, []string{"consumer", "repartition", "journal", "--partitions", "9", "--yes"},
		"5 partitions", "--cancel")
	out := o.MustRun("consumer", "repartition", "journal", "--partitions", "5", "--no-wait")
	o.MustContain("repartition", out, "asked:", "outflow consumer list")
	o.MustContain("list", o.MustRun("consumer", "list"), "on its way to 5 partitions")
	o.MustRun("consumer", "repartition", "journal", "--cancel", "--yes")
	j.listed("the change is taken back", func(c map[string]any) bool { return c["change"] == nil })
	o.MustRun("consumer", "repartition", "journal", "--partitions", "5", "--no-wait", "--yes")
	j.hold.Store(nil)
	out = o.MustRun("consumer", "repartition", "journal", "--partitions", "5")
	o.MustContain("repartition", out, "consumer journal has 5 partitions")
	j.listed("the partitions are shared", func(c map[string]any) bool {
		return c["partitions"].(float64) == 5 && c["unowned"] == nil && c["change"] == nil
	})
	for doc, keys := range recorded(t, conn, 6, 5, 90) {
		written[doc] = append(written[doc], keys...)
	}
	j.await(120 + 60)
	j.mustBe(written)
	stopOne()
	stopOther()

	o.MustFail(2, []string{"consumer", "delete", "journal"}, "no terminal", "--yes")
	out = o.MustRun("consumer", "delete", "journal", "--yes")
	o.MustContain("delete", out, "marks    of 5 partitions", "consumer journal is deleted")
	if c := consumers(o)["journal"]; c != nil {
		t.Errorf("deleted: %v", c)
	}
	o.MustFail(3, []string{"consumer", "delete", "journal", "--yes"}, "has no consumer journal")
}

// TestTheRecipeOfReplayRepeatsNoEffect: what docs/replay.md says to do for one document, with a part of it
// parked, on recorded traces: stop the consumer, delete the document's effects, replay it, start again,
// release what is parked. A replay is also noticed by a consumer that runs.
func TestTheRecipeOfReplayRepeatsNoEffect(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), "recipe", "REORDER_HORIZON=0s")
	o.Init()
	o.Start()
	j := newJournal(t, o, url, harness.JetStream(t, ns.URL()))
	stop := j.start()
	bad := "doc 2 a:" + fmt.Sprintf("%020d", 3*4+2)
	j.bad.Store(&bad)
	written := recorded(t, conn, 4, 10, 0)
	j.await(30 + 3)
	j.listed("seven events are parked", func(c map[string]any) bool { return c["parked"] == 7.0 })
	for _, from := range []string{"stream", "table"} {
		stop()
		_, err := j.pool.Exec(t.Context(), "DELETE FROM journal WHERE doc = 'doc 2'")
		harness.Must(t, err)
		o.MustRun("replay", "--from", from, "--doc", "doc 2", "--to", "consumer:journal", "--replay-id",
			"mend-"+from)
		stop = j.start()
		j.await(30 + 3)
		if got := j.effects("doc 2"); !slices.Equal(got, written["doc 2"][:3]) {
			t.Errorf("replayed from the %s: %q", from, got)
		}
	}
	_, err := j.pool.Exec(t.Context(), "DELETE FROM journal WHERE doc = 'doc 1'")
	harness.Must(t, err)
	o.MustRun("replay", "--doc", "doc 1", "--to", "consumer:journal") // it runs
	j.await(30 + 3)
	j.bad.Store(nil)
	if out := o.MustRun("parked", "retry", "journal", "doc 2", "--wait"); !strings.Contains(out, "released") {
		t.Error(out)
	}
	j.await(40)
	j.mustBe(written)
}
