package sink

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestWhatIsPublishedIsInTheStreamInOrder(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := door(t, config(s.URL()))
	all := edits(t, 3000)
	mustPublish(t, c.Publisher(0), all)
	got := readAll(t, s.URL(), "OUTBOX")
	same(t, got, all)
	if want := "outbox.friendsforever"; got[7].Subject != want {
		t.Errorf("subject %q, want %q", got[7].Subject, want)
	}
	if st := state(t, c); st.LastSeq != 3000 || st.NewestSeq != 3000 || st.Newest == nil ||
		*st.Newest != all[2999].h {
		t.Errorf("state %+v", st)
	}
}

// Going on from what is there: the first message of the next session expects the last of this one.
func TestASessionGoesOnBehindTheLastMessage(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	all := edits(t, 200)
	mustPublish(t, door(t, config(s.URL())).Publisher(0), all[:120])
	mustPublish(t, door(t, config(s.URL())).Publisher(120), all[120:])
	same(t, readAll(t, s.URL(), "OUTBOX"), all)
}

// dropping loses the message of one sequence on its way.
type dropping struct {
	writer
	seq uint64
}

func (d dropping) send(m *message, reply []byte) {
	if m.seq != d.seq {
		d.writer.send(m, reply)
	}
}

func TestNothingIsStoredBehindALostMessage(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	all := edits(t, 300)
	for _, lost := range []uint64{1, 50, 77, 100} {
		cfg := config(s.URL())
		cfg.Stream = "LOST" + string(rune('A'+lost%26))
		c := door(t, cfg)
		p := c.Publisher(0)
		p.out = dropping{p.out, lost}
		wantFault(t, publish(t.Context(), p, all), outbox.Transient, "wrong_last_sequence")
		if p.Acked() >= lost {
			t.Errorf("acknowledged %d of a stream without %d", p.Acked(), lost)
		}
		same(t, readAll(t, s.URL(), cfg.Stream), all[:lost-1])
	}
}

// A stranger's message takes the place of one of ours, and the next one of ours would be stored behind it:
// the session must end with a gap that needs no recheck.
func TestAStrangersMessageEndsTheSession(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c, _ := watched(t, config(s.URL()))
	all := edits(t, 200)
	mustPublish(t, c.Publisher(0), all[:100])
	nc, _ := natstest.Connect(t, s.URL(), nats.NoReconnect())
	if _, err := nc.Request("outbox.friendsforever", []byte("foreign"), time.Second); err == nil {
		t.Error("the public subject has a listener")
	}
	m, err := nc.Request(c.Ingress()+"outbox.x", []byte("foreign"), time.Minute)
	if err != nil || strings.Contains(string(m.Data), "error") {
		t.Fatal(err, m)
	}
	select {
	case <-c.Lost():
	case <-time.After(3 * time.Minute):
		t.Fatal("the stranger was not noticed")
	}
	wantFault(t, c.Err(), outbox.Gap, "foreign_message")
	if !outbox.FaultOf(c.Err()).Observed {
		t.Error("it needs a recheck, which would not show it")
	}
	if st := state(t, door(t, config(s.URL()))); st.LastSeq != 101 || st.Newest != nil {
		t.Errorf("state %+v: the newest message has no header of ours", st)
	}
}

// Two that publish the same, as two owners of one slot would: each message is there once, in order.
func TestTwoPublishersOfTheSameStoreItOnce(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	all := edits(t, 4000)
	door(t, config(s.URL()))
	errs := make(chan error, 2)
	for range 2 {
		c := door(t, config(s.URL()))
		p := c.Publisher(0)
		go func() { errs <- publish(t.Context(), p, all) }()
	}
	failed := 0
	for range 2 {
		if err := <-errs; err != nil {
			wantFault(t, err, outbox.Transient, "wrong_last_sequence")
			failed++
		}
	}
	if failed == 0 {
		t.Error("nobody was refused")
	}
	got := readAll(t, s.URL(), "OUTBOX")
	same(t, got, all[:len(got)])
}

