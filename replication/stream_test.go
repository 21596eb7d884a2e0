package replication

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// peer is a server at the other end of a stream in memory.
type peer struct {
	t    *testing.T
	conn net.Conn
	s    *stream
}

func newPeer(t *testing.T, timeout time.Duration) *peer {
	t.Helper()
	ours, theirs := net.Pipe()
	s := newStream(ours, ours, nil, 0x10, timeout)
	s.publication = "outflow"
	s.run()
	t.Cleanup(func() {
		s.close()
		theirs.Close()
	})
	p := &peer{t: t, conn: theirs, s: s}
	must.Succeed(t, theirs.SetDeadline(time.Now().Add(outboxdb.Patience)))
	return p
}

func (p *peer) send(messages ...[]byte) {
	p.t.Helper()
	if _, err := p.conn.Write(slices.Concat(messages...)); err != nil {
		p.t.Fatal(err)
	}
}

// status reads one standby status and returns write, flush and apply.
func (p *peer) status() [3]outbox.LSN {
	p.t.Helper()
	b := make([]byte, 39)
	if _, err := io.ReadFull(p.conn, b); err != nil {
		p.t.Fatal(err)
	}
	if string(b[:6]) != "d\x00\x00\x00\x26r" || b[38] != 0 {
		p.t.Fatalf("%x is no status", b)
	}
	var l [3]outbox.LSN
	for i := range l {
		l[i] = outbox.LSN(binary.BigEndian.Uint64(b[6+8*i:]))
	}
	return l
}

func (p *peer) batch() []Message {
	p.t.Helper()
	select {
	case b, ok := <-p.s.batches:
		if !ok {
			p.t.Fatalf("the stream ended: %v", p.s.failure())
		}
		return b.Messages
	case <-within(p.t).Done():
		p.t.Fatal("no batch")
		return nil
	}
}

// ended waits for the end of the stream, throwing away what comes before, and returns why.
func (p *peer) ended() error {
	p.t.Helper()
	ctx := within(p.t)
	for {
		select {
		case b, ok := <-p.s.batches:
			if !ok {
				return p.s.failure()
			}
			b.Release()
		case <-ctx.Done():
			p.t.Fatal("the stream does not end")
		}
	}
}

func keepalive(end outbox.LSN, at time.Duration, reply byte) []byte {
	b := binary.BigEndian.AppendUint64([]byte{'k'}, uint64(end))
	b = binary.BigEndian.AppendUint64(b, uint64(at.Microseconds()))
	return frame('d', append(b, reply))
}

func walData(lsn outbox.LSN, data string) []byte {
	b := binary.BigEndian.AppendUint64([]byte{'w'}, uint64(lsn))
	b = binary.BigEndian.AppendUint64(b, uint64(lsn))
	b = binary.BigEndian.AppendUint64(b, 0)
	return frame('d', append(b, data...))
}

func encoded(t *testing.T, m pgproto3.BackendMessage) []byte {
	t.Helper()
	b, err := m.Encode(nil)
	must.Succeed(t, err)
	return b
}

func TestMessagesKeepTheirOrder(t *testing.T) {
	t.Parallel()
	p := newPeer(t, 0)
	p.send(keepalive(0x30, 0, 0), walData(0x20, "B"), walData(0, "R"), walData(0x40, "C"),
		keepalive(0x18, 0, 0), keepalive(0x50, 0, 0))
	got := p.batch()
	want := []Message{
		{Keepalive: true, WALEnd: 0x30}, {WALEnd: 0x20, Data: []byte("B")}, {Data: []byte("R")},
		{WALEnd: 0x40, Data: []byte("C")},
		{Keepalive: true, WALEnd: 0x30}, // a keepalive that goes back promises nothing less
		{Keepalive: true, WALEnd: 0x50},
	}
	if !slices.EqualFunc(got, want, func(a, b Message) bool {
		return a.Keepalive == b.Keepalive && a.WALEnd == b.WALEnd && string(a.Data) == string(b.Data)
	}) {
		t.Errorf("got %v, want %v", got, want)
	}
	eventually(t, "received is what was reached", func() bool { return p.s.received.Load() == 0x50 })
}

func TestStatusSaysWhatIsConfirmed(t *testing.T) {
	t.Parallel()
	p := newPeer(t, 0)
	same := func(lsn outbox.LSN) {
		t.Helper()
		if got := p.status(); got != [3]outbox.LSN{lsn, lsn, lsn} {
			t.Fatalf("status %v, want %v three times", got, lsn)
		}
	}
	p.send(keepalive(0x500, 0, 1))
	same(0)
	p.s.confirm(0x300)
	same(0x300)
	p.s.confirm(0x200)
	p.send(keepalive(0x500, time.Hour, 1))
	same(0x300)
	p.s.confirm(0x900) // beyond what was received
	same(0x500)
}

// The server closes a connection that is silent, so replies must go on while the consumer reads nothing.
func TestStatusGoesOnWhileNobodyReads(t *testing.T) {
	t.Parallel()
	p := newPeer(t, 40*time.Millisecond)
	blocked := make(chan struct{})
	go func() {
		defer close(blocked)
		for range 2 * maxBatches { // more than the queue holds: the rest is never read
			if _, err := p.conn.Write(walData(0x20, "I")); err != nil {
				return
			}
		}
	}()
	for range 20 {
		p.status()
	}
	if len(p.s.batches) != queued {
		t.Errorf("%d batches wait, want %d", len(p.s.batches), queued)
	}
	p.s.close()
	<-blocked
}

