package socket

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
)

// TLS reads in pieces of some hundred bytes: a pause before each would be most of what a drain takes.
func TestNoPauseWhileThereIsMore(t *testing.T) {
	t.Parallel()
	conn, far := unpolled(t)
	const piece, pieces = 512, 64
	if _, err := far.Write(make([]byte, piece*pieces)); err != nil {
		t.Fatal(err)
	}
	far.Close()
	looked := 0
	conn.Backlog = func() bool { looked++; return true }
	for i := range pieces {
		if _, err := io.ReadFull(conn, make([]byte, piece)); err != nil {
			t.Fatalf("piece %d: %v", i, err)
		}
	}
	if looked > pieces/8 {
		t.Errorf("%d pauses in %d reads, though the data was there", looked, pieces)
	}
	if _, err := conn.Read(make([]byte, piece)); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}

// unpolled is a connection outside the poller, and the far end of its connection.
func unpolled(t *testing.T) (*Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	must.Succeed(t, err)
	far, err := l.Accept()
	must.Succeed(t, err)
	conn := &Conn{Conn: near}
	if err := conn.LeavePoller(); err != nil || conn.file.Load() == nil {
		t.Fatal("the socket is still polled", err)
	}
	t.Cleanup(func() { conn.Close(); far.Close() })
	return conn, far
}

// Outside the poller a read and a write that wait end with Close all the same, and a write with its deadline.
func TestOutsideThePollerCloseEndsReadsAndWrites(t *testing.T) {
	t.Parallel()
	ends := func(t *testing.T, what string, done <-chan error) {
		t.Helper()
		select {
		case err := <-done:
			if err == nil {
				t.Errorf("%s: no error", what)
			}
		case <-time.After(outboxdb.Patience):
			t.Fatalf("%s does not end", what)
		}
	}
	t.Run("with Close", func(t *testing.T) {
		conn, _ := unpolled(t)
		read, written := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := conn.Read(make([]byte, 1))
			read <- err
		}()
		go func() {
			_, err := conn.Write(make([]byte, 64<<20))
			written <- err
		}()
		time.Sleep(50 * time.Millisecond) // both wait in the kernel
		conn.Close()
		ends(t, "the read", read)
		ends(t, "the write", written)
		if conn.Close() == nil || conn.SetWriteDeadline(time.Now().Add(time.Second)) == nil {
			t.Error("it is open after Close")
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("it reads after Close")
		}
	})
	t.Run("with the deadline", func(t *testing.T) {
		conn, _ := unpolled(t)
		must.Succeed(t, conn.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
		written := make(chan error, 1)
		go func() {
			_, err := conn.Write(make([]byte, 64<<20))
			written <- err
		}()
		ends(t, "the write", written)
	})
}
