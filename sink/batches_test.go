package sink

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// batched is the configuration with atomic batches allowed.
func batched(url string) Config {
	cfg := config(url)
	cfg.Batches = new(Batches)
	return cfg
}

// slow returns a publisher that has found the server to be slow.
func slow(t testing.TB, c *Conn, last uint64) *Publisher {
	t.Helper()
	p := c.Publisher(last)
	if p.batch.allowed == nil {
		t.Fatal("the stream allows no batches")
	}
	p.batch.on = true
	return p
}

// inBatches counts the messages that came in a batch, and checks that each is whole: 1, 2, ... up to its
// commit.
func inBatches(t testing.TB, got []stored) (messages, batches int) {
	t.Helper()
	next := 1
	for i, m := range got {
		at := strings.Index(m.Header, headerBatchSeq+": ")
		if at < 0 {
			if next != 1 {
				t.Fatalf("message %d is in no batch, the one before did not end its own", i+1)
			}
			if !strings.Contains(m.Header, fmt.Sprintf("%s: %d", headerExpected, i)) {
				t.Fatalf("message %d has no expected sequence: %s", i+1, m.Header)
			}
			continue
		}
		messages++
		var n int
		if _, err := fmt.Sscanf(m.Header[at+len(headerBatchSeq+": "):], "%d", &n); err != nil || n != next {
			t.Fatalf("message %d is number %d of its batch, want %d: %s", i+1, n, next, m.Header)
		}
		if first := strings.Contains(m.Header, headerExpected); first != (n == 1) {
			t.Fatalf("message %d, number %d of its batch, has an expected sequence: %v", i+1, n, first)
		}
		if next++; strings.Contains(m.Header, headerBatchCommit) {
			next, batches = 1, batches+1
		}
	}
	if next != 1 {
		t.Fatalf("the last batch has %d messages and no end", next-1)
	}
	return messages, batches
}

func TestBatchesStoreEventsInOrderDeadLettersIncluded(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{SyncAlways: true, Tune: unhurried})
	cfg := batched(s.URL())
	cfg.MsgID, cfg.DeadLetter = true, true
	c := door(t, cfg)
	all := edits(t, 3000)
	for _, i := range []int{0, 1, 700, 701, 2999} { // dead letters are messages as all others
		all[i].e.Null |= relay.NullDoc
	}
	mustPublish(t, slow(t, c, 0), all)
	got := readAll(t, s.URL(), "OUTBOX")
	for i := range all {
		if all[i].e.Null&relay.NullDoc != 0 {
			all[i].e.Payload = []byte(got[i].Data)
		}
	}
	same(t, got, all)
	if messages, batches := inBatches(t, got); messages < 2*minBatch || batches > messages/minBatch {
		t.Errorf("%d messages in %d batches", messages, batches)
	}
	if st := state(t, c); st.LastSeq != 3000 || st.Newest == nil || *st.Newest != all[2999].h {
		t.Errorf("state %+v", st)
	}
	c = door(t, cfg) // and on, as it comes
	more := edits(t, 3500)[3000:]
	mustPublish(t, c.Publisher(3000), more)
	same(t, readAll(t, s.URL(), "OUTBOX"), append(all, more...))
}

