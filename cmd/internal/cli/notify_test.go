package cli

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/pipeline"
)

// systemd listens where a service manager would, and returns what it is told next.
func systemd(t *testing.T) (told func() string) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	must.Succeed(t, err)
	t.Cleanup(func() { socket.Close() })
	t.Setenv("NOTIFY_SOCKET", name)
	buffer := make([]byte, 4096)
	return func() string {
		t.Helper()
		must.Succeed(t, socket.SetReadDeadline(time.Now().Add(time.Minute)))
		n, err := socket.Read(buffer)
		must.Succeed(t, err)
		return string(buffer[:n])
	}
}

func TestSystemdIsToldHowTheProcessIs(t *testing.T) {
	told := systemd(t)
	var s pipeline.Status
	n := newNotifier(func() pipeline.Status { return s }, slog.New(slog.DiscardHandler))
	now := time.Now()
	for _, c := range []struct {
		status pipeline.Status
		want   string
	}{
		{pipeline.Status{State: pipeline.StateWaiting, Since: now, Error: "no NATS\nat all"},
			"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=waiting: no NATS\nWATCHDOG=1"},
		{pipeline.Status{State: pipeline.StateStandby, Since: now}, "READY=1\nSTATUS=standby\nWATCHDOG=1"},
		{pipeline.Status{State: pipeline.StateStandby, Since: now}, "WATCHDOG=1"},
		{pipeline.Status{State: pipeline.StateFault, Since: now, Error: "slot_missing: it is gone",
			Fault: &pipeline.Fault{}}, "STATUS=fault: slot_missing: it is gone\nWATCHDOG=1"},
		{pipeline.Status{State: pipeline.StateConnecting, Since: now.Add(-time.Hour)}, "STATUS=connecting"},
	} {
		s = c.status
		n.tell(now)
		if got := told(); got != c.want {
			t.Errorf("%s: told %q, want %q", s.State, got, c.want)
		}
	}
	n = newNotifier(n.status, n.log)
	s = pipeline.Status{State: pipeline.StateFault, Fault: &pipeline.Fault{}}
	n.tell(now)
	if got := told(); !strings.HasPrefix(got, "READY=1\n") {
		t.Errorf("a start that ends at a fault that is held: told %q", got)
	}
}

// A reload may take longer than the watchdog waits for a sign of life.
func TestSystemdIsToldOfAReload(t *testing.T) {
	told := systemd(t)
	t.Setenv("WATCHDOG_USEC", "300000")
	t.Setenv("WATCHDOG_PID", "")
	n := newNotifier(func() pipeline.Status { return pipeline.Status{State: pipeline.StateStandby} },
		slog.New(slog.DiscardHandler))
	if n.interval > 100*time.Millisecond {
		t.Errorf("a sign of life every %v", n.interval)
	}
	hangup, goOn := make(chan os.Signal), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		supervised(ctx, hangup, func(context.Context) { <-goOn }, n)
	}()
	next := func() (got string) {
		t.Helper()
		for got = "WATCHDOG=1"; got == "WATCHDOG=1"; {
			got = told()
		}
		return got
	}
	next()
	hangup <- os.Interrupt // whatever it is
	if got := next(); !strings.HasPrefix(got, "RELOADING=1\nMONOTONIC_USEC=") {
		t.Errorf("told %q", got)
	}
	for range 5 {
		if got := told(); got != "WATCHDOG=1" {
			t.Errorf("during the reload: told %q", got)
		}
	}
	close(goOn)
	if got := next(); got != "READY=1\nWATCHDOG=1" {
		t.Errorf("told %q", got)
	}
	cancel()
	<-ended
}

// systemd reads nothing for a while: the process can end nevertheless, and what did not arrive is told again.
func TestASystemdThatDoesNotListenHoldsNothingUp(t *testing.T) {
	told := systemd(t)
	full := 0
	for notify("full") == nil {
		full++
	}
	n := newNotifier(func() pipeline.Status { return pipeline.Status{State: pipeline.StateRunning} },
		slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	supervised(ctx, make(chan os.Signal), nil, n)
	for range full {
		told()
	}
	n.tell(time.Now())
	if got := told(); got != "READY=1\nSTATUS=running" {
		t.Errorf("told %q", got)
	}
}

// A reload does not make a start a service that is ready.
func TestAReloadDuringAStartDoesNotSayThatItIsReady(t *testing.T) {
	told := systemd(t)
	s := pipeline.Status{State: pipeline.StateWaiting, Since: time.Now()}
	n := newNotifier(func() pipeline.Status { return s }, slog.New(slog.DiscardHandler))
	hangup := make(chan os.Signal, 1)
	hangup <- os.Interrupt
	ctx, cancel := context.WithCancel(t.Context())
	supervised(ctx, hangup, func(context.Context) { cancel() }, n)
	n.tell(time.Now())
	for range 2 {
		if got := told(); !strings.HasPrefix(got, "EXTEND_TIMEOUT_USEC=") {
			t.Errorf("told %q", got)
		}
	}
}

func TestWithoutSystemdNobodyIsTold(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	var log strings.Builder
	n := newNotifier(func() pipeline.Status { return pipeline.Status{State: pipeline.StateRunning} },
		slog.New(slog.NewTextHandler(&log, nil)))
	n.tell(time.Now())
	if log.Len() > 0 {
		t.Error(log.String())
	}
}
