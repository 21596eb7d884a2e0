// Command outflow publishes the inserts of a PostgreSQL outbox table to a NATS JetStream stream, in order and exactly once.
//
// It prints results on standard output, errors and the log on standard error. The exit code says what follows: 0 a clean stop,
// 1 something unexpected, 2 a wrong command line or configuration, 3 a set-up that can't work, 4 a gap or a divergence that an
// operator has to decide about, 5 a row that can't be published.
package main

import (
	"context"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/lab/bench"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

func main() {
	natsserver.Child() // outflow torture starts its NATS servers as processes of this program
	bench.Child()      // outflow bench its writers, and what it compares with
	ctx, stop := interruptible(context.Background())
	code := run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program: the command that args name, until it is done or ctx is, and its exit code.
func run(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	a := &app{environ: environ, stdout: stdout, stderr: stderr}
	root := a.root()
	root.SetArgs(append([]string{}, args...)) // nil would mean those of the process
	cmd, err := root.ExecuteContextC(ctx)
	return a.report(ctx, cmd, err)
}

// app is what all commands share.
type app struct {
	environ        []string
	stdout, stderr io.Writer
	started        bool // the command line was right, and a command runs
}

func init() { cobra.EnableCommandSorting = false } // help lists the commands in the order in which they are used