// A stream of batches and one of single messages are the same but for the headers of the protocol.
func TestBatchesStoreTheSameAsSingleMessages(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: unhurried})
	all := edits(t, 1200)
	var streams [2][]stored
	for i, name := range []string{"BATCHED", "PLAIN"} {
		cfg := config(s.URL())
		if i == 0 {
			cfg.Batches = new(Batches)
		}
		cfg.Stream, cfg.MsgID, cfg.Resolve = name, true, testResolve
		cfg.Headers = []MappedHeader{{"A-Type", "type"}, {"traceparent", "trace"}}
		p := door(t, cfg).Publisher(0)
		p.batch.on = i == 0
		for j := range all {
			all[j].e.Extra = []string{"edit", "00-ab-cd-01"}
		}
		mustPublish(t, p, all)
		got := readAll(t, s.URL(), name)
		if messages, _ := inBatches(t, got); (messages > 0) != (i == 0) {
			t.Errorf("%s: %d messages in batches", name, messages)
		}
		for j := range got {
			var kept []string
			for line := range strings.SplitSeq(got[j].Header, "\n") {
				if !strings.HasPrefix(line, "Nats-Batch-") && !strings.HasPrefix(line, headerExpected) {
					kept = append(kept, line)
				}
			}
			got[j].Header = strings.Join(kept, "\n")
		}
		streams[i] = got
	}
	for i := range streams[0] {
		if streams[0][i] != streams[1][i] {
			t.Fatalf("message %d: %+v and %+v", i+1, streams[0][i], streams[1][i])
		}
	}
}

// A message of a batch that is lost on its way takes the batch with it, and all that were sent behind.
func TestNothingIsStoredOfABatchWithAHole(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: unhurried})
	all := edits(t, 1900)
	for _, test := range []struct {
		lost, want uint64
		code       string
	}{
		{1, 0, "batch_incomplete"}, // the first: the others come to no open batch
		{250, 0, "batch_incomplete"},
		{maxBatch + 1, maxBatch, "batch_incomplete"},
		{maxBatch + 77, maxBatch, "batch_incomplete"},
		// its commit: nobody answers for it, the next one is refused
		{2 * maxBatch, maxBatch, "wrong_last_sequence"},
	} {
		cfg := batched(s.URL())
		cfg.Stream = fmt.Sprint("LOST", test.lost)
		c := door(t, cfg)
		p := slow(t, c, 0)
		p.out = dropping{p.out, test.lost}
		wantFault(t, publish(t.Context(), p, all), outbox.Transient, test.code)
		got := readAll(t, s.URL(), cfg.Stream)
		same(t, got, all[:test.want])
		if p.Acked() > test.want {
			t.Errorf("acknowledged %d of %d", p.Acked(), test.want)
		}
	}
}

// A zombie's batch is open while a new session publishes: its end is refused.
func TestAZombiesOpenBatchIsRefusedAtItsEnd(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: unhurried})
	all := edits(t, 900)
	zombie := slow(t, door(t, batched(s.URL())), 0)
	for i := range 400 {
		must.Succeed(t, zombie.Publish(&all[i].e, &all[i].h))
	}
	if !zombie.batch.open() || len(zombie.held) != 1 {
		t.Fatal("its batch is not open")
	}
	zombie.out.flush(true)
	if err := zombie.conn.nc.FlushTimeout(time.Minute); err != nil { // the server has it
		t.Fatal(err)
	}
	next, st := watched(t, batched(s.URL()))
	if st.LastSeq != 0 {
		t.Fatalf("state %+v: an open batch shows", st)
	}
	mustPublish(t, slow(t, next, 0), all[:300])
	for zombie.Flush(time.Now()) > 0 {
	}
	wantFault(t, publish(t.Context(), zombie, nil), outbox.Transient, "wrong_last_sequence")
	same(t, readAll(t, s.URL(), "OUTBOX"), all[:300])
	if next.Err() != nil {
		t.Errorf("the zombie was taken for a stranger: %v", next.Err())
	}
}

// Two that publish the same in batches of other sizes.
func TestTwoPublishersInBatchesLeaveNothingTwice(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: unhurried})
	all := edits(t, 6000)
	cfg := batched(s.URL())
	door(t, cfg)
	type end struct {
		c   *Conn
		err error
	}
	ends := make(chan end, 2)
	for _, seed := range []uint64{1, 2} {
		c := door(t, cfg)
		p := slow(t, c, 0)
		go func() { ends <- end{c, publishInBursts(t, p, all, rand.New(rand.NewPCG(seed, 7)))} }()
	}
	failed := 0
	for range 2 {
		e := <-ends
		if e.err != nil {
			wantFault(t, e.err, outbox.Transient, "wrong_last_sequence")
			failed++
		}
		if f := outbox.FaultOf(e.c.Err()); f != nil && f.Code == "foreign_message" {
			t.Error(f)
		}
	}
	if failed == 0 {
		t.Error("nobody was refused")
	}
	got := readAll(t, s.URL(), "OUTBOX")
	same(t, got, all[:len(got)])
	inBatches(t, got)
}

