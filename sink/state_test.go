package sink

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

func TestStateOfAnEmptyStream(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := door(t, config(s.URL()))
	st := state(t, c)
	if !st.Exists || st.Created.IsZero() || st.LastSeq != 0 || st.Messages != 0 || st.NewestSeq != 0 ||
		st.Newest != nil || st.Replicated {
		t.Errorf("new: %+v", st)
	}
	created := st.Created
	mustPublish(t, c.Publisher(0), edits(t, 10))
	admin(t, c, "STREAM.PURGE.OUTBOX", nil)
	st = state(t, c)
	if st.LastSeq != 10 || st.Messages != 0 || st.NewestSeq != 0 || st.Newest != nil ||
		st.Created != created {
		t.Errorf("purged: %+v", st)
	}
}

func admin(t *testing.T, c *Conn, method string, request any) {
	t.Helper()
	must.Succeed(t, c.api.Ask(t.Context(), method, request, &jsapi.Answer{}))
}

// The broker's clock is read between the question and the answer: on one machine it is ours.
func TestStateSaysTheTime(t *testing.T) {
	t.Parallel()
	c := door(t, config(natstest.Server(t).URL()))
	before := time.Now()
	s := state(t, c)
	if after := time.Now(); s.Now.Before(before.Round(0)) || s.Now.After(after) {
		t.Errorf("the broker's clock says %v, between %v and %v", s.Now, before, after)
	}
}

func TestStateWhereMessagesAreDeleted(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := door(t, config(s.URL()))
	all := edits(t, 40)
	mustPublish(t, c.Publisher(0), all)
	remove := func(seqs ...uint64) {
		for _, seq := range seqs {
			admin(t, c, "STREAM.MSG.DELETE.OUTBOX", map[string]any{"seq": seq})
		}
	}
	want := func(newest uint64) {
		t.Helper()
		st := state(t, c)
		if st.LastSeq != 40 || st.NewestSeq != newest || newest > 0 &&
			(st.Newest == nil || *st.Newest != all[newest-1].h) {
			t.Errorf("newest should be %d: %+v", newest, st)
		}
	}
	remove(40, 39, 38)
	want(37)
	remove(30, 20)
	want(37)
	remove(1, 2)
	want(37)
	for seq := uint64(3); seq < 38; seq++ {
		if seq != 20 && seq != 30 && seq != 11 {
			remove(seq)
		}
	}
	want(11)
	remove(11)
	want(0)
}

// lastBlock is the file with the newest messages.
func lastBlock(t *testing.T, dir string) string {
	t.Helper()
	blocks, err := filepath.Glob(filepath.Join(dir, "jetstream", "*", "streams", "OUTBOX", "msgs", "*.blk"))
	if err != nil || len(blocks) == 0 {
		t.Fatalf("no block files: %v", err)
	}
	slices.SortFunc(blocks, func(a, b string) int { return len(a) - len(b) })
	return blocks[len(blocks)-1]
}

func cutBy(t *testing.T, file string, part float64) {
	t.Helper()
	fi, err := os.Stat(file)
	must.Succeed(t, err)
	must.Succeed(t, os.Truncate(file, int64(float64(fi.Size())*(1-part))))
}

// The server was killed and the file cut before the index was written: the count goes back, and sequences
// will be used again.
func TestStateOfAStreamThatLostItsEnd(t *testing.T) {
	t.Parallel()
	s := natstest.Process(t)
	all := edits(t, 1000)
	c := door(t, config(s.URL()))
	mustPublish(t, c.Publisher(0), all)
	must.Succeed(t, s.Kill())
	cutBy(t, lastBlock(t, s.Dir()), 0.3)
	must.Succeed(t, s.Start())
	c = door(t, config(s.URL()))
	st := state(t, c)
	n := st.LastSeq
	if n == 0 || n >= 1000 || st.NewestSeq != n || st.Newest == nil || *st.Newest != all[n-1].h {
		t.Fatalf("state %+v", st)
	}
	mustPublish(t, c.Publisher(n), all[n:])
	same(t, readAll(t, s.URL(), "OUTBOX"), all)
}

// durable makes a consumer that has taken and acknowledged n messages.
func durable(t *testing.T, url, name string, n int) {
	t.Helper()
	nc, _ := natstest.Connect(t, url, nats.NoReconnect())
	js, err := nc.JetStream(nats.MaxWait(20 * time.Second))
	must.Succeed(t, err)
	sub, err := js.PullSubscribe("", name, nats.BindStream("OUTBOX"))
	must.Succeed(t, err)
	for n > 0 {
		msgs, err := sub.Fetch(min(n, 100), nats.MaxWait(time.Minute))
		must.Succeed(t, err)
		for _, m := range msgs {
			must.Succeed(t, m.AckSync())
		}
		n -= len(msgs)
	}
}

