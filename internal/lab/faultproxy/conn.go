package faultproxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

const (
	chunkSize = 32 << 10
	// While there is a delay, this many chunks may be under way; the sender is not slowed down by the delay
	// up to 8 MiB. Otherwise one is, so that back-pressure passes through.
	maxChunks = 256
	slice     = 50 * time.Millisecond // what is written at once under a rate takes about so long
)

// conn is a connection and its continuation.
type conn struct {
	p    *Proxy
	ends [2]*net.TCPConn // the client's, the server's
	once sync.Once
	done chan struct{} // closed when the connection has ended
}

// chunk is bytes under way; no bytes are the end of the direction.
type chunk struct {
	data []byte
	at   time.Time // when it was read
}

// reset ends the connection with RST on both sides.
func (c *conn) reset() { c.end(reset) }

// close ends the connection; both directions have ended in order, or it was reset.
func (c *conn) close() { c.end(func(t *net.TCPConn) { _ = t.Close() }) }

func (c *conn) end(how func(*net.TCPConn)) {
	c.once.Do(func() {
		close(c.done)
		for _, t := range c.ends {
			how(t)
		}
	})
}

// pass passes on the bytes of a direction until its end.
func (c *conn) pass(d Direction) {
	from, to := c.ends[d], c.ends[1-d]
	under := make(chan chunk, maxChunks)
	taken := make(chan struct{}, 1) // something was taken from under
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(under)
		if err := c.read(d, from, under, taken); err != nil {
			c.reset()
		}
	})
	if err := c.write(d, to, under, taken); err != nil {
		c.reset()
	}
	reader.Wait()
}

var errEnded = errors.New("the connection has ended")

// read reads until the direction's end, which it hands on as well.
func (c *conn) read(d Direction, from *net.TCPConn, under chan<- chunk, taken <-chan struct{}) error {
	buf := make([]byte, chunkSize)
	for {
		n, err := from.Read(buf)
		if err != nil && !errors.Is(err, io.EOF) {
			// nor is a reset seen on the other side of a dead line
			if mutedErr := c.unmuted(d, true); mutedErr != nil {
				return mutedErr
			}
			return err
		}
		next := chunk{bytes.Clone(buf[:n]), time.Now()}
		if err := c.unmuted(d, n == 0); err != nil {
			return err
		}
		for {
			f, changed := c.p.now(d)
			if n > 0 && f.dropped {
				break
			}
			if len(under) == 0 || f.delay > 0 && len(under) < maxChunks {
				under <- next
				break
			}
			select {
			case <-taken:
			case <-changed:
			case <-c.done:
				return errEnded
			}
		}
		if err != nil {
			return nil
		}
	}
}

// unmuted waits until the direction is not muted. A dropped one is as good, except for its end.
func (c *conn) unmuted(d Direction, end bool) error {
	for {
		f, changed := c.p.now(d)
		if !f.muted || f.dropped && !end {
			return nil
		}
		select {
		case <-changed:
		case <-c.done:
			return errEnded
		}
	}
}

// write writes what comes, each chunk when it is due, at the direction's rate.
func (c *conn) write(d Direction, to *net.TCPConn, under <-chan chunk, taken chan<- struct{}) error {
	for {
		var next chunk
		var ok bool
		select {
		case next, ok = <-under:
		case <-c.done:
			return errEnded
		}
		if !ok {
			return nil
		}
		select {
		case taken <- struct{}{}:
		default:
		}
		if len(next.data) == 0 {
			if err := c.arrive(d, next); err != nil {
				return err
			}
			return to.CloseWrite()
		}
		for len(next.data) > 0 {
			if err := c.arrive(d, next); err != nil {
				return err
			}
			n, dropped := c.take(d, len(next.data))
			if !dropped {
				if _, err := to.Write(next.data[:n]); err != nil {
					return err
				}
				c.p.count(d, n)
			}
			next.data = next.data[n:]
		}
	}
}

// arrive waits until a chunk may arrive: its delay is over, the line is free, and the direction is not muted.
func (c *conn) arrive(d Direction, next chunk) error {
	for {
		f, changed := c.p.now(d)
		end := len(next.data) == 0
		if f.dropped && !end {
			return nil
		}
		due := next.at.Add(f.delay)
		if f.free.After(due) {
			due = f.free
		}
		wait := time.Until(due)
		if !f.muted && wait <= 0 {
			return nil
		}
		var timer <-chan time.Time // never, while muted
		if !f.muted {
			timer = time.After(wait)
		}
		select {
		case <-changed:
		case <-timer:
		case <-c.done:
			return errEnded
		}
	}
}

// take says how many of n bytes may be written at once, and takes the line for as long as they need.
func (c *conn) take(d Direction, n int) (now int, dropped bool) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	f := &c.p.flows[d]
	if f.dropped {
		return n, true
	}
	if f.rate <= 0 {
		return n, false
	}
	n = max(1, min(n, int(float64(f.rate)*slice.Seconds())))
	start := time.Now()
	if f.free.After(start) {
		start = f.free
	}
	f.free = start.Add(time.Duration(float64(n) / float64(f.rate) * float64(time.Second)))
	return n, false
}

func (p *Proxy) count(d Direction, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flows[d].passed += uint64(n)
}
