package sink

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/crash"
)

// dialer dials for nats.go, does the TLS handshake in its place, and keeps the last connection. So we hold
// the connection above TLS and can write to it ourselves: nats.go's own way to publish with headers writes
// them in a random order, from a map, and what is stored must be the same bytes each time.
type dialer struct {
	ctx     context.Context // ends a dial
	next    nats.CustomDialer
	timeout time.Duration
	opts    *nats.Options // complete when the first handshake begins

	mu     sync.Mutex
	last   *lockedConn
	failed error // the last dial that failed: nats.go does not say why
}

// Dial implements nats.CustomDialer.
func (w *dialer) Dial(network, address string) (net.Conn, error) {
	var conn net.Conn
	var err error
	if w.next != nil {
		conn, err = w.next.Dial(network, address)
	} else {
		conn, err = (&net.Dialer{Timeout: w.timeout}).DialContext(w.ctx, network, address)
	}
	if err != nil {
		w.mu.Lock()
		w.failed = err
		w.mu.Unlock()
		return nil, err
	}
	host, _, _ := net.SplitHostPort(address)
	last := &lockedConn{Conn: conn, raw: conn, host: host}
	w.mu.Lock()
	w.last = last
	w.mu.Unlock()
	if w.ctx.Err() != nil { // it may have ended before there was something to close
		conn.Close()
	}
	return last, nil
}

// SkipTLSHandshake is what nats.go asks a dialer when it would do the handshake. It is done here then, so the
// answer is yes; a handshake that failed has closed the connection.
func (w *dialer) SkipTLSHandshake() bool {
	last := w.current()
	if last.tlsErr = last.secure(w.opts); last.tlsErr != nil {
		last.Close()
	}
	return true
}

// tlsErr says why the last handshake failed, if it did.
func (w *dialer) tlsErr() error {
	if last := w.current(); last != nil {
		return last.tlsErr
	}
	return nil
}

// dialErr says why the last dial that failed did, without the address: that is in the setting.
func (w *dialer) dialErr() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.As(w.failed, &dns):
		return errors.New(dns.Err)
	case errors.As(w.failed, &op):
		return op.Err
	}
	return w.failed
}

func (w *dialer) current() *lockedConn {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last
}

// dialled reports whether it came as far as dialling.
func (w *dialer) dialled() bool { return w.current() != nil }

func (w *dialer) close() {
	if last := w.current(); last != nil {
		last.Close()
	}
}

// lockedConn is a connection that nats.go and frameWriter write to. Both write whole protocol frames at a
// time: nats.go collects them in its buffer and flushes that, frameWriter does likewise. The lock keeps a
// write of the one from cutting into one of the other. A write that fails part way leaves a truncated frame,
// so it closes the connection.
type lockedConn struct {
	net.Conn          // raw, or TLS over it
	raw      net.Conn //
	host     string   // as dialled
	tlsErr   error
	mu       sync.Mutex // held while writing
}

// secure lays TLS over the connection, with the options as nats.go would use them. Nobody else may use it
// meanwhile, except Close.
func (w *lockedConn) secure(o *nats.Options) error {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.TLSConfig != nil {
		cfg = o.TLSConfig.Clone()
	}
	if o.TLSCertCB != nil {
		cert, err := o.TLSCertCB()
		if err != nil {
			return err
		}
		cfg.Certificates = []tls.Certificate{cert}
	}
	if o.RootCAsCB != nil {
		roots, err := o.RootCAsCB()
		if err != nil {
			return err
		}
		cfg.RootCAs = roots
	}
	if cfg.ServerName == "" {
		cfg.ServerName = w.host
	}
	secured := tls.Client(w.raw, cfg)
	if err := secured.Handshake(); err != nil { // nats.go has set a deadline
		return err
	}
	w.Conn = secured
	return nil
}

func (w *lockedConn) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.Conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return 0, err
	}
	n, err := w.Conn.Write(b)
	if err != nil {
		w.Close()
	}
	return n, err
}

