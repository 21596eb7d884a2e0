//go:build !linux

package replication

import "time"

// unpoll does nothing here: the socket stays with Go's network poller.
func (w *wire) unpoll() error { return nil }

func sendTimeout(int, time.Duration) error { return nil }

func rest(time.Duration) {}
