// Package hangup takes SIGHUP from the first moment at which a program can: a service manager may send it to
// a process that it has just started, and the default disposition would end it.
//
// It imports nothing but what it needs, because Go initializes packages in the order of what they import: the
// other packages of the program take milliseconds.
package hangup

import (
	"os"
	"os/signal"
	"syscall"
)

var (
	signals = make(chan os.Signal, 1)
	ignored = signal.Ignored(syscall.SIGHUP) // by whoever started the process: nohup does
)

func init() { signal.Notify(signals, syscall.SIGHUP) }

// Signals returns the SIGHUPs of this process, one at least if there was one before. None of them ends it.
func Signals() <-chan os.Signal { return signals }

// End sends them to c, also one that came before, for a command that is to end with its terminal; unless the
// process was started to outlive it.
func End(c chan os.Signal) {
	if ignored {
		return
	}
	signal.Notify(c, syscall.SIGHUP)
	signal.Stop(signals)
	select {
	case s := <-signals:
		c <- s
	default:
	}
}
