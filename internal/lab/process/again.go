//go:build unix

package process

import (
	"context"
	"errors"
	"os/exec"
	"regexp"
	"time"
)

// The time for which a command is run again, and the pause between two runs.
const (
	againFor   = 3 * time.Minute
	againPause = 250 * time.Millisecond
)

// silent is what a command says that gave a server up which did not answer in time, or hung up.
var silent = regexp.MustCompile(
	`(?i)time-?out|timed out|deadline exceeded|connection re(set|fused)|failed to connect|broken pipe|unexpected EOF|no responders|no servers available|starting up|shutting down`)

// Again runs a command that may be run twice, such as outflow init, and again while it ends with exit code 1
// because a server did not answer in time: on a machine that stands still for a while that is no failure. It
// returns what the last run printed.
func Again(ctx context.Context, command func() *exec.Cmd) ([]byte, error) {
	return again(ctx, command, againFor)
}

func again(ctx context.Context, command func() *exec.Cmd, limit time.Duration) ([]byte, error) {
	for begun := time.Now(); ; {
		cmd := command()
		out, err := cmd.CombinedOutput()
		exit, ended := errors.AsType[*exec.ExitError](err)
		if !ended || exit.ExitCode() != 1 || !silent.Match(out) || ctx.Err() != nil ||
			time.Since(begun) > limit {
			return out, err
		}
		select {
		case <-ctx.Done():
			return out, err
		case <-time.After(againPause):
		}
	}
}
