package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/internal/crash"
)

// echo is how soon after it the same signal is the same wish: timeout(1) and some supervisors signal a
// process and its group.
const echo = 200 * time.Millisecond

// interruptible returns a context that the first SIGINT or SIGTERM cancels, with the signal's name as the
// cause. At a second one atOnce is to end the process: a clean stop was asked for and took too long. So it is
// for other signals that are sent to the channel. stop takes the signals back.
func interruptible(ctx context.Context, atOnce func(error)) (_ context.Context, signals chan os.Signal,
	stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals = make(chan os.Signal, 3)
	stopped := make(chan struct{})
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		defer crash.Guard()
		var first os.Signal
		var at time.Time
		for {
			select {
			case s := <-signals:
				if first != nil && s == first && time.Since(at) < echo {
					continue
				}
				if first != nil {
					atOnce(fmt.Errorf("stopped at once by a second signal (%v)", s))
				}
				first, at = s, time.Now()
				cancel(fmt.Errorf("stopped by a signal (%v)", s))
			case <-stopped:
				return
			}
		}
	}()
	return ctx, signals, func() {
		signal.Stop(signals)
		close(stopped)
		cancel(nil)
	}
}
