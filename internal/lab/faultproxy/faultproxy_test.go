package faultproxy

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// pair is a connection through a proxy, both ends.
type pair struct {
	t              *testing.T
	client, server *net.TCPConn
}

// start returns a proxy and a function that makes connections through it.
func start(t *testing.T) (*Proxy, func() pair) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must.Succeed(t, err)
	t.Cleanup(func() { l.Close() })
	p, err := New(l.Addr().String())
	must.Succeed(t, err)
	t.Cleanup(p.Close)
	return p, func() pair {
		t.Helper()
		before := p.Accepted()
		client := dial(t, p)
		server, err := l.Accept()
		must.Succeed(t, err)
		t.Cleanup(func() { server.Close() })
		eventually(t, "the proxy has both ends", func() bool { return p.Accepted() > before })
		return pair{t, client, server.(*net.TCPConn)}
	}
}

func dial(t *testing.T, p *Proxy) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp4", p.Addr())
	must.Succeed(t, err)
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

func send(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

func receive(t *testing.T, c net.Conn, want string) {
	t.Helper()
	must.Succeed(t, c.SetReadDeadline(time.Now().Add(3*time.Minute)))
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Fatalf("received %q, %v; want %q", got, err, want)
	}
}

// silent makes sure that nothing comes for a moment.
func silent(t *testing.T, c net.Conn) {
	t.Helper()
	must.Succeed(t, c.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%d bytes, error %v; want silence", n, err)
	}
}

// ended returns the error that a read ends with.
func ended(t *testing.T, c net.Conn) error {
	t.Helper()
	must.Succeed(t, c.SetReadDeadline(time.Now().Add(3*time.Minute)))
	_, err := io.Copy(io.Discard, c)
	return err
}

// refused makes sure that a new connection is reset, while it is made or right after.
func refused(t *testing.T, p *Proxy) {
	t.Helper()
	c, err := net.Dial("tcp4", p.Addr())
	if err == nil {
		defer c.Close()
		err = ended(t, c)
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a new connection: %v", err)
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never:", what)
		}
	}
}

func TestBytesPassBothWays(t *testing.T) {
	t.Parallel()
	p, connect := start(t)
	c := connect()
	data := make([]byte, 5<<20)
	_, _ = rand.Read(data)
	for _, way := range [][2]*net.TCPConn{{c.client, c.server}, {c.server, c.client}} {
		var got []byte
		var readErr error
		var reader sync.WaitGroup
		reader.Go(func() { got, readErr = io.ReadAll(way[1]) })
		if _, err := way[0].Write(data); err != nil {
			t.Fatal(err)
		}
		if err := way[0].CloseWrite(); err != nil { // an end in order, one way only
			t.Fatal(err)
		}
		reader.Wait()
		if readErr != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes came of %d, %v", len(got), len(data), readErr)
		}
	}
	eventually(t, "no connection is left", func() bool { return p.Conns() == 0 })
	if up, down := p.Bytes(ToServer), p.Bytes(ToClient); up != uint64(len(data)) || down != up ||
		p.Accepted() != 1 {
		t.Errorf("%d bytes to the server, %d to the client, %d connections", up, down, p.Accepted())
	}
}

func TestCutResetsBothSides(t *testing.T) {
	t.Parallel()
	p, connect := start(t)
	all := []pair{connect(), connect()}
	p.Mute(ToServer, true) // and a muted one is not spared
	send(t, all[0].client, "held")
	p.Cut()
	for _, c := range all {
		for _, side := range []net.Conn{c.client, c.server} {
			if err := ended(t, side); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("after the cut: %v", err)
			}
		}
	}
	p.Mute(ToServer, false)
	c := connect()
	send(t, c.client, "new")
	receive(t, c.server, "new")
}

func TestResetIsPassedOn(t *testing.T) {
	t.Parallel()
	p, connect := start(t)
	c := connect()
	reset(c.server)
	if err := ended(t, c.client); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v", err)
	}
	c = connect()
	p.Mute(ToClient, true)
	reset(c.server)
	silent(t, c.client)
	p.Mute(ToClient, false)
	if err := ended(t, c.client); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v", err)
	}
}

func TestARefusingProxyKeepsOldConnections(t *testing.T) {
	t.Parallel()
	p, connect := start(t)
	c := connect()
	p.Refuse(true)
	refused(t, p)
	send(t, c.client, "old")
	receive(t, c.server, "old")
	p.Refuse(false)
	c = connect()
	send(t, c.client, "new")
	receive(t, c.server, "new")
}

func TestNoTargetIsAReset(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must.Succeed(t, err)
	p, err := New(l.Addr().String())
	must.Succeed(t, err)
	defer p.Close()
	l.Close()
	refused(t, p)
	if _, err := New("nowhere"); err == nil {
		t.Error("a proxy to no port was made")
	}
}

func TestMuteHoldsOneDirection(t *testing.T) {
	t.Parallel()
	p, connect := start(t)
	c := connect()
	p.Mute(ToClient, true)
	send(t, c.server, "answer")
	silent(t, c.client)
	send(t, c.client, "question")
	receive(t, c.server, "question")

	// Buffers are full some time, and the sender stops; the end does not get through either.
	must.Succeed(t, c.server.SetWriteDeadline(time.Now().Add(time.Second)))
	n, err := io.Copy(c.server, io.LimitReader(rand.Reader, 1<<30))
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d bytes were taken, error %v", n, err)
	}
	must.Succeed(t, c.server.CloseWrite())
	silent(t, c.client)
	if p.Conns() != 1 || p.Bytes(ToClient) != 0 {
		t.Errorf("%d connections, %d bytes", p.Conns(), p.Bytes(ToClient))
	}

	p.Mute(ToClient, false)
	receive(t, c.client, "answer")
	got, err := io.Copy(io.Discard, c.client)
	if err != nil || got < n { // Copy does not count its last, partial write
		t.Errorf("%d bytes came of %d, %v", got, n, err)
	}
}

