// Package socket is the replication connection below TLS, outside Go's network poller on Linux: it lets the
// many small messages of a busy stream gather, and reads them together.
//
// It is internal to Outflow: its API may change at any time.
package socket
