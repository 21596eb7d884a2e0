package sink

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// counted is a stream with messages of gap mode, and what a reader has to find there.
type counted struct {
	url  string
	cfg  Config
	want []*outbox.Counter // by sequence less one; nil: no message of ours
}

func countedStream(t testing.TB, url, name string, replicas int) *counted {
	t.Helper()
	s := &counted{url: url, cfg: config(url)}
	s.cfg.Stream, s.cfg.DeadLetter, s.cfg.MaxPayload = name, true, 16<<10
	must.Succeed(t, connect(t, s.cfg).EnsureStream(t.Context(), stream.Options{Replicas: replicas}))
	return s
}

// publish adds n events with payloads of a size. Some are late, span several counters, have none, or end as
// dead letters.
func (s *counted) publish(t testing.TB, n, size int) {
	t.Helper()
	all := make([]given, n)
	for i := range all {
		seq := len(s.want) + 1
		all[i] = event(seq, "doc", make([]byte, size))
		h := &all[i].h
		h.Sort = outbox.ByGap
		if seq%7 != 0 {
			h.Counter = outbox.Counter{Sequence: uint64(seq % 50), First: int64(seq), Span: 1 + uint32(seq%3),
				Late: seq%5 == 0}
		}
		if seq%11 == 0 {
			all[i].e.Payload, all[i].e.PayloadSize = nil, s.cfg.MaxPayload
		}
		s.want = append(s.want, &h.Counter)
	}
	c := door(t, s.cfg)
	mustPublish(t, c.Publisher(state(t, c).LastSeq), all)
	c.Close()
}

// intrude adds a message of somebody else.
func (s *counted) intrude(t testing.TB) {
	t.Helper()
	c := door(t, s.cfg)
	defer c.Close()
	nc, _ := natstest.Connect(t, s.url, nats.NoReconnect())
	_, err := nc.Request(c.Ingress()+"outbox.x", []byte("foreign"), time.Minute)
	must.Succeed(t, err)
	s.want = append(s.want, nil)
}

func (s *counted) remove(t testing.TB, seq uint64) {
	t.Helper()
	s.manage(t, func(js nats.JetStreamContext) error { return js.DeleteMsg(s.cfg.Stream, seq) })
	s.want[seq-1] = nil
}

// purge removes all messages below a sequence.
func (s *counted) purge(t testing.TB, below uint64) {
	t.Helper()
	s.manage(t, func(js nats.JetStreamContext) error {
		return js.PurgeStream(s.cfg.Stream, &nats.StreamPurgeRequest{Sequence: below})
	})
	clear(s.want[:below-1])
}

func (s *counted) manage(t testing.TB, do func(nats.JetStreamContext) error) {
	t.Helper()
	nc, _ := natstest.Connect(t, s.url, nats.NoReconnect())
	js, err := nc.JetStream(nats.MaxWait(time.Minute))
	must.Succeed(t, err)
	must.Succeed(t, do(js))
}

// recent is what has to be found.
func (s *counted) recent(upTo uint64, n int) (all []outbox.Counter) {
	for _, c := range slices.Backward(s.want[:upTo]) {
		if c != nil && len(all) < n {
			all = append(all, *c)
		}
	}
	return all
}

func (s *counted) check(t *testing.T, c *Conn, upTo uint64, n int) {
	t.Helper()
	got, err := c.Recent(t.Context(), 0, upTo, n)
	must.Succeed(t, err)
	if want := s.recent(upTo, n); !slices.Equal(got, want) {
		at := 0
		for at < min(len(got), len(want)) && got[at] == want[at] {
			at++
		}
		t.Errorf("the newest %d up to %d: %d messages, want %d; they differ from number %d on", n, upTo,
			len(got), len(want), at)
	}
}

