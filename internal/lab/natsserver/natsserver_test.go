package natsserver

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
)

func TestMain(m *testing.M) {
	Child()
	goleak.VerifyTestMain(m)
}

func TestStartAgainKeepsPortAndStreams(t *testing.T) {
	t.Parallel()
	o := Options{Dir: t.TempDir(), MaxPayload: 4096}
	for i, want := range []uint64{1, 2} {
		s, err := Start(o)
		must.Succeed(t, err)
		nc, err := nats.Connect(s.URL(), nats.Timeout(time.Minute))
		must.Succeed(t, err)
		js, err := nc.JetStream(nats.MaxWait(time.Minute))
		must.Succeed(t, err)
		if _, err := js.AddStream(&nats.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
			t.Fatal(err)
		}
		ack, err := js.Publish("s", nil)
		if err != nil || ack.Sequence != want {
			t.Errorf("round %d: acknowledgement %+v, %v, want sequence %d", i, ack, err, want)
		}
		if nc.MaxPayload() != 4096 {
			t.Errorf("max payload %d", nc.MaxPayload())
		}
		o.Port = s.Port
		nc.Close()
		s.Shutdown()
	}
}

func TestStartSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	if _, err := Start(Options{}); err == nil {
		t.Error("a server without a folder starts")
	}
	first, err := Start(Options{Dir: t.TempDir()})
	must.Succeed(t, err)
	defer first.Shutdown()
	if _, err := Start(Options{Dir: t.TempDir(), Port: first.Port}); err == nil ||
		!strings.Contains(err.Error(), "in use") {
		t.Errorf("error %v for a port in use", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	if _, err := Start(Options{Dir: file}); err == nil {
		t.Error("a server starts with a file for a folder")
	}
	bad := func(o *server.Options) { o.MaxPayload, o.MaxPending = 100, 10 }
	if _, err := Start(Options{Dir: t.TempDir(), Tune: bad}); err == nil {
		t.Error("impossible options start a server")
	}
}

// TestPasswordIsAskedFor: nobody else on the machine may use a server, unless it is to be open.
func TestPasswordIsAskedFor(t *testing.T) {
	t.Parallel()
	for _, open := range []bool{false, true} {
		s, err := Start(Options{Dir: t.TempDir(), Open: open})
		must.Succeed(t, err)
		defer s.Shutdown()
		nc, err := nats.Connect(s.URL(), nats.Timeout(time.Minute))
		must.Succeed(t, err)
		nc.Close()
		stranger := fmt.Sprintf("nats://127.0.0.1:%d", s.Port)
		for _, url := range []string{stranger, strings.Replace(stranger, "nats://", "nats://outflow:wrong@",
			1)} {
			nc, err := nats.Connect(url, nats.Timeout(time.Minute))
			if (err == nil) != open {
				t.Errorf("open %v: connected with %v", open, err)
			}
			if err == nil {
				nc.Close()
			}
		}
	}
}