// The server stopped cleanly and the file was cut behind its index: the count stays, the messages are gone.
func TestStateOfAStreamWithAHole(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	all := edits(t, 1000)
	first := natstest.Server(t, natsserver.Options{Dir: dir})
	c := door(t, config(first.URL()))
	mustPublish(t, c.Publisher(0), all)
	c.Close()
	first.Shutdown()
	cutBy(t, lastBlock(t, dir), 0.3)

	s := natstest.Server(t, natsserver.Options{Dir: dir})
	c = door(t, config(s.URL()))
	st := state(t, c)
	n := st.NewestSeq
	if st.LastSeq != 1000 || n == 0 || n >= 1000 || st.Newest == nil || *st.Newest != all[n-1].h {
		t.Fatalf("state %+v", st)
	}
	got := readAll(t, s.URL(), "OUTBOX")
	if got[n-1].Data == "" || slices.ContainsFunc(got[n:], func(m stored) bool { return m.Data != "" }) {
		t.Errorf("the newest that can be read is not %d", n)
	}
	p := c.Publisher(st.LastSeq)
	p.AfterLoss(n + 1)
	mustPublish(t, p, all[n:]) // behind the hole
	lost := fmt.Sprintf("%s: %d\n", outbox.HeaderLost, n+1)
	for i, m := range readAll(t, s.URL(), "OUTBOX")[1000:] {
		if got := strings.Contains(m.Header+"\n", lost); got != (i == 0) {
			t.Errorf("message %d says that the broker lost messages from %d: %t", 1001+i, n+1, got)
		}
	}
	if st := state(t, c); st.LastSeq != 1000+1000-n || st.NewestSeq != st.LastSeq ||
		*st.Newest != all[999].h {
		t.Errorf("afterwards %+v", st)
	}
}

func TestStateHonoursItsContext(t *testing.T) {
	t.Parallel()
	c := door(t, config(natstest.Server(t).URL()))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.State(ctx); err == nil || outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("err %v", err)
	}
}

// A user with the permissions that the facts call least privilege may not list consumers; that ends nothing.
func TestStateWithLeastPrivilege(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: limitedUser("_outflow.>", "$JS.API.INFO",
		"$JS.API.STREAM.INFO.OUTBOX", "$JS.API.STREAM.MSG.GET.OUTBOX")})
	all := edits(t, 20)
	mustPublish(t, door(t, config(userURL(s, "all"))).Publisher(0), all[:10])
	durable(t, userURL(s, "all"), "ahead", 10)
	c := connect(t, config(userURL(s, "some")))
	must.Succeed(t, c.CheckStream(t.Context()))
	for range 2 {
		if st := state(t, c); st.NewestSeq != 10 || len(st.Durables) > 0 {
			t.Errorf("state %+v", st)
		}
	}
	mustPublish(t, c.Publisher(10), all[10:])
	if err := c.EnsureStream(t.Context(), stream.Options{}); err != nil {
		t.Error(err)
	}
	cfg := config(userURL(s, "some"))
	cfg.Stream = "OTHER"
	wantFault(t, connect(t, cfg).EnsureStream(t.Context(), stream.Options{}), outbox.Fatal, "nats_permission")
}

func TestWithoutAQuorumAReplicatedStreamHasNoState(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves out what needs three servers")
	}
	t.Parallel()
	cluster := natstest.Cluster(t, 3)
	c := connect(t, config(cluster.URLs()))
	must.Succeed(t, c.EnsureStream(t.Context(), stream.Options{Replicas: 3}))
	all := edits(t, 2000)
	mustPublish(t, c.Publisher(0), all)
	if st := state(t, c); !st.Replicated || st.LastSeq != 2000 || *st.Newest != all[1999].h {
		t.Errorf("state %+v", st)
	}
	same(t, readFrom(t, c.nc, "OUTBOX"), all)
	// Without a quorum nobody leads, and what a follower says does not count.
	cluster.Stop(1)
	cluster.Stop(2)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	lone, err := Connect(ctx, config(cluster.URL(0)))
	if err != nil {
		if outbox.ClassOf(err) != outbox.Transient {
			t.Error(err)
		}
		return
	}
	defer lone.Close()
	if st, err := lone.State(ctx); err == nil && st.LastSeq != 2000 {
		t.Errorf("state without a leader: %+v", st)
	} else if outbox.ClassOf(err) != outbox.Transient {
		t.Error(err)
	}
}

// answering gives a connection to a JetStream that gives the answers, in turn, for each method; the last one
// again and again.
func answering(t *testing.T, answers map[string][]string) *Conn {
	t.Helper()
	s := natstest.Server(t)
	c := connect(t, config(s.URL()))
	c.use("fake")
	responder := connect(t, config(s.URL()))
	for method, list := range answers {
		i := 0
		_, err := responder.nc.Subscribe("fake."+method+".OUTBOX", func(m *nats.Msg) {
			if err := m.Respond([]byte(list[i])); err != nil {
				t.Error(err)
			}
			i = min(i+1, len(list)-1)
		})
		must.Succeed(t, err)
	}
	must.Succeed(t, responder.nc.Flush())
	return c
}

