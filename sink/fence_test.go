package sink

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// fenced is the configuration of the shared mode.
func fenced(url string) Config {
	cfg := batched(url)
	cfg.Fence = true
	return cfg
}

func testCut(epoch uint64) outbox.Cut {
	return outbox.Cut{SystemID: 1, LSN: 0x16B3748, Epoch: epoch, Owner: 2}
}

// asleep keeps what a publisher sends until it wakes.
type asleep struct {
	out  writer
	kept []func()
}

func (a *asleep) send(m *message, reply []byte) {
	copied := *m
	copied.subject, copied.header = bytes.Clone(m.subject), bytes.Clone(m.header)
	copied.data, copied.lines = bytes.Clone(m.data), bytes.Clone(m.lines)
	to := bytes.Clone(reply)
	a.kept = append(a.kept, func() { a.out.send(&copied, to) })
}

func (a *asleep) flush(bool) {}

func (a *asleep) wake() {
	for _, f := range a.kept {
		f()
	}
	a.out.flush(false)
}

// An owner sleeps with messages on their way, another cluster stores a cut and goes on behind it, and then
// the messages arrive: none is stored, and the owner hears why.
func TestNothingOfAnOldOwnerIsStoredBehindACut(t *testing.T) {
	t.Parallel()
	url := natstest.Server(t, natsserver.Options{Tune: unhurried}).URL()
	for _, batches := range []bool{false, true} {
		cfg := fenced(url)
		cfg.Stream = fmt.Sprintf("BATCHES-%v", batches)
		c := door(t, cfg)
		all := edits(t, 150)
		old, _ := watched(t, cfg)
		p := old.Publisher(0)
		p.batch.on = batches
		mustPublish(t, p, all[:10])

		sleeper := &asleep{out: p.out}
		p.out = sleeper
		// the first one by itself: the cut takes its sequence, and is what the next one, or batch, expects
		for i := range 100 {
			must.Succeed(t, p.Publish(&all[10+i].e, &all[10+i].h))
			for i == 0 && p.Flush(time.Now()) > 0 {
			}
		}
		for p.Flush(time.Now()) > 0 {
		}
		must.Succeed(t, c.StoreCut(t.Context(), testCut(1), 10, 0))
		sleeper.wake()
		fault := wantFault(t, publish(t.Context(), p, nil), outbox.Transient, CodeFenced)
		if st := state(t, c); st.LastSeq != 11 || st.Cut == nil {
			t.Fatalf("%s: the stream ends at %d, with the cut %v; %v", cfg.Stream, st.LastSeq, st.Cut, fault)
		}
		goesOnBehindCut(t, c, all[:10], all[110:])
	}
}

// goesOnBehindCut publishes as whoever has stored the cut behind what is there.
func goesOnBehindCut(t *testing.T, c *Conn, there, next []given) {
	t.Helper()
	last := uint64(len(there)) + 1
	cut, err := c.NewestCut(t.Context(), last)
	must.Succeed(t, err)
	p := c.Publisher(last)
	p.BehindCut(cut.Seq)
	mustPublish(t, p, next)
	got := readFrom(t, c.nc, c.cfg.Stream)
	same(t, append(got[:last-1:last-1], got[last:]...), append(there[:len(there):len(there)], next...))
	if _, err := c.NewestCut(t.Context(), last-1); outbox.FaultOf(err).Code != relay.CodeStreamMoved {
		t.Errorf("a cut behind the end that was read: %v", err)
	}
}

// A replicated stream takes one message with a fence at a time, or one batch: what is published goes in
// turns, with and without batches, and comes to the same.
func TestAReplicatedStreamTakesFencedMessagesInTurns(t *testing.T) {
	t.Parallel()
	cluster := natstest.Cluster(t, 3)
	all := edits(t, 700)
	for _, test := range []struct {
		batches        *Batches
		first, batched int
	}{{new(Batches), 600, 600}, {nil, 20, 0}} {
		cfg := fenced(cluster.URLs())
		cfg.Stream = fmt.Sprintf("BATCHES-%v", test.batches != nil)
		cfg.Batches = test.batches
		c := connect(t, cfg)
		must.Succeed(t, c.EnsureStream(t.Context(), stream.Options{Replicas: 3}))
		_, err := cluster.WaitLeader(cfg.Stream, 3*time.Minute)
		must.Succeed(t, err)
		first, next := all[:test.first], all[test.first:min(2*test.first, len(all))]
		mustPublish(t, c.Publisher(0), first)
		last := uint64(len(first))
		must.Succeed(t, c.StoreCut(t.Context(), testCut(1), last, 0))
		// It was further, before the broker lost that: what it expects is what the stream has again.
		old, _ := again(t, cfg)
		wantFault(t, publish(t.Context(), old.Publisher(last+1), next), outbox.Transient, CodeFenced)
		goesOnBehindCut(t, c, first, next)
		got := readFrom(t, c.nc, cfg.Stream)
		if n, _ := inBatches(t, got[:last]); n != test.batched {
			t.Errorf("%d messages went in batches, want %d", n, test.batched)
		}
	}
}

// A refusal for the expected sequence alone is no fence.
func TestARefusalForTheSequenceIsNoFence(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: unhurried})
	c := door(t, fenced(s.URL()))
	must.Succeed(t, c.StoreCut(t.Context(), testCut(1), 0, 0))
	p := c.Publisher(5)
	p.BehindCut(1)
	wantFault(t, publish(t.Context(), p, edits(t, 2)), outbox.Transient, codeWrongSequence)
}

// Two writers store one cut, again and again, as if neither heard of it; a third one has another cut.
func TestACutIsStoredOnce(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: unhurried})
	writers := []*Conn{door(t, fenced(s.URL())), door(t, fenced(s.URL()))}
	for last := range uint64(20) {
		var all sync.WaitGroup
		errs := make([]error, len(writers))
		for i, c := range writers {
			all.Go(func() { errs[i] = c.StoreCut(t.Context(), testCut(last+1), last, last) })
		}
		all.Wait()
		must.Succeed(t, errs[0])
		must.Succeed(t, errs[1])
	}
	if st := state(t, writers[0]); st.LastSeq != 20 || st.Cut == nil || *st.Cut != testCut(20) {
		t.Fatalf("the stream ends at %d with %v", st.LastSeq, st.Cut)
	}
	wantFault(t, writers[0].StoreCut(t.Context(), testCut(30), 19, 19), outbox.Transient, CodeFenced)
	wantFault(t, writers[0].StoreCut(t.Context(), testCut(30), 20, 19), outbox.Transient, CodeFenced)
	wantFault(t, writers[0].StoreCut(t.Context(), testCut(30), 22, 20), outbox.Transient, codeWrongSequence)
	p := writers[0].Publisher(20)
	p.BehindCut(20)
	mustPublish(t, p, edits(t, 1))
	wantFault(t, writers[1].StoreCut(t.Context(), testCut(30), 20, 20), outbox.Transient, codeWrongSequence)
}

// Servers before 2.11 look at the message's own subject.
func TestAServerThatDoesNotKnowTheFencesSubjectIsRefused(t *testing.T) {
	t.Parallel()
	c := &Conn{cfg: fenced("")}
	for text, ok := range map[string]bool{"": false, "0": false, "1": true, "5": true} {
		err := c.checkFence(&stream.Config{Metadata: map[string]string{"_nats.level": text}})
		if (err == nil) != ok {
			t.Error(fmt.Sprintf("level %q:", text), err)
		}
	}
	c.cfg.Fence = false
	must.Succeed(t, c.checkFence(&stream.Config{}))
}
