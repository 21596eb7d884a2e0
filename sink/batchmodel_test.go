package sink

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// onWire is a server that takes frames as they come, and stores single messages at once and batches when they
// end.
type onWire struct {
	t       *testing.T
	buf     []byte
	stored  []string // data
	batch   []string
	batchID string
	acks    []uint64 // that it has still to give
}

func (w *onWire) send(m *message, reply []byte) { w.buf = appendFrame(w.buf, m, reply) }
func (w *onWire) flush(bool) {
	for len(w.buf) > 0 {
		line, rest, _ := bytes.Cut(w.buf, []byte("\r\n"))
		f := strings.Fields(string(line))
		var head, all int
		fmt.Sscan(f[len(f)-2]+" "+f[len(f)-1], &head, &all)
		header, data := string(rest[:head]), string(rest[head:all])
		w.buf = rest[all+2:]
		reply := ""
		if len(f) == 5 {
			reply = f[2]
		}
		w.take(header, data, reply)
	}
}

func (w *onWire) take(header, data, reply string) {
	lines := map[string]string{}
	if !strings.HasPrefix(header, headerStart) || !strings.HasSuffix(header, "\r\n\r\n") {
		w.t.Fatalf("header %q", header)
	}
	for _, l := range strings.Split(strings.TrimSuffix(header, "\r\n\r\n"), "\r\n")[1:] {
		k, v, ok := strings.Cut(l, ": ")
		if _, twice := lines[k]; twice || !ok {
			w.t.Fatalf("header %q", header)
		}
		lines[k] = v
	}
	due := len(w.stored)
	id := lines[headerBatchID]
	if id == "" {
		if len(w.batch) > 0 {
			w.t.Fatalf("a single message in an open batch: %q", header)
		}
		if lines[headerExpected] != strconv.Itoa(due) {
			w.t.Fatalf("expected %s, at %d", lines[headerExpected], due)
		}
		w.stored = append(w.stored, data)
	} else {
		w.batch = append(w.batch, data)
		n := len(w.batch)
		size := 0
		for _, d := range w.batch {
			size += len(d)
		}
		switch {
		case lines[headerBatchSeq] != strconv.Itoa(n), n > 1 && id != w.batchID, n > maxBatch,
			size > maxBatchBytes+maxBatched,
			(n == 1) != (lines[headerExpected] == strconv.Itoa(due)), n > 1 && lines[headerExpected] != "":
			w.t.Fatalf("number %d of batch %s, behind %d: %q", n, w.batchID, due, header)
		}
		w.batchID = id
		if lines[headerBatchCommit] == "" {
			if n == 1 && !strings.HasSuffix(reply, replyOpened) || n > 1 && reply != "" {
				w.t.Fatalf("reply %q", reply)
			}
			return
		}
		if reply == "" {
			w.t.Fatal("an end without a reply")
		}
		w.stored, w.batch = append(w.stored, w.batch...), nil
	}
	if reply != "" {
		seq, err := strconv.ParseUint(reply[strings.LastIndex(reply, ".")+1:], 10, 64)
		if err != nil || seq != uint64(len(w.stored)) {
			w.t.Fatalf("reply %q for %d", reply, len(w.stored))
		}
		w.acks = append(w.acks, seq)
	}
}

// Whatever comes, however it is flushed and whenever it is acknowledged: all of it is stored as it was given,
// and nothing waits for ever.
func TestAnyMixOfMessagesInBatches(t *testing.T) {
	t.Parallel()
	for seed := range uint64(12) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		enc := &encoder{template: &outbox.SubjectTemplate{}, limit: 4 << 20, ingress: "in.", deadTo: "dead"}
		enc.setOrder()
		w := &onWire{t: t}
		c := &Conn{cfg: config("").withDefaults(), lost: make(chan struct{}), enc: enc, inbox: "_I.x."}
		p := c.newPublisher(0)
		p.enc.ingress, p.out = "in.", w
		p.batch = newBatching(new(Batches))
		p.batch.on = seed%4 != 0
		now := time.Now()
		var want []string
		ack := func(n int) {
			if n > 0 {
				p.ackedAt.Store(int64(now.Sub(p.began)))
				p.acked.Store(w.acks[n-1])
				w.acks = w.acks[n:]
			}
		}
		for stuck := 0; len(want) < tier.Size(3000); {
			if p.Full() {
				if stuck++; stuck > 5 {
					t.Fatalf("seed %d: full with %d in flight, %d held, %d acks", seed, p.window.messages(),
						len(p.held), len(w.acks))
				}
				now = now.Add(holdBack)
				p.Flush(now)
				ack(len(w.acks))
				continue
			}
			stuck = 0
			size := rnd.IntN(300)
			switch rnd.IntN(200) {
			case 0:
				size = rnd.IntN(2 * maxBatched)
			case 1:
				size = rnd.IntN(5 << 20)
			case 2:
				size = enc.limit - overhead - rnd.IntN(300)
			}
			e := relay.Event{Doc: "d", ID: "i", Payload: bytes.Repeat([]byte{byte('a' + len(want)%26)}, size),
				PayloadSize: size, Pos: outbox.Position{LSN: outbox.LSN(len(want) + 1)}}
			must.Succeed(t, p.Publish(&e, &outbox.Header{Pos: e.Pos, Of: 1, ID: "i"}))
			want = append(want, string(e.Payload))
			if rnd.IntN(60) == 0 {
				now = now.Add(time.Duration(rnd.IntN(3)) * time.Millisecond)
				p.Flush(now)
			}
			if rnd.IntN(30) == 0 && len(w.acks) > 0 {
				ack(1 + rnd.IntN(len(w.acks)))
			}
		}
		for tries := 0; p.Acked() != p.Sent(); tries++ {
			if tries > 10 {
				t.Fatalf("seed %d: %d of %d acknowledged", seed, p.Acked(), p.Sent())
			}
			now = now.Add(holdBack)
			p.Flush(now)
			ack(len(w.acks))
		}
		for i := range want {
			if w.stored[i] != want[i] && !strings.Contains(w.stored[i], `"reason"`) {
				t.Fatalf("seed %d: message %d has %d bytes, want %d", seed, i+1, len(w.stored[i]),
					len(want[i]))
			}
		}
		if n, b := p.InFlight(); n != 0 || b != 0 {
			t.Errorf("%d, %d in flight", n, b)
		}
	}
}
