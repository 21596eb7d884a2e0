//go:build !linux

package socket

import "time"

// LeavePoller does nothing here: the socket stays with Go's network poller.
func (s *Conn) LeavePoller() error { return nil }

func sendTimeout(int, time.Duration) error { return nil }

func sleep(time.Duration) {}
