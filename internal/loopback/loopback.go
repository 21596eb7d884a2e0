// Package loopback finds free TCP ports for servers that must come back on the port that they had.
package loopback

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
)

// Below the ephemeral ranges of Linux (from 32768) and macOS (from 49152): an outgoing connection can't take the port while its
// server is down.
const (
	first = 20000 // inclusive
	end   = 32000 // exclusive
)

// Port returns a TCP port that was free on 127.0.0.1 a moment ago. Another process can still take it first, so a caller that
// can't bind it asks for the next one.
func Port() (int, error) {
	for range 100 {
		port := first + rand.IntN(end-first)
		l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		return port, l.Close()
	}
	return 0, errors.New("no free TCP port on 127.0.0.1 between 20000 and 31999")
}
