package sink

import (
	"bytes"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
)

// library is nats.go's own way to publish.
type library struct{ nc *nats.Conn }

func (l library) send(m *message, reply []byte) {
	h := nats.Header{}
	for line := range bytes.SplitSeq(m.header[len(headerStart):], []byte("\r\n")) {
		if name, value, ok := bytes.Cut(line, []byte(": ")); ok {
			h[string(name)] = []string{string(value)}
		}
	}
	err := l.nc.PublishMsg(&nats.Msg{Subject: string(m.subject), Reply: string(reply), Header: h,
		Data: m.data})
	if err != nil {
		panic(err)
	}
}

func (l library) flush(bool) {}

// Frames store what nats.go would store, but for the order of the headers.
func TestFramesStoreWhatTheLibraryStores(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	var all []given
	for i, doc := range []string{"doc", "", "a b", "ünï.*>", strings.Repeat("x", 5000), "traceparent"} {
		g := event(i, doc, []byte(strings.Repeat("payload\r\n", i)))
		g.e.Extra = []string{[]string{"", " edit ", "a\r\nb: c", "\t", "é", "x: y"}[i], "00-ab-cd-01"}
		all = append(all, g)
	}
	all[5].e.SetExtraNull(1)
	streams := map[string][]string{}
	for _, stream := range []string{"FRAMES", "LIBRARY"} {
		cfg := config(s.URL())
		cfg.Stream, cfg.MsgID, cfg.Resolve = stream, true, testResolve
		cfg.Headers = []MappedHeader{{"traceparent", "trace"}, {"Event-Type", "type"}}
		c := door(t, cfg)
		p := c.Publisher(0)
		if stream == "LIBRARY" {
			p.out = library{c.nc}
		}
		mustPublish(t, p, all)
		for seq := range all {
			var answer struct {
				jsapi.Answer
				Message struct {
					Subject string `json:"subject"`
					Header  []byte `json:"hdrs"`
					Data    []byte `json:"data"`
				} `json:"message"`
			}
			if err := c.api.Ask(t.Context(), "STREAM.MSG.GET."+stream,
				jsapi.MessageRequest{Seq: uint64(seq + 1)}, &answer); err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(string(answer.Message.Header), "\r\n")
			if slices.Sort(lines[1 : len(lines)-2]); stream == "FRAMES" &&
				strings.Join(lines, "\r\n") != string(answer.Message.Header) {
				t.Errorf("headers not in the order of their names: %q", answer.Message.Header)
			}
			streams[stream] = append(append(append(streams[stream], answer.Message.Subject), lines...),
				string(answer.Message.Data))
		}
	}
	if !slices.Equal(streams["FRAMES"], streams["LIBRARY"]) {
		t.Errorf("frames  %q\nlibrary %q", streams["FRAMES"], streams["LIBRARY"])
	}
}

func TestFramesWriteErrorEndsTheSession(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	theirs.Close()
	lost := make(chan struct{})
	errs := make(chan error, 1)
	f := newFrameWriter(&lockedConn{Conn: ours, raw: ours}, lost, func(err error) { errs <- err })
	g := event(0, "doc", []byte("x"))
	m := message{subject: []byte("a"), header: []byte("NATS/1.0\r\n\r\n"), data: g.e.Payload}
	f.send(&m, nil)
	f.flush(false)
	if err := <-errs; err == nil {
		t.Error("no error")
	}
}

// A write of nats.go's and one of ours never mix, and a failed one closes the connection.
func TestWritesToTheConnectionNeverMix(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	w := &lockedConn{Conn: ours, raw: ours}
	done := make(chan error, 2)
	for _, text := range []string{"aaaaaaaaaa", "bbbbbbbbbb"} {
		go func() { _, err := w.Write([]byte(text)); done <- err }()
	}
	b := make([]byte, 20)
	for i := range b { // a byte at a time: a pipe takes what it gets
		if _, err := theirs.Read(b[i : i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if got := string(b); got != "aaaaaaaaaabbbbbbbbbb" && got != "bbbbbbbbbbaaaaaaaaaa" {
		t.Errorf("mixed: %s", got)
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	theirs.Close()
	if _, err := w.Write([]byte("x")); err == nil {
		t.Error("written to nobody")
	}
	if err := ours.SetDeadline(time.Now()); !errors.Is(err, net.ErrClosed) && err == nil {
		t.Error("still open after a failed write")
	}
}

// A secret of one letter hides none of the text: what is hidden would tell it.
func TestScrubHidesNoWords(t *testing.T) {
	t.Parallel()
	const text = "dial tcp: lookup pp: no such host"
	if got := scrub(errors.New(text), Config{URL: "nats://u:p@pp", Token: "p"}).Error(); got != text {
		t.Error(got)
	}
}

func TestNoErrorOfNATSShowsASecret(t *testing.T) {
	t.Parallel()
	cfg := Config{URL: "nats://tok3n@a:1,nats://me:pa%20ss@b:2", Password: "hush", Token: "quiet"}
	cause := errors.New(`parse "nats://x:y z@h": bad; tok3n me:pa%20ss pa ss hush quiet; ws://q@r`)
	err := scrub(cause, cfg)
	for _, secret := range []string{"y z", "tok3n", "pa%20ss", "pa ss", "hush", "quiet", "q@"} {
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%s is in %q", secret, err)
		}
	}
	if !errors.Is(err, cause) || scrub(nil, cfg) != nil || outbox.ClassOf(err) != outbox.Transient {
		t.Error("the cause is lost")
	}
}

// TestAClosedConnectionIsReset: the kernel sends nothing more of it then.
func TestAClosedConnectionIsReset(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer listener.Close()
	d := &dialer{ctx: t.Context(), timeout: time.Minute}
	conn, err := d.Dial("tcp", listener.Addr().String())
	must.Succeed(t, err)
	server, err := listener.Accept()
	must.Succeed(t, err)
	defer server.Close()
	_, err = conn.Write(make([]byte, 1<<10))
	must.Succeed(t, err)
	d.close()
	if n, err := io.Copy(io.Discard, server); err == nil {
		t.Errorf("%d bytes and an orderly end", n)
	}
}
