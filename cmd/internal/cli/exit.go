package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// The exit codes.
const (
	exitClean = iota
	exitUnexpected
	exitUsage
	exitFatal
	exitGap
	exitPoison
)

// report prints what went wrong, if something did, and returns the exit code.
func (a *App) report(ctx context.Context, cmd *cobra.Command, err error) int {
	switch {
	case err == nil:
		return exitClean
	case errors.As(err, new(ended)):
		return exitCode(err)
	case !a.started:
		fmt.Fprintf(a.Stderr, "%s: %s\nsee %s --help\n", a.Name, trim(err), cmd.CommandPath())
		return exitUsage
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		a.say(context.Cause(ctx), exitUnexpected)
		return exitUnexpected
	}
	return a.fail(err)
}

func (a *App) fail(err error) int {
	a.say(err, exitCode(err))
	return exitCode(err)
}

// panicked ends the process with what it says of a panic: the stack, and as the last line what has happened.
func (a *App) panicked(v any, stack []byte) {
	if log := a.log.Load(); log != nil {
		a.log.Store(log.With("stack", string(stack)))
	} else {
		_, _ = a.Stderr.Write(stack) // there is no other place for it
	}
	a.endAtOnce(&outbox.Fault{Code: "panic", Message: fmt.Sprintf("panic: %v", v)})
}

// endAtOnce ends the process without waiting for anything.
func (a *App) endAtOnce(err error) {
	a.line.Stop()
	a.say(err, exitUnexpected)
	os.Exit(exitUnexpected)
}

// say prints why the process ends: as the last line of the log, where that is JSON.
func (a *App) say(err error, code int) {
	f, log := outbox.FaultOf(err), a.log.Load()
	switch {
	case log != nil && f != nil:
		end := checkpoint.NewEnd(f)
		entry, _ := finding.Of(f.Code)
		log.Error(end.Message, "code", f.Code, "class", end.Class, "hint", cmp.Or(f.Hint, entry.Hint),
			"exit", code)
		return
	case log != nil:
		log.Error(trim(err), "exit", code)
		return
	}
	a.printf(a.Stderr, "%s: %s\n", a.Name, finding.Message(err))
	if f != nil {
		if _, ok := finding.Of(f.Code); ok {
			fmt.Fprintf(a.Stderr, "code %s: see `%s explain %[1]s`\n", f.Code, a.Name)
		}
	}
	if a.where != nil && outbox.ClassOf(err) != outbox.Usage { // nothing was connected to
		fmt.Fprintf(a.Stderr, "at %v\n", a.where)
	}
}

func trim(err error) string { return strings.TrimRight(err.Error(), "\n") }

// exitCode returns the exit code that stands for an error's class. A server that can't be reached is nothing
// unexpected: a command that runs once says so as of any set-up that cannot work. (run waits for it instead,
// and does not end.)
func exitCode(err error) int {
	var e ended
	if errors.As(err, &e) {
		return int(e)
	}
	if f := outbox.FaultOf(err); f != nil && (f.Code == postgres.CodeConnect || f.Code == sink.CodeConnect) {
		return exitFatal
	}
	switch outbox.ClassOf(err) {
	case outbox.Fatal:
		return exitFatal
	case outbox.Gap:
		return exitGap
	case outbox.Poison:
		return exitPoison
	case outbox.Usage:
		return exitUsage
	}
	return exitUnexpected
}
