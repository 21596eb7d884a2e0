// Package natstest gives tests real NATS servers with JetStream: in this process, in a process that can be
// killed, or as a cluster.
package natstest

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

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

// Connect connects until the test ends, with the patience that a busy machine needs.
func Connect(t testing.TB, url string, options ...nats.Option) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect(url, append(options, nats.Timeout(time.Minute))...)
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	must.Succeed(t, err)
	return nc, js
}
