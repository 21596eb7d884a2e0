package natstest

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

// ServerProcess is a NATS server in a process of its own, always at the same port and folder.
type ServerProcess = natsserver.Process

// RunChild makes this process the NATS server of a ServerProcess, if it was started as one, and never returns
// then. A package that uses Process calls it first in its TestMain.
func RunChild() { natsserver.Child() }

// Process starts a server as a process of its own and removes it at the end of the test. Options may be left
// out; Tune is not for another process.
func Process(t testing.TB, options ...natsserver.Options) *ServerProcess {
	t.Helper()
	o := one(options)
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	p, err := natsserver.StartProcess(o)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = p.Kill() }) // an error says that it doesn't run
	return p
}
