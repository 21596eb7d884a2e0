// Package faultproxy is a TCP proxy that does to connections what networks do: it resets them, refuses them,
// lets them hang half open, loses the bytes of one direction, delays and slows them down. It knows nothing of
// the protocol above, so it stands before PostgreSQL and NATS alike.
//
// Faults hold for the connections there are and for new ones, until they are taken back (Heal takes all
// back). Cut is a moment, not a state.
package faultproxy

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"sync"
	"time"
)

// Direction is the way that bytes go.
type Direction int

// The directions: from who connected to the proxy's target, and back.
const (
	ToServer Direction = iota
	ToClient
)

// Both directions, for faults that take no direction.
var directions = [...]Direction{ToServer, ToClient}

func (d Direction) String() string {
	if d == ToServer {
		return "to server"
	}
	return "to client"
}

// dialTimeout is how long the target may take to accept; the client waits as long.
const dialTimeout = 5 * time.Second

// Proxy listens on 127.0.0.1 and passes each connection on to its target. Its methods may be called from any
// goroutine.
type Proxy struct {
	target   string
	listener *net.TCPListener
	ctx      context.Context // done: Close was called
	stop     context.CancelFunc
	all      sync.WaitGroup // every goroutine

	mu       sync.Mutex
	refuse   bool
	flows    [len(directions)]flow
	changed  chan struct{} // closed when a fault changes, and made anew
	conns    map[*conn]struct{}
	accepted int
}

// flow is one direction of all connections.
type flow struct {
	muted, dropped bool
	delay          time.Duration
	rate           int       // bytes per second, 0: no limit
	free           time.Time // when the line has sent what it was given, at that rate
	passed         uint64    // bytes
}

// New starts a proxy to target (host:port), which need not listen yet.
func New(target string) (*Proxy, error) {
	if _, _, err := net.SplitHostPort(target); err != nil {
		return nil, fmt.Errorf("proxy to %q: %w", target, err)
	}
	listener, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	p := &Proxy{target: target, listener: listener, changed: make(chan struct{}), conns: map[*conn]struct{}{}}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.all.Go(p.accept)
	return p, nil
}

// To starts a proxy to the host and port of a URL (postgres://, nats://) and returns the same URL through the
// proxy as well.
func To(target string) (*Proxy, string, error) {
	u, err := url.Parse(target)
	if err != nil {
		return nil, "", err
	}
	p, err := New(u.Host)
	if err != nil {
		return nil, "", err
	}
	u.Host = p.Addr()
	return p, u.String(), nil
}

// Addr returns the host:port to connect to. It never changes.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Close resets all connections and returns when every goroutine has ended. Further calls do nothing.
func (p *Proxy) Close() {
	p.stop()
	_ = p.listener.Close() // it may be closed already
	p.Cut()
	p.all.Wait()
}

// Cut resets (TCP RST) all connections there are, both sides of each. Bytes under way are lost.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.reset()
	}
}

// Refuse makes the proxy reset new connections as soon as they are made. Those there are stay.
func (p *Proxy) Refuse(on bool) { p.change(func() { p.refuse = on }) }

// Mute holds back the bytes of one direction, also its end: the connection stays open, half dead, and the
// sender is stopped by TCP's back-pressure when the buffers between are full. Taken back, everything comes
// after all.
func (p *Proxy) Mute(d Direction, on bool) { p.change(func() { p.flows[d].muted = on }) }

// Drop reads the bytes of one direction and throws them away, also those that Mute holds. A connection that
// lost bytes is of no use any more: follow with Cut before this is taken back.
func (p *Proxy) Drop(d Direction, on bool) { p.change(func() { p.flows[d].dropped = on }) }

// Delay lets every byte of both directions arrive d later: a round trip takes 2d longer. 0: none.
func (p *Proxy) Delay(d time.Duration) {
	p.change(func() {
		for i := range p.flows {
			p.flows[i].delay = d
		}
	})
}

// Rate limits each direction, all connections together, to so many bytes per second. 0: no limit.
func (p *Proxy) Rate(bytesPerSecond int) {
	p.change(func() {
		for i := range p.flows {
			p.flows[i].rate, p.flows[i].free = bytesPerSecond, time.Time{}
		}
	})
}

// Heal takes all faults back.
func (p *Proxy) Heal() {
	p.change(func() {
		p.refuse = false
		for i := range p.flows {
			p.flows[i] = flow{passed: p.flows[i].passed}
		}
	})
}

// Conns returns the number of open connections.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

// Accepted returns the number of connections that were passed on since the start.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Bytes returns how many bytes of a direction were passed on since the start, all connections together.
func (p *Proxy) Bytes(d Direction) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.flows[d].passed
}

// change changes faults and lets everyone who waits look again.
func (p *Proxy) change(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	do()
	close(p.changed)
	p.changed = make(chan struct{})
}

// now returns the state of a direction, and a channel that is closed when it has changed.
func (p *Proxy) now(d Direction) (flow, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.flows[d], p.changed
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.AcceptTCP()
		if p.ctx.Err() != nil {
			if err == nil {
				reset(client)
			}
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // too many open files: the next attempt may do
			continue
		}
		p.mu.Lock()
		refuse := p.refuse
		p.mu.Unlock()
		if refuse {
			reset(client)
			continue
		}
		p.all.Go(func() { p.serve(client) })
	}
}

// serve passes a connection on until its end.
func (p *Proxy) serve(client *net.TCPConn) {
	dialer := net.Dialer{Timeout: dialTimeout}
	server, err := dialer.DialContext(p.ctx, "tcp", p.target)
	if err != nil {
		reset(client)
		return
	}
	c := &conn{p: p, ends: [...]*net.TCPConn{client, server.(*net.TCPConn)}, done: make(chan struct{})}
	if !p.add(c) {
		c.reset()
		return
	}
	var both sync.WaitGroup
	for _, d := range directions {
		both.Go(func() { c.pass(d) })
	}
	both.Wait()
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
	c.close()
}

// add reports false if the proxy refuses or closes by now.
func (p *Proxy) add(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refuse || p.ctx.Err() != nil {
		return false
	}
	p.conns[c] = struct{}{}
	p.accepted++
	return true
}

// reset closes a connection with RST.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // errors say that it is gone already
	_ = c.Close()
}