func TestErrorsOfTheServerEndTheStream(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		send []byte
		want func(error) bool
	}{
		{"PostgreSQL 18 skips the publication",
			encoded(t, &pgproto3.NoticeResponse{Severity: "WARNING", Code: "55000",
				Message: `skipped loading publication "outflow"`}), missing},
		{"the same in another language",
			encoded(t, &pgproto3.NoticeResponse{Severity: "WARNUNG", Code: "55000", Message: "übersprungen",
				Routine: "LoadPublications"}), missing},
		{"PostgreSQL 17 misses the publication",
			encoded(t, &pgproto3.ErrorResponse{Severity: "ERROR", Code: "42704",
				Message: `publication "outflow" does not exist`}), missing},
		{"terminated", encoded(t, &pgproto3.ErrorResponse{Severity: "FATAL", Code: "57P01",
			Message: "terminating connection"}),
			func(err error) bool {
				return postgres.SQLState(err) == "57P01" && outbox.ClassOf(err) == outbox.Transient
			}},
		{"everything was confirmed and the server stops",
			encoded(t, &pgproto3.CommandComplete{CommandTag: []byte("COPY 0")}), func(err error) bool {
				return err != nil && !errors.Is(err, ErrClosed) && outbox.ClassOf(err) == outbox.Transient
			}},
		{"a message that does not belong here", frame('T', nil), anything},
		{"no CopyData", frame('d', nil), anything},
		{"CopyData of another kind", frame('d', []byte("s")), anything},
		{"short WAL data", frame('d', []byte("w2345678")), anything},
		{"short keepalive", frame('d', []byte("k2345678")), anything},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := newPeer(t, 0)
			// What came before it is delivered, what comes behind it is not.
			p.send(walData(0x20, "before"), c.send, walData(0x30, "behind"))
			if m := p.batch(); len(m) != 1 || string(m[0].Data) != "before" {
				t.Errorf("got %v", m)
			}
			if err := p.ended(); !c.want(err) {
				t.Errorf("ended with %v", err)
			}
		})
	}
}

func anything(err error) bool { return err != nil }

func missing(err error) bool {
	f := outbox.FaultOf(err)
	return f != nil && f.Class == outbox.Fatal && f.Code == "publication_missing"
}

func TestOtherNoticesEndNothing(t *testing.T) {
	t.Parallel()
	p := newPeer(t, 0)
	p.send(encoded(t, &pgproto3.NoticeResponse{Severity: "WARNING", Code: "01000",
		Message: "something else"}),
		encoded(t, &pgproto3.ParameterStatus{Name: "TimeZone", Value: "UTC"}), walData(0x20, "I"))
	if m := p.batch(); len(m) != 1 {
		t.Errorf("got %v", m)
	}
}

// A peer that reads nothing and a consumer that reads nothing must not keep Close.
func TestCloseWaitsForNobodyWhoReadsNothing(t *testing.T) {
	t.Parallel()
	p := newPeer(t, time.Millisecond) // the writer waits for the peer, which reads nothing
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for {
			if _, err := p.conn.Write(walData(0x20, "I")); err != nil {
				return
			}
		}
	}()
	eventually(t, "the queue is full", func() bool { return len(p.s.batches) == queued })
	p.s.close()
	<-sent
}

func TestTheStatusIntervalIsAPartOfTheTimeout(t *testing.T) {
	t.Parallel()
	for timeout, want := range map[time.Duration]time.Duration{
		0: 10 * time.Second, time.Minute: 10 * time.Second, 10 * time.Second: 2500 * time.Millisecond,
		5 * time.Second: 1250 * time.Millisecond, time.Millisecond: 5 * time.Millisecond,
	} {
		if got := statusInterval(timeout); got != want {
			t.Errorf("for %v: %v, want %v", timeout, got, want)
		}
	}
}

func TestStopSaysGoodbyeToTheServer(t *testing.T) {
	t.Parallel()
	p := newPeer(t, 0)
	p.send(keepalive(0x500, 0, 0))
	p.batch()
	p.s.confirm(0x300)
	stopped := make(chan error, 1)
	go func() { stopped <- p.s.stop(within(t)) }()
	for lsn := outbox.LSN(0); ; {
		typ := make([]byte, 5)
		if _, err := io.ReadFull(p.conn, typ); err != nil {
			t.Fatal(err)
		}
		body := make([]byte, frameSize(typ)-frameHeader)
		if _, err := io.ReadFull(p.conn, body); err != nil {
			t.Fatal(err)
		}
		if typ[0] == 'c' {
			if lsn != 0x300 {
				t.Errorf("the last status said %v", lsn)
			}
			break
		}
		lsn = outbox.LSN(binary.BigEndian.Uint64(body[9:]))
	}
	for range 2 * maxBatches { // nobody reads them any more
		p.send(walData(0x600, "I"))
	}
	p.send(frame('c', nil), encoded(t, &pgproto3.CommandComplete{CommandTag: []byte("COPY 0")}),
		encoded(t, &pgproto3.ReadyForQuery{TxStatus: 'I'}))
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if err := p.s.failure(); !errors.Is(err, ErrClosed) {
		t.Errorf("ended with %v", err)
	}
}

func TestStopEndsWithItsContext(t *testing.T) {
	t.Parallel()
	p := newPeer(t, 0)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.s.stop(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("stop: %v", err)
	}
}
