package socket

import (
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// LeavePoller takes the socket out of Go's network poller: from here on a goroutine that reads blocks its
// thread, and data that no goroutine waits for wakes nothing. It does nothing during a read, or where the
// connection is no socket. Deadlines that were set before no longer hold.
func (s *Conn) LeavePoller() error {
	conn, ok := s.Conn.(syscall.Conn)
	if !ok || !s.reading.TryLock() {
		return nil
	}
	defer s.reading.Unlock()
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var fd int
	var dupErr error
	if err := raw.Control(func(old uintptr) {
		fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return err
	}
	if dupErr != nil {
		return os.NewSyscallError("dup", dupErr)
	}
	if err := s.Conn.Close(); err != nil { // the poller forgets the socket, which lives on in fd
		unix.Close(fd)
		return err
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		unix.Close(fd)
		return os.NewSyscallError("set blocking", err)
	}
	s.file.Store(os.NewFile(uintptr(fd), "replication connection"))
	return nil
}

// sendTimeout limits how long a write may block; 0: it does not.
func sendTimeout(fd int, d time.Duration) error {
	tv := unix.NsecToTimeval(d.Nanoseconds())
	return os.NewSyscallError("setsockopt", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO,
		&tv))
}

// sleep sleeps in the kernel: a timer of Go's would wake the poller as well.
func sleep(d time.Duration) {
	ts := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&ts, nil) // a signal only shortens it
}