func TestRecentCountersAreThoseOfOurNewestMessages(t *testing.T) {
	t.Parallel()
	s := countedStream(t, natstest.Server(t).URL(), "OUTBOX", 1)
	c := connect(t, s.cfg)
	s.check(t, c, 0, 10)
	s.publish(t, 2000, 10)
	s.intrude(t)
	s.intrude(t)
	s.publish(t, 1000, 10)
	s.intrude(t)
	last := uint64(len(s.want))
	numbers := []int{0, 1, 10, 1000, 2500, 3000, 1 << 20}
	numbers = numbers[:tier.Size(len(numbers)*8)/8]
	all := func() {
		t.Helper()
		for _, upTo := range []uint64{last, last - 1, 2003, 2002, 2001, 1500, 700, 3, 1} {
			for _, n := range numbers {
				s.check(t, c, upTo, n)
			}
		}
	}
	all()
	for _, seq := range []uint64{last - 1, last - 2, 2003, 1500, 1499, 701, 5} {
		s.remove(t, seq)
	}
	for seq := uint64(1000); seq < 1100; seq++ {
		s.remove(t, seq)
	}
	all()
	s.purge(t, 600)
	all()
	s.purge(t, last+1)
	all()
}

func TestRecentCountersWhileMessagesAreRemoved(t *testing.T) {
	t.Parallel()
	s := countedStream(t, natstest.Server(t).URL(), "OUTBOX", 1)
	s.publish(t, 5000, 10)
	before := s.recent(5000, 5000)
	c := connect(t, s.cfg)
	removed, stop := make(chan error, 1), make(chan struct{})
	go s.manage(t, func(js nats.JetStreamContext) error {
		var err error
		random := rand.New(rand.NewPCG(1, 2))
		for err == nil {
			select {
			case <-stop:
				removed <- nil
				return nil
			default:
			}
			seq := 1 + random.Uint64N(4999) // the last one stays
			if s.want[seq-1] != nil {
				err = js.DeleteMsg(s.cfg.Stream, seq)
				s.want[seq-1] = nil
			}
		}
		removed <- err
		return nil
	})
	var reads [][]outbox.Counter
	for range tier.Size(20) {
		got, err := c.Recent(t.Context(), 0, 5000, 5000)
		must.Succeed(t, err)
		reads = append(reads, got)
	}
	close(stop)
	must.Succeed(t, <-removed)
	left := s.recent(5000, 5000)
	for i, got := range reads {
		if !contains(before, got) || !contains(got, left) {
			t.Errorf("read %d has %d counters: not all of the %d that stay, or others than there were", i,
				len(got), len(left))
		}
	}
	if len(left) == len(before) {
		t.Error("nothing was removed")
	}
	s.check(t, c, 5000, 5000)
}

// contains tells whether part is what is left of all when some are taken away.
func contains(all, part []outbox.Counter) bool {
	for _, c := range all {
		if len(part) > 0 && part[0] == c {
			part = part[1:]
		}
	}
	return len(part) == 0
}

func TestRecentCountersEndWithTheirContext(t *testing.T) {
	t.Parallel()
	s := countedStream(t, natstest.Server(t).URL(), "OUTBOX", 1)
	s.publish(t, 3000, 10)
	c := connect(t, s.cfg)
	for _, after := range []time.Duration{0, time.Millisecond, 10 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		if _, err := c.Recent(ctx, 0, 3000, 3000); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %v: %v", after, err)
		}
		cancel()
	}
	s.check(t, c, 3000, 3000)
	c.Close()
	if got, err := c.Recent(t.Context(), 0, 3000, 3000); outbox.ClassOf(err) != outbox.Transient ||
		err == nil {
		t.Errorf("on a closed connection: %d counters, %v", len(got), err)
	}
}

// What docs/samples/nats-accounts.conf permits is enough, and without it the fault says so.
func TestRecentCountersNeedAConsumer(t *testing.T) {
	t.Parallel()
	base := []string{"_outflow.>", "$JS.API.INFO", "$JS.API.STREAM.INFO.OUTBOX",
		"$JS.API.STREAM.MSG.GET.OUTBOX"}
	for _, more := range [][]string{{"$JS.API.CONSUMER.CREATE.OUTBOX.>", "$JS.API.CONSUMER.MSG.NEXT.OUTBOX.>",
		"$JS.API.CONSUMER.DELETE.OUTBOX.>"}, nil} {
		server := natstest.Server(t, natsserver.Options{Tune: limitedUser(append(base, more...)...)})
		s := countedStream(t, userURL(server, "all"), "OUTBOX", 1)
		s.publish(t, 100, 10)
		s.cfg.URL = userURL(server, "some")
		c := connect(t, s.cfg)
		if more != nil {
			s.check(t, c, 100, 100)
			if err := c.Err(); err != nil {
				t.Error(err)
			}
			continue
		}
		_, err := c.Recent(t.Context(), 0, 100, 100)
		wantFault(t, err, outbox.Fatal, "nats_permission")
	}
}