// publishInBursts is publish with a flush now and then, so that batches get any size.
func publishInBursts(t *testing.T, p *Publisher, all []given, rnd *rand.Rand) error {
	for i := 0; i < len(all); {
		n := min(1+rnd.IntN(1500), len(all)-i)
		if err := publish(t.Context(), p, all[i:i+n]); err != nil {
			return err
		}
		i += n
	}
	return nil
}

// The server is killed in the middle of batches, again and again: what it holds then is a prefix, with all
// that was acknowledged.
func TestKilledServerInTheMiddleOfBatches(t *testing.T) {
	t.Parallel()
	s := natstest.Process(t, natsserver.Options{SyncAlways: true})
	kills, events, most := 5, tier.Size(30_000), tier.Size(4000) // between two kills
	all := edits(t, events)
	cfg := batched(s.URL())
	rnd := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 3))
	last := uint64(0)
	for kill := 0; last < uint64(len(all)); kill++ {
		c := door(t, cfg)
		p := slow(t, c, last)
		done := make(chan error, 1)
		bursts := rand.New(rand.NewPCG(uint64(kill), 5))
		go func() { done <- publishInBursts(t, p, all[last:], bursts) }()
		if kill < kills {
			for at := last + uint64(rnd.IntN(most)); p.Acked() < at && p.refused.Load() == nil &&
				c.Err() == nil && p.Acked() < uint64(len(all)); {
				time.Sleep(100 * time.Microsecond)
			}
			time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond) // when it is killed is random
			must.Succeed(t, s.Kill())
		}
		if err := <-done; err != nil && outbox.ClassOf(err) != outbox.Transient {
			t.Fatal(err)
		}
		c.Close()
		if kill < kills {
			must.Succeed(t, s.Start())
		}
		st := state(t, door(t, cfg))
		if st.LastSeq < p.Acked() || st.LastSeq > uint64(len(all)) {
			t.Fatalf("%d acknowledged, %d sent, last sequence %d", p.Acked(), p.Sent(), st.LastSeq)
		}
		t.Logf("from %d: %d acknowledged, %d there", last, p.Acked(), st.LastSeq)
		last = st.LastSeq
	}
	got := readAll(t, s.URL(), "OUTBOX")
	same(t, got, all)
	if n, batches := inBatches(t, got); n == 0 {
		t.Errorf("%d messages in %d batches", n, batches)
	}
}

// A message near the limit takes no headers of a batch, and a large one ends the batch before it.
func TestLargeMessagesGoAlone(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: unhurried})
	cfg := batched(s.URL())
	cfg.MaxPayload, cfg.MsgID = 4096, true
	c := door(t, cfg)
	all := edits(t, 600)
	for _, i := range []int{100, 101, 400} {
		all[i] = event(i, "doc", nil)
		size(&all[i].e, cfg.MaxPayload-overhead-len("Outflow: \r\n")-len(all[i].h.String()))
	}
	mustPublish(t, slow(t, c, 0), all)
	got := readAll(t, s.URL(), "OUTBOX")
	same(t, got, all)
	inBatches(t, got)
	for i, m := range got {
		if alone := !strings.Contains(m.Header, headerBatchID); alone != (i == 100 || i == 101 || i == 400) {
			t.Errorf("message %d alone: %v", i+1, alone)
		}
	}
}

