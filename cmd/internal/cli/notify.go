package cli

import (
	"context"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/pipeline"
)

// supervised does what a service manager asks of a process that runs: it reloads at each hangup, and tells
// systemd how it is, also during a reload, if systemd wants to know, until ctx ends.
func supervised(ctx context.Context, hangup <-chan os.Signal, reload func(context.Context), n *notifier) {
	tick := time.NewTicker(n.interval)
	defer tick.Stop()
	next, reloaded := hangup, make(chan struct{})
	for {
		n.tell(time.Now())
		select {
		case <-ctx.Done():
			if next == nil {
				<-reloaded
			}
			return
		case <-tick.C:
		case <-next:
			next = nil // one reload at a time
			n.reloads()
			go func() {
				defer crash.Guard()
				reload(ctx)
				reloaded <- struct{}{}
			}()
		case <-reloaded:
			next, n.reloaded = hangup, n.ready
		}
	}
}

// notifier tells systemd (Type=notify) how a process is; where there is no NOTIFY_SOCKET, nobody.
type notifier struct {
	status   func() pipeline.Status
	log      *slog.Logger
	interval time.Duration

	ready    bool   // it was said
	reloaded bool   // it has to be said again
	said     string // the last STATUS
	lost     bool   // systemd does not listen
}

func newNotifier(status func() pipeline.Status, log *slog.Logger) *notifier {
	n := &notifier{status: status, log: log, interval: time.Second}
	if watchdog, err := daemon.SdWatchdogEnabled(false); err == nil && watchdog > 0 {
		n.interval = min(n.interval, watchdog/3)
	}
	return n
}

// startExtension is by how much the time is extended that systemd gives a start: NATS may be away for longer,
// and a process that waits for it is as good as one that systemd starts anew.
const startExtension = "EXTEND_TIMEOUT_USEC=30000000"

// tell tells what has changed, and that the process is alive, if it is. What does not arrive is told again.
func (n *notifier) tell(now time.Time) {
	s := n.status()
	var say []string
	alive := s.Alive(now)
	// what a person has to mend, a restart would find again
	ready := n.ready || s.Ready() || s.Fault != nil
	switch {
	case ready && !n.ready || n.reloaded:
		say = append(say, daemon.SdNotifyReady)
	case !ready && alive:
		say = append(say, startExtension)
	}
	line := statusLine(&s)
	if line != n.said {
		say = append(say, "STATUS="+line)
	}
	if alive {
		say = append(say, daemon.SdNotifyWatchdog)
	}
	if len(say) == 0 {
		return
	}
	err := notify(say...)
	if err == nil {
		n.ready, n.reloaded, n.said = ready, false, line
	} else if !n.lost {
		n.log.Warn("systemd can't be told how this process is", "err", err)
	}
	n.lost = err != nil
}

// reloads tells that a reload begins. A process that is not ready yet goes on to start.
func (n *notifier) reloads() {
	if n.ready {
		_ = notify(daemon.SdNotifyReloading, daemon.SdNotifyMonotonicUsec()) // tell says it if that fails
	}
}

// notifyTimeout is how long systemd may take to make room for a message. While it is busy with something
// else a few of them fill its queue; a process must be able to end then too.
const notifyTimeout = time.Second

// notify tells systemd. daemon.SdNotify would wait for room in its queue for as long as that takes.
func notify(lines ...string) error {
	name := os.Getenv("NOTIFY_SOCKET")
	if name == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(notifyTimeout)); err != nil {
		return err
	}
	_, err = conn.Write([]byte(strings.Join(lines, "\n")))
	return err
}

// statusLine is the state in one line, without figures that change all the time.
func statusLine(s *pipeline.Status) string {
	line := string(s.State)
	if s.Error != "" {
		line += ": " + s.Error
	}
	line, _, _ = strings.Cut(line, "\n")
	return line
}
