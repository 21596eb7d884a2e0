// Package natstest gives tests real NATS servers with JetStream: in this process, in a process that can be
// killed, or as a cluster.
package natstest

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

// Server starts a server in this process for this test. Options may be left out; the folder is made if they
// name none.
func Server(t testing.TB, options ...natsserver.Options) *natsserver.Server {
	t.Helper()
	o := one(options)
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	s, err := natsserver.Start(o)
	must.Succeed(t, err)
	t.Cleanup(s.Shutdown)
	return s
}

// one lets anybody in: the tests make URLs and users of their own.
func one(options []natsserver.Options) natsserver.Options {
	var o natsserver.Options
	if len(options) > 0 {
		o = options[0]
	}
	o.Open = o.Password == ""
	return o
}