func TestAnswersThatDontCount(t *testing.T) {
	t.Parallel()
	const (
		none    = `{"error":{"code":404,"err_code":10037,"description":"no message found"}}`
		message = `{"message":{"subject":"a","seq":7,"hdrs":""}}`
	)
	for name, test := range map[string]struct {
		info, get []string
		code      string // "": no class of its own, transient
	}{
		"no leader":   {[]string{`{"config":{},"cluster":{"name":"c"}}`}, nil, "no_leader"},
		"stale empty": {[]string{`{"config":{},"state":{}}`}, []string{message}, "stream_moved"},
		"stale purged": {[]string{`{"config":{},"state":{"last_seq":6,"first_seq":7}}`},
			[]string{none, message}, "stream_moved"},
		"being emptied": {[]string{`{"config":{},"state":{"last_seq":6,"first_seq":1,"messages":6}}`,
			`{"config":{},"state":{"last_seq":6,"first_seq":7}}`}, []string{none}, "stream_moved"},
		"being written": {[]string{`{"config":{},"state":{"last_seq":6,"first_seq":1,"messages":6}}`,
			`{"config":{},"state":{"last_seq":7,"first_seq":1,"messages":7}}`}, []string{none},
			"stream_moved"},
		"unavailable": {[]string{`{"error":{"code":503,"err_code":10008}}`}, nil, ""},
		"no JSON":     {[]string{`nonsense`}, nil, ""},
		"no message":  {[]string{`{"config":{},"state":{"last_seq":6,"messages":6}}`}, []string{`{}`}, ""},
	} {
		c := answering(t, map[string][]string{"STREAM.INFO": test.info,
			"STREAM.MSG.GET": append(test.get, none)})
		st, err := c.State(t.Context())
		if err == nil || st.Exists {
			t.Errorf("%s: taken: %+v", name, st)
			continue
		}
		if test.code == "stream_moved" && st.Open == "" {
			t.Errorf("%s: not known to be open: %v", name, err)
		}
		if test.code != "" {
			wantFault(t, err, outbox.Transient, test.code)
		} else if outbox.ClassOf(err) != outbox.Transient {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDurablesAtTheEnd(t *testing.T) {
	t.Parallel()
	c := answering(t, map[string][]string{
		"STREAM.INFO":    {`{"config":{},"state":{"last_seq":6,"first_seq":7,"consumer_count":4}}`},
		"STREAM.MSG.GET": {`{"error":{"code":404,"err_code":10037}}`},
		"CONSUMER.LIST": {
			`{"total":4,"consumers":[
				{"name":"z","config":{"durable_name":"z"},"ack_floor":{"stream_seq":7},"delivered":{"stream_seq":7}},
				{"name":"b","config":{"durable_name":"b"},"ack_floor":{"stream_seq":5},"delivered":{"stream_seq":5}}]}`,
			`{"total":4,"consumers":[
				{"name":"e","config":{},"ack_floor":{"stream_seq":9},"delivered":{"stream_seq":9}},
				{"name":"a","config":{"durable_name":"a"},"ack_floor":{"stream_seq":0},"delivered":{"stream_seq":6}}]}`,
		},
	})
	whole := state(t, c)
	if !slices.Equal(whole.Durables, []string{"a", "z"}) {
		t.Errorf("got %q", whole.Durables)
	}
	tail, err := c.Tail(t.Context())
	whole.Durables = nil
	if err != nil || !reflect.DeepEqual(tail, whole) {
		t.Errorf("tail %+v, %v", tail, err)
	}
}

// Somebody else's consumer whose leader is away keeps nobody from publishing.
func TestStateWithoutTheConsumers(t *testing.T) {
	t.Parallel()
	c := answering(t, map[string][]string{
		"STREAM.INFO":    {`{"config":{},"state":{"last_seq":6,"first_seq":7,"consumer_count":1}}`},
		"STREAM.MSG.GET": {`{"error":{"code":404,"err_code":10037}}`},
	})
	silent := connect(t, config(c.nc.ConnectedUrl()))
	if _, err := silent.nc.Subscribe("fake.CONSUMER.LIST.OUTBOX", func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
	must.Succeed(t, silent.nc.Flush())
	// The list has a bound of its own, and doesn't use up the whole of the time that a start has.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if st, err := c.State(ctx); err != nil || ctx.Err() != nil || !st.Exists || st.LastSeq != 6 {
		t.Errorf("%+v, %v, %v", st, err, ctx.Err())
	}
}

// TestAStreamThatIsMissingInAClusterIsRecheckedAsOneOfSeveral: how many replicas it had nobody says, and
// whoever answers may have just become the leader.
func TestAStreamThatIsMissingInAClusterIsRecheckedAsOneOfSeveral(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves out what needs three servers")
	}
	t.Parallel()
	if st := state(t, connect(t, config(natstest.Server(t).URL()))); st.Exists || st.Replicated {
		t.Errorf("at one server: %+v", st)
	}
	if st := state(t, connect(t, config(natstest.Cluster(t, 3).URLs()))); st.Exists || !st.Replicated {
		t.Errorf("in a cluster: %+v", st)
	}
}
