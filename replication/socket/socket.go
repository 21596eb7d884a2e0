package socket

import (
	"context"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Conn is the replication connection below TLS. While it streams, it may leave Go's network poller: see
// LeavePoller.
//
// A walsender writes each message by itself, and waking a reader for each costs both sides more than the
// message does. A reader outside the poller can leave data in the socket for a moment without being woken,
// and then take many messages at once. It does so only while much comes in, so a lone commit is read at once.
type Conn struct {
	net.Conn
	reading sync.Mutex              // held while reading from Conn
	file    atomic.Pointer[os.File] // the socket, once it has left the poller: blocking

	Backlog func() bool // whether so much is waiting that latency does not count; nil: it is not

	// The reader's own.
	rate rate // of what is read
	// the last read filled what it was given: there is more, and nothing to wait for. TLS reads in small
	// pieces
	full bool
}

// How long data may gather: while much comes in, and while there is a backlog.
const (
	pause     = 100 * time.Microsecond
	longPause = time.Millisecond
)

// rate tells whether much comes in, over the last millisecond or more: 8 MB/s, or 15,000 reads a second. A
// small transaction takes three reads, one for each of its messages, unless they gather; a few that come
// together by chance must not be delayed.
type rate struct {
	since        time.Time
	bytes, reads int
	much         bool
}

const (
	rateSpan  = time.Millisecond
	rateBytes = 8 << 10 // in rateSpan
	rateReads = 15      // in rateSpan
)

func (r *rate) add(n int, now time.Time) {
	r.bytes += n
	r.reads++
	if span := now.Sub(r.since); span >= rateSpan {
		r.much = time.Duration(r.bytes)*rateSpan >= rateBytes*span ||
			time.Duration(r.reads)*rateSpan >= rateReads*span
		r.since, r.bytes, r.reads = now, 0, 0
	}
}

// Wrap makes every connection that dial opens a Conn, and hands it to opened.
func Wrap(dial pgconn.DialFunc, opened func(*Conn)) pgconn.DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		s := &Conn{Conn: conn}
		opened(s)
		return s, nil
	}
}

// Read implements [net.Conn]. One goroutine reads.
func (s *Conn) Read(p []byte) (int, error) {
	f := s.file.Load()
	if f == nil {
		s.reading.Lock()
		defer s.reading.Unlock()
		if s.file.Load() == nil {
			return s.Conn.Read(p)
		}
		f = s.file.Load()
	}
	switch {
	case s.full:
	case s.Backlog != nil && s.Backlog():
		sleep(longPause)
	case s.rate.much:
		sleep(pause)
	}
	n, err := f.Read(p)
	s.full = n == len(p)
	s.rate.add(n, time.Now())
	return n, err
}

// Write implements [net.Conn].
func (s *Conn) Write(p []byte) (int, error) {
	if f := s.file.Load(); f != nil {
		return f.Write(p)
	}
	return s.Conn.Write(p)
}

// SetWriteDeadline implements [net.Conn].
func (s *Conn) SetWriteDeadline(t time.Time) error {
	f := s.file.Load()
	if f == nil {
		return s.Conn.SetWriteDeadline(t)
	}
	limit := time.Duration(0) // none
	if !t.IsZero() {
		limit = max(time.Until(t), time.Millisecond)
	}
	return control(f, func(fd int) error { return sendTimeout(fd, limit) })
}

// Close implements [net.Conn]. It ends a read that waits.
func (s *Conn) Close() error {
	f := s.file.Load()
	if f == nil {
		return s.Conn.Close()
	}
	// it may be gone already
	_ = control(f, func(fd int) error { return syscall.Shutdown(fd, syscall.SHUT_RDWR) })
	return f.Close()
}

func control(f *os.File, do func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var done error
	if err := raw.Control(func(fd uintptr) { done = do(int(fd)) }); err != nil {
		return err
	}
	return done
}
