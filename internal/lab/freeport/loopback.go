//go:build unix

// Package freeport finds free TCP ports for servers that must come back on the port that they had.
package freeport

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// Below the ephemeral ranges of Linux (from 32768) and macOS (from 49152): an outgoing connection can't take
// the port while its server is down.
const (
	first = 20000 // inclusive
	end   = 32000 // exclusive
	block = 50    // ports that one process has at a time
)

// mine are the blocks of ports that this process has claimed. Whoever has a port may not have bound it yet,
// or may be between two servers on it: that it is free says nothing.
var mine struct {
	sync.Mutex
	claims map[int]net.PacketConn // by the first port of the block, held for the life of the process
	left   []int                  // ports that were not handed out yet
}

// Port returns a TCP port that was free on 127.0.0.1 a moment ago, that it has not returned before, and that
// no other process gets from it while this one lives.
func Port() (int, error) {
	mine.Lock()
	defer mine.Unlock()
	for again := false; ; {
		for len(mine.left) > 0 {
			port := mine.left[0]
			mine.left = mine.left[1:]
			if free(port) { // else somebody has it who doesn't ask here
				return port, nil
			}
		}
		switch begin, claim, ok := claimBlock(); {
		case ok:
			if mine.claims == nil {
				mine.claims = map[int]net.PacketConn{}
			}
			mine.claims[begin] = claim
			mine.left = portsFrom(begin)
		case again:
			return 0, errors.New("no free TCP port on 127.0.0.1 between 20000 and 31999")
		default: // a process that has had so many has given most of them back
			again = true
			for begin := range mine.claims {
				mine.left = append(mine.left, portsFrom(begin)...)
			}
		}
	}
}

// claimBlock takes a block that no process has, this one included. The UDP port of its first number is the
// claim: the system gives it to one process only, and takes it back from a dead one.
func claimBlock() (begin int, claim net.PacketConn, ok bool) {
	const blocks = (end - first) / block
	offset := rand.IntN(blocks)
	for i := range blocks {
		begin = first + (offset+i)%blocks*block
		if claim, ok = claimAt(begin); ok {
			return begin, claim, true
		}
	}
	return 0, nil, false
}

func claimAt(begin int) (claim net.PacketConn, ok bool) {
	claim, err := net.ListenPacket("udp4", address(begin))
	return claim, err == nil
}

func portsFrom(begin int) []int {
	ports := make([]int, block)
	for i := range ports {
		ports[i] = begin + i
	}
	return ports
}

// free tells whether nobody listens on the port. It does not listen itself: a child that another goroutine
// starts has a copy of every socket until it has become the other program, and a copy that listens would keep
// the port for longer than this call.
func free(port int) bool {
	syscall.ForkLock.RLock()
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(socket)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return false
	}
	defer syscall.Close(socket)
	if err := syscall.SetsockoptInt(socket, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return false
	}
	return syscall.Bind(socket, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}) == nil
}

// Closed returns when nobody listens on a port any more on which this process has just closed its listener: a
// copy that a child has (see free) may keep it a moment longer. Whoever else has taken it is not waited for.
func Closed(port int) {
	for range 1000 {
		if free(port) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