// SetWriteDeadline does nothing: Write sets its own, and a deadline of nats.go's would apply to a write of
// somebody else.
func (w *lockedConn) SetWriteDeadline(time.Time) error { return nil }

// Close ends the connection at once, also under a write that does not get on. What the kernel has not sent
// yet is dropped: otherwise it sends that for minutes, and a message may be stored long after another cluster
// has published the event.
func (w *lockedConn) Close() error {
	if tcp, ok := w.raw.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // fails where it is closed
	}
	return w.raw.Close()
}

// writer is where a publisher's messages go. One goroutine uses it.
type writer interface {
	send(m *message, reply []byte) // keeps nothing of its arguments; errors end the connection
	// flush puts what was sent so far on the wire. direct says that it can't block: it may be done in the
	// caller's goroutine.
	flush(direct bool)
}

// flushAt is how many bytes are collected before they are written without being asked to, as in nats.go.
const flushAt = 32 << 10

// keepBuffer is the size up to which a buffer that has been written is used again.
const keepBuffer = 1 << 20

// frameWriter encodes messages as frames of the NATS protocol and writes them to the wire itself, from a
// goroutine of its own, so that publishing never blocks on the network. (It also takes a fifth of the
// processor time of nats.go's way.) The bytes it holds are bounded by what may be in flight.
type frameWriter struct {
	wire *lockedConn
	lost <-chan struct{}
	fail func(error)
	wake chan struct{} // capacity 1

	writing sync.Mutex // held while writing: by the goroutine, or by a direct flush

	mu    sync.Mutex
	buf   []byte
	spare []byte // for buf, while it is being written
}

func newFrameWriter(w *lockedConn, lost <-chan struct{}, fail func(error)) *frameWriter {
	f := &frameWriter{wire: w, lost: lost, fail: fail, wake: make(chan struct{}, 1)}
	go f.run()
	return f
}

func (f *frameWriter) send(m *message, reply []byte) {
	f.mu.Lock()
	f.buf = appendFrame(f.buf, m, reply)
	n := len(f.buf)
	f.mu.Unlock()
	if n >= flushAt {
		f.flush(false)
	}
}

func appendFrame(b []byte, m *message, reply []byte) []byte {
	b = append(b, "HPUB "...)
	b = append(b, m.subject...)
	b = append(b, ' ')
	if len(reply) > 0 {
		b = append(b, reply...)
		b = append(b, ' ')
	}
	header := len(m.header) + len(m.lines) - (m.rest - m.expected)
	b = strconv.AppendInt(b, int64(header), 10)
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(header+len(m.data)), 10)
	b = append(b, "\r\n"...)
	b = append(b, m.header[:m.expected]...)
	b = append(b, m.lines...)
	b = append(b, m.header[m.rest:]...)
	b = append(b, m.data...)
	return append(b, "\r\n"...)
}

func (f *frameWriter) flush(direct bool) {
	if direct && f.writing.TryLock() { // it saves waking the goroutine, which takes longer than the write
		f.write()
		f.writing.Unlock()
		return
	}
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// run writes until the connection is lost.
func (f *frameWriter) run() {
	defer crash.Guard()
	for {
		select {
		case <-f.lost:
			return
		case <-f.wake:
		}
		f.writing.Lock()
		ok := f.write()
		f.writing.Unlock()
		if !ok {
			return
		}
	}
}

// write writes what there is; false: the connection is lost. The caller holds writing.
func (f *frameWriter) write() bool {
	f.mu.Lock()
	out := f.buf
	f.buf, f.spare = f.spare[:0], nil
	f.mu.Unlock()
	if len(out) > 0 {
		if _, err := f.wire.Write(out); err != nil {
			f.fail(err)
			return false
		}
	}
	if cap(out) <= keepBuffer {
		f.mu.Lock()
		f.spare = out
		f.mu.Unlock()
	}
	return true
}
