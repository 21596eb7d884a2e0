package consumer

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer" // consumer is a helper of these tests
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func count(d *harness.Distinct) int {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	return len(d.Seen)
}

// take returns the count, and begins anew.
func take(d *harness.Distinct) int {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	n := len(d.Seen)
	d.Seen = nil
	return n
}

// consumers asks outflow consumer list.
func consumers(o *harness.Outflow, args ...string) map[string]map[string]any {
	o.T.Helper()
	out := o.MustRun(append([]string{"consumer", "list", "--json"}, args...)...)
	var all []map[string]any
	harness.Must(o.T, json.Unmarshal([]byte(out), &all))
	byName := map[string]map[string]any{}
	for _, c := range all {
		byName[c["name"].(string)] = c
	}
	return byName
}

// TestARebuiltProjectionIsTheSameByteForByte: a projection that is dropped and made again, by setting its
// consumer back, and by a replay from the table to it alone, is the one that it was, byte for byte.
func TestARebuiltProjectionIsTheSameByteForByte(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const docs, each = 9, 40
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), "rebuild", "REORDER_HORIZON=0s")
	o.Init()
	o.Start()
	s := harness.JetStream(t, ns.URL())
	p := harness.NewProjection(t, o, url, s, "chain")
	p.Start()
	for i := range each {
		harness.Exec(t, conn,
			`INSERT INTO outbox (doc_id, actor_id, counter, payload)
				SELECT 'doc ' || d, 'anna', $1::int, jsonb_build_object('n', $1::int)
				FROM generate_series(1, $2::int) d`, i, docs)
	}
	harness.Eventually(t, "the consumer runs", func() error {
		if c := consumers(o)["chain"]; c == nil || c["members"] == nil {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
	o.MustFail(3, []string{"consumer", "rewind", "chain", "--to", "start", "--yes"}, "consumer chain runs")
	want := p.Reach(docs * each)
	if count(&p.Replayed) != 0 {
		t.Errorf("%d live events are marked as replayed", count(&p.Replayed))
	}

	p.Make()
	o.MustFail(2, []string{"consumer", "rewind", "chain", "--to", "time:1h"}, "no terminal", "--yes")
	out := o.MustRun("consumer", "rewind", "chain", "--to", "start", "--yes")
	o.MustContain("rewind", out, fmt.Sprintf("%d events: from sequence 1 (position", docs*each),
		"Event.Replayed is true")
	if c := consumers(o)["chain"]; c["sequence"].(float64) != 0 || c["running"].(bool) ||
		c["marks"] != "postgres" || c["partitions"].(float64) != 4 {
		t.Errorf("set back: %v", c)
	}
	p.Start()
	if got := p.Reach(docs * each); got != want {
		t.Errorf("set back to the start, it becomes\n%s\nwant\n%s", got, want)
	}
	if got := take(&p.Replayed); got != docs*each {
		t.Errorf("%d events are marked as replayed", got)
	}

	// A part of it, and live ones behind. One document is parked on the way; it comes again with the others.
	again := func(parked int) {
		t.Helper()
		harness.Must(t, func() error {
			_, err := p.Pool.Exec(t.Context(), `UPDATE chain SET n = 0, hash = 'x'`)
			return err
		}())
		out, errOut, code := o.Run("consumer", "rewind", "chain", "--to",
			fmt.Sprintf("seq:%d", docs*each-2*docs+1), "--yes")
		if code != 0 || strings.Contains(out, "of them are parked") != (parked > 0) {
			t.Fatalf("rewind: exit code %d: %s%s", code, out, errOut)
		}
	}
	again(0)
	p.Poison.Store(true)
	p.Start()
	p.Reach(2*docs - 2)
	take(&p.Replayed)
	harness.Eventually(t, "two are parked", func() error {
		if c := consumers(o)["chain"]; c["parked"].(float64) != 2 {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
	p.Poison.Store(false)
	again(2)
	if c := consumers(o)["chain"]; c["parked"].(float64) != 0 {
		t.Errorf("set back: %v", c)
	}
	o.MustFail(3, []string{"consumer", "rewind", "chain", "--to", fmt.Sprintf("seq:%d", docs*each), "--yes"},
		"only goes back")
	harness.Exec(t, conn,
		`INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc ' || d, 'anna', $1::int, '{}'
			FROM generate_series(1, $2::int) d`, each, docs)
	p.Start()
	p.Reach(3 * docs)
	if got := take(&p.Replayed); got != 2*docs {
		t.Errorf("%d of %d events are marked as replayed", got, 2*docs)
	}
	harness.Exec(t, conn, `DELETE FROM outbox WHERE counter = $1`, each)

	p.Make()
	o.MustRun("replay", "--from", "table", "--to", "consumer:chain", "--replay-id", "rebuild")
	p.Start()
	if got := p.Reach(docs * each); got != want {
		t.Errorf("from the table it becomes\n%s\nwant\n%s", got, want)
	}
	if got := take(&p.Replayed); got != docs*each {
		t.Errorf("%d events are marked as replayed", got)
	}

	p.Make()
	o.MustRun("replay", "--seq", fmt.Sprintf("..%d", docs*each), "--to",
		"consumer:chain")
	p.Start()
	if got := p.Reach(docs * each); got != want {
		t.Errorf("from the stream it becomes\n%s\nwant\n%s", got, want)
	}

	live, err := s.Stream(t.Context(), o.Stream)
	harness.Must(t, err)
	harness.Must(t, live.Purge(t.Context(), jetstream.WithPurgeSequence(20)))
	o.MustFail(3, []string{"consumer", "rewind", "chain", "--to", "start", "--yes"}, "begins at sequence 20",
		"--to seq:20", "outflow replay --from table --to consumer:chain")
	o.MustFail(3, []string{"consumer", "rewind", "chain", "--to", "position:0/1", "--yes"},
		"begins at sequence 20")
	o.MustFail(3, []string{"consumer", "rewind", "nobody", "--to", "start", "--yes"}, "no consumer nobody")
	o.MustFail(2, []string{"consumer", "rewind", "chain", "--to", "yesterday", "--yes"}, "seq:N")
	o.MustFail(2, []string{"consumer", "rewind", "chain", "--yes"}, "--to")
	all := o.Replay("--seq", fmt.Sprintf("%d", docs*each+1))
	if out, errOut, code := o.Run("consumer", "rewind", "chain", "--to", "position:"+all[0].Position,
		"--yes"); code != 0 || !strings.Contains(out, fmt.Sprintf("to %d\n", docs*each)) {
		t.Errorf("to a position: exit code %d: %s%s", code, out, errOut)
	}
}

// TestConsumersWithoutADatabaseAreRewound: a consumer that keeps its marks in JetStream, and plain durables.
func TestConsumersWithoutADatabaseAreRewound(t *testing.T) {
	t.Parallel()
	o, _, s := harness.ReplayableStream(t, "rewindkv")
	p := harness.NewProjection(t, o, envOf(o, "OUTFLOW_POSTGRES_URL"), s, "kv")
	p.Marks = consume.JetStream()
	p.Start()
	want := p.Reach(12)
	p.Make()
	out, errOut, code := o.Run("consumer", "rewind", "kv", "--to", "start", "--yes")
	if code != 0 || !strings.Contains(out, "12 events: from sequence 1") {
		t.Fatalf("rewind: exit code %d\n%s%s", code, out, errOut)
	}
	if c := consumers(o)["kv"]; c["sequence"].(float64) != 0 || c["marks"] != "jetstream" {
		t.Errorf("set back: %v", c)
	}
	p.Start()
	if got := p.Reach(12); got != want {
		t.Errorf("set back, it becomes\n%s\nwant\n%s", got, want)
	}
	if got := count(&p.Replayed); got != 12 {
		t.Errorf("%d events are marked as replayed", got)
	}

	stream, err := s.Stream(t.Context(), o.Stream)
	harness.Must(t, err)
	plain, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
		Durable: "plain", FilterSubject: "outbox.a", MaxAckPending: 7, Description: "mine",
		Metadata: map[string]string{"team": "x"},
	})
	harness.Must(t, err)
	take := func(c jetstream.Consumer, n int) (seqs []uint64) {
		batch, err := c.Fetch(n)
		harness.Must(t, err)
		for m := range batch.Messages() {
			meta, err := m.Metadata()
			harness.Must(t, err)
			harness.Must(t, m.DoubleAck(t.Context()))
			seqs = append(seqs, meta.Sequence.Stream)
		}
		return seqs
	}
	if got := fmt.Sprint(take(plain, 4)); got != "[1 3 5 7]" {
		t.Fatalf("the durable was given %s", got)
	}
	fetching, stop := context.WithCancel(t.Context())
	_, err = plain.Fetch(5, jetstream.FetchContext(fetching)) // two come, and are never acknowledged
	harness.Must(t, err)
	harness.Eventually(t, "a pull waits", func() error {
		if info, err := plain.Info(t.Context()); err != nil || info.NumWaiting == 0 {
			return fmt.Errorf("%v, %w", info, err)
		}
		return nil
	})
	o.MustFail(3, []string{"consumer", "rewind", "plain", "--to", "seq:3", "--yes"}, "pulls wait")
	stop()
	harness.Eventually(t, "no pull waits", func() error {
		if info, err := plain.Info(t.Context()); err != nil || info.NumWaiting > 0 {
			return fmt.Errorf("%v, %w", info, err)
		}
		return nil
	})
	info, err := plain.Info(t.Context())
	harness.Must(t, err)
	given := info.Delivered.Stream
	// As if a rewind had been killed behind each of its steps: the durable is there with a record, then it is
	// gone.
	record, err := json.Marshal(map[string]any{"config": info.Config, "was": given,
		"acked": info.AckFloor.Stream, "to": 2})
	harness.Must(t, err)
	_, err = stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "plain_rewinding",
		Metadata: map[string]string{"outflow.rewind": string(record)}})
	harness.Must(t, err)
	if c := consumers(o); c["plain"]["note"] != nil || c["plain_rewinding"] != nil ||
		c["plain"]["position"] == nil {
		t.Errorf("with a record beside it: %v", c)
	}
	harness.Must(t, stream.DeleteConsumer(t.Context(), "plain"))
	if c := consumers(o)["plain"]; c["note"] == nil ||
		!strings.Contains(c["note"].(string), "rewind plain --to seq:3") {
		t.Errorf("interrupted: %v", c)
	}
	if out, errOut, code := o.Run("consumer", "rewind", "plain", "--to", "seq:3", "--yes"); code != 0 ||
		!strings.Contains(out, "nothing tells them from new ones") {
		t.Fatalf("rewind: exit code %d\n%s%s", code, out, errOut)
	}
	again, err := stream.Consumer(t.Context(), "plain")
	harness.Must(t, err)
	if c := again.CachedInfo().Config; c.MaxAckPending != 7 || c.Description != "mine" ||
		c.Metadata["team"] != "x" || c.FilterSubject != "outbox.a" {
		t.Errorf("made again: %+v", c)
	}
	if _, err := stream.Consumer(t.Context(), "plain_rewinding"); err == nil {
		t.Error("the record is still there")
	}
	// Killed behind the new durable: the same command finishes here, too.
	_, err = stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "plain_rewinding",
		Metadata: map[string]string{"outflow.rewind": string(record)}})
	harness.Must(t, err)
	o.MustRun("consumer", "rewind", "plain", "--to", "seq:3", "--yes")
	if _, err := stream.Consumer(t.Context(), "plain_rewinding"); err == nil {
		t.Error("the record is still there")
	}
	if got := fmt.Sprint(take(again, 3)); got != "[3 5 7]" {
		t.Errorf("the durable was given %s again", got)
	}
	text, _, _ := o.Run("consumer", "list")
	o.MustContain("outflow consumer list", text, "CONSUMER", "plain", "outbox.a", "kv", "jetstream")
}

// envOf is a setting of an installation.
func envOf(o *harness.Outflow, name string) (value string) {
	for _, e := range o.Env {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			value = v
		}
	}
	return value
}
