//go:build !linux

package postgres

import "syscall"

// limitUnacknowledged does nothing here: the write deadline and TCP keepalive find a peer that is gone, only
// later.
func limitUnacknowledged(string, string, syscall.RawConn) error { return nil }