// The stream may have one consumer only, and has it.
func TestRecentCountersComeFromTheLeaderWhereNoConsumerCanBeMade(t *testing.T) {
	t.Parallel()
	s := &counted{url: natstest.Server(t).URL()}
	s.cfg = config(s.url)
	s.cfg.DeadLetter, s.cfg.MaxPayload = true, 16<<10
	c := connect(t, s.cfg)
	must.Succeed(t, c.API().Ask(t.Context(), "STREAM.CREATE.OUTBOX", map[string]any{
		"name": "OUTBOX", "subjects": []string{"_outflow.a.>"}, "max_consumers": 1,
		"subject_transform": map[string]string{"src": "_outflow.*.>", "dest": ">"},
	}, &jsapi.Answer{}))
	durable(t, s.url, "only", 0)
	s.publish(t, 500, 10)
	s.intrude(t)
	s.remove(t, 300)
	for _, n := range []int{1, 100, 400, 1000} {
		s.check(t, c, 501, n)
	}
}

// Each time one of the replicas has just started and lags: what it does not have yet is not left out.
func TestRecentCountersFromReplicasThatLag(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves out what needs three servers")
	}
	t.Parallel()
	cluster := natstest.Cluster(t, 3)
	s := countedStream(t, cluster.URLs(), "OUTBOX", 3)
	s.publish(t, 1000, 10)
	for range 3 {
		leader, err := cluster.WaitLeader(s.cfg.Stream, 3*time.Minute)
		must.Succeed(t, err)
		lags := (leader + 1) % 3
		cluster.Stop(lags)
		must.Succeed(t, cluster.WaitReady(3*time.Minute)) // it may have led the cluster
		s.cfg.URL = cluster.URL(leader)
		s.publish(t, tier.Size(3000), 1000)
		must.Succeed(t, cluster.Start(lags))
		c := connect(t, s.cfg)
		for range tier.Size(10) {
			s.check(t, c, uint64(len(s.want)), 4000)
		}
		c.Close()
		must.Succeed(t, cluster.WaitReady(3*time.Minute))
	}
}

// What reads the newest messages knows a cut: gap mode does not count it, a start sees that it is one.
func TestACutAmongTheNewestMessagesIsKnown(t *testing.T) {
	t.Parallel()
	s := countedStream(t, natstest.Server(t).URL(), "OUTBOX", 1)
	c := connect(t, s.cfg)
	s.publish(t, 5, 10)
	want := outbox.Cut{SystemID: 7, Timeline: 1, LSN: 0x3000, Epoch: 2, Owner: 2}
	d := door(t, s.cfg)
	nc, _ := natstest.Connect(t, s.url, nats.NoReconnect())
	_, err := nc.RequestMsg(&nats.Msg{Subject: d.Ingress() + outbox.CutSubject,
		Header: nats.Header{outbox.HeaderCut: {want.String()}}}, time.Minute)
	must.Succeed(t, err)
	d.Close()
	s.want = append(s.want, nil)
	st := state(t, c)
	if st.NewestSeq != 6 || st.Newest != nil || st.Cut == nil || *st.Cut != want {
		t.Errorf("the newest message is %d, header %v, cut %v", st.NewestSeq, st.Newest, st.Cut)
	}
	s.publish(t, 2, 10)
	s.check(t, c, 8, 7)
	stored, err := c.Stored(t.Context(), 0, 8, false)
	must.Succeed(t, err)
	for i, m := range stored {
		if (m.Cut != nil) != (i == 5) || (m.Header != nil) == (i == 5) {
			t.Errorf("message %d: header %v, cut %v", m.Seq, m.Header, m.Cut)
		}
	}
	if st := state(t, c); st.Cut != nil || st.Newest == nil || len(stored) != 8 {
		t.Errorf("%d messages, the newest has header %v, cut %v", len(stored), st.Newest, st.Cut)
	}
}
