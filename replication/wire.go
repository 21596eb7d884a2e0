package replication

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

// wire is the replication connection below TLS. While it streams, it may leave Go's network poller: see unpoll.
//
// A walsender writes each message by itself, and a reader that is woken for each costs both sides more than the message: the wake-up
// is most of what a drain takes. A reader outside the poller can leave data in the socket for a moment, unnoticed by anybody, and
// take many messages at once. It does so only while much comes in, so a lone commit is read at once.
type wire struct {
	net.Conn
	reading sync.Mutex              // held while reading from Conn
	file    atomic.Pointer[os.File] // the socket, once it has left the poller: blocking

	behind func() bool // whether there is a backlog, so that latency does not count

	// The reader's own.
	rate rate // of what is read
	full bool // the last read filled what it was given: there is more, and nothing to wait for. TLS reads in small pieces
}

// How long data may gather: while much comes in, and while there is a backlog.
const (
	nap     = 100 * time.Microsecond
	longNap = time.Millisecond
)

// rate tells whether much comes in, over the last millisecond or more: 8 MB/s, or 15,000 reads a second. A small transaction takes
// three reads, one for each of its messages, unless they gather; a few that come together by chance must not be delayed.
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
		r.much = time.Duration(r.bytes)*rateSpan >= rateBytes*span || time.Duration(r.reads)*rateSpan >= rateReads*span
		r.since, r.bytes, r.reads = now, 0, 0
	}
}

// dialWire makes every connection that dial opens a wire.
func dialWire(dial pgconn.DialFunc, opened func(*wire)) pgconn.DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		w := &wire{Conn: conn}
		opened(w)
		return w, nil
	}
}

// Read implements [net.Conn]. One goroutine reads.
func (w *wire) Read(p []byte) (int, error) {
	f := w.file.Load()
	if f == nil {
		w.reading.Lock()
		defer w.reading.Unlock()
		if w.file.Load() == nil {
			return w.Conn.Read(p)
		}
		f = w.file.Load()
	}
	switch {
	case w.full:
	case w.behind != nil && w.behind():
		rest(longNap)
	case w.rate.much:
		rest(nap)
	}
	n, err := f.Read(p)
	w.full = n == len(p)
	w.rate.add(n, time.Now())
	return n, err
}

// Write implements [net.Conn].
func (w *wire) Write(p []byte) (int, error) {
	if f := w.file.Load(); f != nil {
		return f.Write(p)
	}
	return w.Conn.Write(p)
}

// SetWriteDeadline implements [net.Conn].
func (w *wire) SetWriteDeadline(t time.Time) error {
	f := w.file.Load()
	if f == nil {
		return w.Conn.SetWriteDeadline(t)
	}
	limit := time.Duration(0) // none
	if !t.IsZero() {
		limit = max(time.Until(t), time.Millisecond)
	}
	return control(f, func(fd int) error { return sendTimeout(fd, limit) })
}

// Close implements [net.Conn]. It ends a read that waits.
func (w *wire) Close() error {
	f := w.file.Load()
	if f == nil {
		return w.Conn.Close()
	}
	_ = control(f, func(fd int) error { return syscall.Shutdown(fd, syscall.SHUT_RDWR) }) // it may be gone already
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
