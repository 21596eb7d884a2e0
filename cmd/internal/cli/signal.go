package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// echo is how soon after it the same signal is the same wish: timeout(1) and some supervisors signal a
// process and its group.
const echo = 200 * time.Millisecond

// interruptible returns a context that the first SIGINT or SIGTERM cancels, with the signal's name as the
// cause. A second one ends the process at once, with exit code 1: a clean stop was asked for and took too
// long. stop takes the signals back.
func interruptible(ctx context.Context, name string) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 2)
	stopped := make(chan struct{})
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		var first os.Signal
		var at time.Time
		for {
			select {
			case s := <-signals:
				if first != nil && s == first && time.Since(at) < echo {
					continue
				}
				if first != nil {
					fmt.Fprintf(os.Stderr, "%s: stopped at once by a second signal (%v)\n", name, s)
					os.Exit(exitUnexpected)
				}
				first, at = s, time.Now()
				cancel(fmt.Errorf("stopped by a signal (%v)", s))
			case <-stopped:
				return
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(stopped)
		cancel(nil)
	}
}

// hangups returns the SIGHUPs that come from now on: they no longer end the process, to its very end.
func hangups() <-chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP)
	return c
}