func TestBatchesAreUsedOnlyWhereTheStreamAllowsThem(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: unhurried})
	allowed := func(t *testing.T, c *Conn) bool {
		t.Helper()
		must.Succeed(t, c.CheckStream(t.Context()))
		return c.newPublisher(0).batch.allowed != nil
	}
	none := config(s.URL())
	none.Stream = "NONE"
	c := door(t, none) // made without
	if c.config.AllowAtomic || allowed(t, c) {
		t.Error("batches, though they were not asked for")
	}
	none.Batches = new(Batches)
	if c = connect(t, none); allowed(t, c) {
		t.Error("batches, though the stream does not allow them")
	}
	all := edits(t, 100)
	mustPublish(t, c.Publisher(0), all)
	same(t, readAll(t, s.URL(), "NONE"), all)

	memory := batched(s.URL())
	memory.Stream = "MEMORY"
	c = connect(t, memory)
	must.Succeed(t, c.EnsureStream(t.Context(), stream.Options{Storage: "memory"}))
	if c.config.AllowAtomic || allowed(t, c) {
		t.Error("batches, in memory")
	}

	both := batched(s.URL())
	if c = door(t, both); !c.config.AllowAtomic || !allowed(t, c) {
		t.Error("no batches, though all is as it should be")
	}
	both.Batches = nil
	if c = connect(t, both); allowed(t, c) {
		t.Error("batches, though they are not allowed")
	}
	for change, s := range map[string]func(*stream.Config){
		"three replicas":  func(s *stream.Config) { s.Replicas = 3 },
		"an older server": func(s *stream.Config) { s.Metadata = map[string]string{"_nats.level": "4"} },
		"a very old one":  func(s *stream.Config) { s.Metadata = nil },
	} {
		c := door(t, batched(c.cfg.URL))
		if s(c.config); c.newPublisher(0).batch.allowed != nil {
			t.Errorf("batches, with %s", change)
		}
	}
}

// What a server refuses of batches ends the session, and is not tried again by the process.
func TestRefusedBatchesEndTheSessionAndAreNotRetried(t *testing.T) {
	t.Parallel()
	for name, tune := range map[string]func(*natsserver.Options){
		"smaller ones": func(o *natsserver.Options) { o.Tune = limits(100, 0) },
		"none open":    func(o *natsserver.Options) { o.Tune = limits(0, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var o natsserver.Options
			tune(&o)
			s := natstest.Server(t, o)
			cfg := batched(s.URL())
			c := door(t, cfg)
			all := edits(t, 700)
			if name == "none open" { // one that somebody left open
				other := slow(t, door(t, batched(s.URL())), 0)
				for i := range 100 {
					must.Succeed(t, other.Publish(&all[i].e, &all[i].h))
				}
				other.out.flush(true)
				must.Succeed(t, other.conn.nc.FlushTimeout(time.Minute))
			}
			wantFault(t, publish(t.Context(), slow(t, c, 0), all), outbox.Transient, codeBatchRefused)
			c = door(t, cfg)
			p := c.Publisher(state(t, c).LastSeq)
			if p.batch.allowed != nil {
				t.Error("it is tried again")
			}
			mustPublish(t, p, all[p.Sent():])
			same(t, readAll(t, s.URL(), "OUTBOX"), all)
		})
	}
	t.Run("the stream allows them no more", func(t *testing.T) {
		t.Parallel()
		s := natstest.Server(t, natsserver.Options{Tune: unhurried})
		c := door(t, batched(s.URL()))
		p := slow(t, c, 0)
		cfg := *c.config
		cfg.AllowAtomic = false
		must.Succeed(t, c.api.Ask(t.Context(), "STREAM.UPDATE.OUTBOX", cfg, &jsapi.Answer{}))
		wantFault(t, publish(t.Context(), p, edits(t, 100)), outbox.Transient, codeBatchRefused)
		same(t, readAll(t, s.URL(), "OUTBOX"), nil)
	})
}

