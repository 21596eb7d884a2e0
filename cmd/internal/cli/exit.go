package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

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
	case !a.started:
		fmt.Fprintf(a.Stderr, "%s: %s\nsee %s --help\n", a.Name, trim(err), cmd.CommandPath())
		return exitUsage
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		fmt.Fprintf(a.Stderr, "%s: %s\n", a.Name, trim(context.Cause(ctx)))
		return exitUnexpected
	}
	return a.fail(err)
}

func (a *App) fail(err error) int {
	fmt.Fprintf(a.Stderr, "%s: %s\n", a.Name, trim(err))
	return exitCode(err)
}

func trim(err error) string { return strings.TrimRight(err.Error(), "\n") }

// exitCode returns the exit code that stands for an error's class. A server that can't be reached is nothing
// unexpected: a command that runs once says so as of any set-up that cannot work. (run waits for it instead,
// and does not end.)
func exitCode(err error) int {
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
