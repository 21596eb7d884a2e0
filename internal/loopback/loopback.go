// Package loopback finds free TCP ports for servers that must come back on the port that they had.
package loopback

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Below the ephemeral ranges of Linux (from 32768) and macOS (from 49152): an outgoing connection can't take the port while its
// server is down.
const (
	first = 20000 // inclusive
	end   = 32000 // exclusive
)

// given are the ports that this process has handed out: whoever has one may not have bound it yet.
var given struct {
	sync.Mutex
	ports map[int]bool
}

// Port returns a TCP port that was free on 127.0.0.1 a moment ago, and that it has not returned before. Another process can still
// take it first, so a caller that can't bind it asks for the next one.
func Port() (int, error) {
	given.Lock()
	defer given.Unlock()
	if given.ports == nil || len(given.ports) > (end-first)/2 { // a process that lives so long has given most of them back
		given.ports = map[int]bool{}
	}
	for range 100 {
		port := first + rand.IntN(end-first)
		if given.ports[port] {
			continue
		}
		l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		given.ports[port] = true
		return port, l.Close()
	}
	return 0, errors.New("no free TCP port on 127.0.0.1 between 20000 and 31999")
}