func TestABadAnswerToABatchsStartIsTransient(t *testing.T) {
	t.Parallel()
	answer := func(body string) *nats.Msg { return &nats.Msg{Data: []byte(body)} }
	if f := checkBatchStart(answer(""), "OUTBOX"); f != nil {
		t.Error(f)
	}
	for _, test := range []struct {
		m    *nats.Msg
		code string
	}{
		{&nats.Msg{Header: nats.Header{"Status": {"503"}}}, "no_responders"},
		{answer(`{"stream":"OUTBOX","seq":8}`), codeBatchRefused}, // a server that knows no batches
		{answer(`nonsense`), "unexpected_ack"},
		{answer(`{"error":{"code":429,"err_code":10210}}`), codeBatchRefused},
		{answer(`{"error":{"code":400,"err_code":10174}}`), codeBatchRefused},
		{answer(`{"error":{"code":400,"err_code":10179}}`), codeBatchRefused},
		{answer(`{"error":{"code":400,"err_code":10199}}`), codeBatchRefused},
		{answer(`{"error":{"code":400,"err_code":10176}}`), "batch_incomplete"},
		{answer(`{"error":{"code":400,"err_code":10201}}`), "duplicate_ack"},
	} {
		wantFault(t, checkBatchStart(test.m, "OUTBOX"), outbox.Transient, test.code)
	}
}

// The pace of the first messages decides: a server that takes long for each syncs them. It acknowledges
// whatever it had in one go.
func TestBatchesBeginWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	const fast, synced = 5 * time.Microsecond, 100 * time.Microsecond
	for _, test := range []struct {
		name string
		each []time.Duration // message of a span takes
		on   bool
	}{
		{"fast", []time.Duration{fast, fast}, false}, {"synced", []time.Duration{synced, synced}, true},
		{"a slow disk", []time.Duration{10 * time.Millisecond, 10 * time.Millisecond}, true},
		{"stood still for once", []time.Duration{7 * time.Second / paceWindow, fast, synced, fast, fast},
			false},
	} {
		p, _, ack := offline(t)
		p.began, p.batch.allowed = time.Unix(0, 0), new(Batches)
		at := time.Duration(0)
		for i, each := range test.each {
			if !p.batch.probing() {
				t.Errorf("%s: decided after %d spans", test.name, i)
			}
			before := p.Sent()
			for !p.Full() {
				put(t, p, 10)
			}
			n := p.Sent() - before
			if n != paceWindow {
				t.Errorf("%s: %d messages in flight", test.name, n)
			}
			p.Flush(p.began.Add(at))
			at += each * time.Duration(n)
			p.ackedAt.Store(int64(at))
			ack(p.Sent())
			p.settle()
		}
		if p.batch.probing() || p.batch.on != test.on {
			t.Errorf("%s: batches %v, still probing %v", test.name, p.batch.on, p.batch.probing())
		}
		for !p.Full() {
			put(t, p, 10)
		}
		if n, _ := p.InFlight(); n != MaxInFlight {
			t.Errorf("%s: %d messages in flight afterwards", test.name, n)
		}
	}
	// A few messages at a time say nothing, however slow they are.
	p, _, ack := offline(t)
	p.began, p.batch.allowed = time.Unix(0, 0), new(Batches)
	for i := range 100 {
		for range 20 {
			put(t, p, 10)
		}
		p.Flush(time.Unix(int64(i), 0))
		p.ackedAt.Store(int64(time.Duration(i+1) * time.Second))
		ack(p.Sent())
		p.settle()
	}
	if !p.batch.probing() {
		t.Error("decided by windows of 20 messages")
	}
}

// unhurried lets a batch be open for as long as a test stands still. By default the server drops one after 10
// s.
func unhurried(o *server.Options) { o.JetStreamLimits.MaxBatchTimeout = time.Hour }

// limits makes the server take smaller batches, or fewer at a time.
func limits(size, open int) func(*server.Options) {
	return func(o *server.Options) {
		unhurried(o)
		o.JetStreamLimits.MaxBatchSize, o.JetStreamLimits.MaxBatchInflightPerStream = size, open
	}
}