func TestPausedServerIsUnknown(t *testing.T) {
	t.Parallel()
	s := natstest.Process(t)
	c := door(t, config(s.URL()))
	all := edits(t, 400)
	p := c.Publisher(0)
	mustPublish(t, p, all[:100])
	must.Succeed(t, s.Pause())
	for c.nc.FlushTimeout(100*time.Millisecond) == nil { // until the signal has its effect
	}
	for i := range all[100:] {
		// into the socket, or the buffer: it does not block
		must.Succeed(t, p.Publish(&all[100+i].e, &all[100+i].h))
	}
	now := time.Now()
	p.Flush(now)
	for end := now.Add(ackTimeout); now.Before(end); now = now.Add(time.Second) {
		must.Succeed(t, p.Check(now))
	}
	wantFault(t, p.Check(now), outbox.Transient, "ack_timeout")
	c.Close()
	must.Succeed(t, s.Resume())
	got := readAll(t, s.URL(), "OUTBOX") // how many of them is open, that they are a prefix is not
	if len(got) < 100 {
		t.Errorf("%d messages, 100 were acknowledged", len(got))
	}
	same(t, got, all[:len(got)])
}

func TestAKilledServerLosesNoAcknowledgedMessage(t *testing.T) {
	t.Parallel()
	s := natstest.Process(t)
	c := door(t, config(s.URL()))
	all := edits(t, 5000)
	p := c.Publisher(0)
	mustPublish(t, p, all[:1000])
	must.Succeed(t, s.Kill())
	<-c.Lost()
	err := publish(t.Context(), p, all[1000:])
	wantFault(t, err, outbox.Transient, "nats_lost")
	must.Succeed(t, s.Start())
	c = door(t, config(s.URL()))
	st := state(t, c)
	if st.LastSeq < p.Acked() || p.Acked() < 1000 {
		t.Fatalf("%d acknowledged, last sequence %d", p.Acked(), st.LastSeq)
	}
	mustPublish(t, c.Publisher(st.LastSeq), all[st.LastSeq:])
	same(t, readAll(t, s.URL(), "OUTBOX"), all)
}

func TestStreamAtItsLimit(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := connect(t, config(s.URL()))
	var answer jsapi.Answer
	cfg := map[string]any{"name": "OUTBOX", "subjects": []string{"_outflow.x.>"},
		"subject_transform": map[string]string{"src": "_outflow.*.>", "dest": ">"},
		"retention":         "limits", "storage": "memory", "discard": "new", "max_msgs": 120,
		"num_replicas": 1}
	must.Succeed(t, c.api.Ask(t.Context(), "STREAM.CREATE.OUTBOX", cfg, &answer))
	must.Succeed(t, c.CheckStream(t.Context()))
	all := edits(t, 300)
	// the one that hit the limit did not ask
	wantFault(t, publish(t.Context(), c.Publisher(0), all), outbox.Transient, "wrong_last_sequence")
	c = door(t, config(s.URL()))
	// the first one does
	wantFault(t, publish(t.Context(), c.Publisher(120), all[120:]), outbox.Transient, "stream_full")
	same(t, readAll(t, s.URL(), "OUTBOX"), all[:120])
}

func TestStreamThatGoesAway(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := door(t, config(s.URL()))
	all := edits(t, 10)
	p := c.Publisher(0)
	mustPublish(t, p, all[:5])
	must.Succeed(t, c.api.Ask(t.Context(), "STREAM.DELETE.OUTBOX", nil, &jsapi.Answer{}))
	wantFault(t, publish(t.Context(), p, all[5:]), outbox.Transient, "no_responders")
}

func TestPublisherWithoutAStream(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := connect(t, config(s.URL()))
	must.Succeed(t, c.CheckStream(t.Context()))
	wantFault(t, publish(t.Context(), c.Publisher(0), edits(t, 1)), outbox.Fatal, "stream_missing")
}

