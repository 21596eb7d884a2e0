package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	ackEvery      = 50 // messages
	maxInFlight   = 2000
	inFlightBytes = 8 << 20
	writeBytes    = 128 << 10 // gathered before they are written
)

// wire publishes messages to a stream as fast as a client can: frames of its own, an acknowledgement for
// every 50th message. The connection is nats.go's, which reads from it; what it writes, it writes before.
type wire struct {
	nc    *nats.Conn
	conn  net.Conn
	inbox string // with its dot

	buf     []byte
	sent    uint64
	asked   uint64 // the last sequence whose acknowledgement was asked for
	sizes   []int  // of those in flight, by sequence modulo
	flying  int    // bytes
	settled uint64 // up to which sizes were taken off

	acked  atomic.Uint64
	notify chan struct{}
	mu     sync.Mutex
	err    error
}

// capture keeps the connection that nats.go dials.
type capture struct{ conn net.Conn }

func (c *capture) Dial(network, address string) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, attempt)
	c.conn = conn
	return conn, err
}

func newWire(url string) (*wire, error) {
	c := &capture{}
	w := &wire{sizes: make([]int, 2*maxInFlight), notify: make(chan struct{}, 1)}
	var err error
	w.nc, err = nats.Connect(url, nats.SetCustomDialer(c), nats.NoReconnect(), nats.PingInterval(time.Hour),
		nats.Timeout(attempt), nats.ClosedHandler(func(nc *nats.Conn) {
			w.fail(fmt.Errorf("the connection to NATS is lost: %w", nc.LastError()))
		}))
	if err != nil {
		return nil, err
	}
	if w.nc.TLSRequired() {
		w.nc.Close()
		return nil, errors.New("TLS is not made for: give an address of NATS without it")
	}
	w.conn = c.conn
	w.inbox = nats.NewInbox() + "."
	if _, err := w.nc.Subscribe(w.inbox+"*", w.acknowledged); err != nil {
		return nil, err
	}
	return w, w.nc.FlushTimeout(attempt)
}

func (w *wire) acknowledged(m *nats.Msg) {
	var ack struct {
		Seq   uint64          `json:"seq"`
		Error json.RawMessage `json:"error"`
	}
	want, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, w.inbox), 10, 64)
	if err == nil {
		err = json.Unmarshal(m.Data, &ack)
	}
	if err != nil || ack.Error != nil || ack.Seq != want {
		w.fail(fmt.Errorf("message %d was not stored at its place: %q", want, m.Data))
		return
	}
	w.acked.Store(want)
	w.signal()
}

func (w *wire) fail(err error) {
	w.mu.Lock()
	if w.err == nil {
		w.err = err
	}
	w.mu.Unlock()
	w.signal()
}

func (w *wire) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

func (w *wire) signal() {
	select {
	case w.notify <- struct{}{}:
	default:
	}
}

// send puts a message into the buffer: subject, header lines (each with its end) and data. last asks for an
// acknowledgement.
func (w *wire) send(subject string, header, data []byte, last bool) error {
	for w.sent-w.acked.Load() >= maxInFlight || w.flying >= inFlightBytes {
		if w.asked <= w.acked.Load() {
			return errors.New("nothing is asked for, and too much is in flight")
		}
		if err := w.flush(); err != nil {
			return err
		}
		if err := w.await(); err != nil {
			return err
		}
	}
	w.sent++
	before := len(w.buf)
	const version, expected = "NATS/1.0\r\n", nats.ExpectedLastSeqHdr + ": "
	var digits [20]byte
	seq := strconv.AppendUint(digits[:0], w.sent-1, 10)
	head := len(version) + len(expected) + len(seq) + 2 + len(header) + 2
	w.buf = append(append(w.buf, "HPUB "...), subject...)
	w.buf = append(w.buf, ' ')
	bytesSinceAsked := w.flying >= inFlightBytes/2 && w.asked <= w.acked.Load()
	if last || w.sent-w.asked >= ackEvery || bytesSinceAsked {
		w.asked = w.sent
		w.buf = strconv.AppendUint(append(w.buf, w.inbox...), w.sent, 10)
		w.buf = append(w.buf, ' ')
	}
	w.buf = append(strconv.AppendInt(w.buf, int64(head), 10), ' ')
	w.buf = append(strconv.AppendInt(w.buf, int64(head+len(data)), 10), '\r', '\n')
	w.buf = append(append(append(w.buf, version...), expected...), seq...)
	w.buf = append(append(append(w.buf, '\r', '\n'), header...), '\r', '\n')
	w.buf = append(append(w.buf, data...), '\r', '\n')
	size := len(w.buf) - before
	w.sizes[w.sent%uint64(len(w.sizes))] = size
	w.flying += size
	if len(w.buf) >= writeBytes {
		return w.flush()
	}
	return nil
}

func (w *wire) flush() error {
	if len(w.buf) > 0 {
		if _, err := w.conn.Write(w.buf); err != nil {
			return err
		}
		w.buf = w.buf[:0]
	}
	w.settle()
	return w.failed()
}

// settle takes off what was acknowledged.
func (w *wire) settle() {
	for acked := w.acked.Load(); w.settled < acked; {
		w.settled++
		w.flying -= w.sizes[w.settled%uint64(len(w.sizes))]
	}
}

// await waits for another acknowledgement.
func (w *wire) await() error {
	<-w.notify
	w.settle()
	return w.failed()
}

// finish waits until all is acknowledged. The last message has asked for that.
func (w *wire) finish() error {
	if err := w.flush(); err != nil {
		return err
	}
	for w.acked.Load() < w.sent {
		if err := w.await(); err != nil {
			return err
		}
	}
	return nil
}

// outflowHeader is a header line of the same length as outflow's for an event, near enough.
func outflowHeader(id, actor string, counter int64) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "Outflow: v=1 lsn=0/%X i=0 n=0 of=1 due=0/%X thru=0/%X pull=0 tl=1 sort=s id=%s "+
		"key=%s:%020d\r\n", 0x1000000+counter, 0x1000000+counter, 0x1000000+counter, id, actor, counter)
	return b.Bytes()
}
