package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/outbox"
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
func (a *app) report(ctx context.Context, cmd *cobra.Command, err error) int {
	switch {
	case err == nil:
		return exitClean
	case !a.started:
		fmt.Fprintf(a.stderr, "outflow: %s\nsee %s --help\n", trim(err), cmd.CommandPath())
		return exitUsage
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		fmt.Fprintf(a.stderr, "outflow: %s\n", trim(context.Cause(ctx)))
		return exitUnexpected
	}
	fmt.Fprintf(a.stderr, "outflow: %s\n", trim(err))
	return exitCode(err)
}

func trim(err error) string { return strings.TrimRight(err.Error(), "\n") }

// exitCode returns the exit code that stands for an error's class.
func exitCode(err error) int {
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