func TestAMissingPermissionIsNamed(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: limitedUser("_INBOX.>", "$JS.API.>")})
	door(t, config(userURL(s, "all")))
	c := connect(t, config(userURL(s, "some")))
	must.Succeed(t, c.CheckStream(t.Context()))
	wantFault(t, publish(t.Context(), c.Publisher(0), edits(t, 10)), outbox.Fatal, "nats_permission")
	<-c.Lost()
	wantFault(t, c.Err(), outbox.Fatal, "nats_permission")
}

func TestDeadLettersKeepTheirPlace(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	cfg := config(s.URL())
	cfg.DeadLetter, cfg.MaxPayload, cfg.MsgID = true, 4096, true
	c := door(t, cfg)
	all := edits(t, 60)
	all[20] = event(20, "doc", make([]byte, 5000))
	all[59].e.Null |= relay.NullDoc
	p := c.Publisher(0)
	mustPublish(t, p, all)
	got := readAll(t, s.URL(), "OUTBOX")
	for _, i := range []int{20, 59} {
		if got[i].Subject != "OUTBOX.dead_letter" || !strings.Contains(got[i].Header, HeaderDeadLetter) ||
			!strings.Contains(got[i].Header, "Outflow: "+all[i].h.String()) {
			t.Errorf("message %d: %+v", i+1, got[i])
		}
		all[i].e.Payload = []byte(got[i].Data)
	}
	same(t, got, all)
}

func TestAcknowledgementsThatProveNothing(t *testing.T) {
	t.Parallel()
	answer := func(body string) *nats.Msg { return &nats.Msg{Data: []byte(body)} }
	for _, test := range []struct {
		m     *nats.Msg
		class outbox.Class
		code  string
	}{
		{&nats.Msg{Header: nats.Header{"Status": {"503"}}}, outbox.Transient, "no_responders"},
		{answer(``), outbox.Transient, "unexpected_ack"},
		{answer(`{"stream":"OUTBOX","seq":8}`), outbox.Transient, "unexpected_ack"},
		{answer(`{"stream":"OTHER","seq":7}`), outbox.Fatal, "wrong_stream"},
		{answer(`{"stream":"OUTBOX","seq":7,"duplicate":true}`), outbox.Transient, "duplicate_ack"},
		{answer(
			`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 3"},"stream":"OUTBOX","seq":0}`), outbox.Transient, "wrong_last_sequence"},
		{answer(`{"error":{"code":400,"err_code":10164}}`), outbox.Transient, "wrong_last_sequence"},
		{answer(`{"error":{"code":429,"err_code":10167}}`), outbox.Transient, "throttled"},
		{answer(`{"error":{"code":503,"err_code":10077}}`), outbox.Transient, "stream_full"},
		{answer(`{"error":{"code":500,"err_code":10023}}`), outbox.Transient, "no_storage"},
		{answer(`{"error":{"code":400,"err_code":10002}}`), outbox.Transient, "account_full"},
		{answer(`{"error":{"code":400,"err_code":10054}}`), outbox.Fatal, "too_large"},
		{answer(`{"error":{"code":400,"err_code":10097}}`), outbox.Fatal, "too_large"},
		{answer(`{"error":{"code":400,"err_code":10060}}`), outbox.Fatal, "wrong_stream"},
		{answer(`{"error":{"code":400,"err_code":10109}}`), outbox.Fatal, "stream_sealed"},
		{answer(`{"error":{"code":500,"err_code":1}}`), outbox.Transient, "refused"},
	} {
		wantFault(t, checkAck(test.m, "OUTBOX", 7), test.class, test.code)
	}
	if f := checkAck(answer(`{"stream":"OUTBOX","seq":7,"domain":"hub"}`), "OUTBOX", 7); f != nil {
		t.Error(f)
	}
}