func TestDropLosesOneDirection(t *testing.T) {
	t.Parallel()
	p, connect := start(t)
	c := connect()
	p.Delay(time.Hour)
	send(t, c.server, "under way and lost;")
	silent(t, c.client)
	p.Mute(ToClient, true)
	send(t, c.server, "held and lost;")
	p.Drop(ToClient, true)
	p.Mute(ToClient, false)
	p.Delay(0)
	data := make([]byte, 32<<20) // more than any buffer: it is really read
	if _, err := c.server.Write(data); err != nil {
		t.Fatal(err)
	}
	send(t, c.client, "passed")
	receive(t, c.server, "passed")
	silent(t, c.client)
	if p.Bytes(ToClient) != 0 {
		t.Errorf("%d bytes passed", p.Bytes(ToClient))
	}
	p.Cut()
	p.Drop(ToClient, false)
	c = connect()
	send(t, c.server, "new")
	receive(t, c.client, "new")
}

func TestDelayIsNoLimit(t *testing.T) {
	t.Parallel()
	p, connect := start(t)
	c := connect()
	const delay = 150 * time.Millisecond
	p.Delay(delay)
	began := time.Now()
	send(t, c.client, "ping")
	receive(t, c.server, "ping")
	send(t, c.server, "pong")
	receive(t, c.client, "pong")
	if took := time.Since(began); took < 2*delay {
		t.Errorf("a round trip took %v", took)
	}

	// All of it is under way at the same time: held up once, not once a chunk.
	const size = 4 << 20
	began = time.Now()
	var writer sync.WaitGroup
	writer.Go(func() { send(t, c.client, strings.Repeat("x", size)) })
	if _, err := io.CopyN(io.Discard, c.server, size); err != nil {
		t.Fatal(err)
	}
	writer.Wait()
	if took := time.Since(began); took < delay || took > size/chunkSize*delay/2 {
		t.Errorf("%d bytes took %v", size, took)
	}

	p.Delay(time.Hour)
	send(t, c.client, "late")
	silent(t, c.server)
	p.Heal()
	receive(t, c.server, "late")
}

func TestRateLimitsAllTogether(t *testing.T) {
	t.Parallel()
	p, connect := start(t)
	const rate, size = 200_000, 40_000
	p.Rate(rate)
	began := time.Now()
	var all sync.WaitGroup
	for range 2 {
		c := connect()
		all.Go(func() { send(t, c.client, strings.Repeat("x", size)) })
		all.Go(func() {
			if _, err := io.CopyN(io.Discard, c.server, size); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	// The last slice is not waited for.
	if took, want := time.Since(began), time.Second*2*size/rate-2*slice; took < want {
		t.Errorf("%d bytes took %v, want %v at least", 2*size, took, want)
	}
}

func TestAClosedProxyLeavesNoConnection(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(*Proxy){
		"mute":  func(p *Proxy) { p.Mute(ToServer, true) },
		"delay": func(p *Proxy) { p.Delay(time.Hour) },
		"rate":  func(p *Proxy) { p.Rate(1) },
		"drop":  func(p *Proxy) { p.Drop(ToServer, true) },
		"full":  func(*Proxy) {}, // the server does not read
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, connect := start(t)
			c := connect()
			fault(p)
			must.Succeed(t, c.client.SetWriteDeadline(time.Now().Add(200*time.Millisecond)))
			// until buffers are full, if they are
			_, _ = io.Copy(c.client, io.LimitReader(rand.Reader, 64<<20))
			// it returns: every goroutine has ended
			p.Close()
			p.Close()
			// a child that is just being forked has its listener too, for a moment
			eventually(t, "it accepts no connections", func() bool {
				c, err := net.Dial("tcp4", p.Addr())
				if err == nil {
					c.Close()
				}
				return err != nil
			})
		})
	}
}

// TestPostgreSQLAndNATSWorkThroughAProxy: both servers work through a proxy, and both clients see its faults.
func TestPostgreSQLAndNATSWorkThroughAProxy(t *testing.T) {
	t.Parallel()
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		p, url, err := To(pgtest.Server(t).URL("postgres"))
		must.Succeed(t, err)
		defer p.Close()
		conn, err := pgx.Connect(t.Context(), url)
		must.Succeed(t, err)
		defer conn.Close(t.Context())
		var n int
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM generate_series(1, 1000)").Scan(
			&n); err != nil || n != 1000 {
			t.Fatalf("%d rows, %v", n, err)
		}
		p.Cut()
		if err := conn.Ping(t.Context()); err == nil {
			t.Error("a connection that was cut lives")
		}
	})
	t.Run("nats", func(t *testing.T) {
		t.Parallel()
		p, url, err := To(natstest.Server(t).URL())
		must.Succeed(t, err)
		defer p.Close()
		nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(time.Minute))
		must.Succeed(t, err)
		defer nc.Close()
		must.Succeed(t, nc.FlushTimeout(time.Minute))
		p.Mute(ToClient, true)
		if err := nc.FlushTimeout(100 * time.Millisecond); !errors.Is(err, nats.ErrTimeout) {
			t.Errorf("the answer is muted, and: %v", err)
		}
		p.Cut()
		eventually(t, "the client sees the end", nc.IsClosed)
	})
}

func TestADirectionIsPrintedByItsName(t *testing.T) {
	t.Parallel()
	if got := fmt.Sprint(ToServer, ToClient); got != "to server to client" {
		t.Error(got)
	}
}
