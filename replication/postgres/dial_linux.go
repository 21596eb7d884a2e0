package postgres

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// limitUnacknowledged makes the kernel give a connection up when sent data stays unacknowledged for
// peerTimeout: keepalive probes alone say nothing while a status is under way to a peer that is gone.
func limitUnacknowledged(network, _ string, c syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	var err error
	if e := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(peerTimeout.Milliseconds()))
	}); e != nil {
		return e
	}
	return err
}
