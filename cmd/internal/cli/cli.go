// Package cli holds the command lines: what the binaries outflow and outflow-lab share, and the commands of
// the service and of those who operate it.
package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/pipeline"
)

// App is what all commands of a binary share.
type App struct {
	Name           string // of the binary
	Stdout, Stderr io.Writer

	// Arm, if set, reads the faults that a test wants from the environment, and returns the environment
	// without them.
	Arm func(environ []string) (Faults, []string, error)

	faults  Faults
	environ []string
	started bool           // the command line was valid, and a command runs
	signals chan os.Signal // what is sent to it ends the command, as SIGTERM does

	line *progress.Line // of the command that runs

	args   config.Args                   // the settings of its command line
	load   func() (config.Config, error) // reads the settings of the command that runs, again
	repeat finding.Options               // of its command line, in commands that are suggested
	where  *wiring.Where                 // the servers of its settings; nil: it has none, or they are wrong
	// for what ends a process whose standard error is JSON; nil: text
	log atomic.Pointer[slog.Logger]
}

// Faults are injected by tests.
type Faults interface {
	// Decorate puts them around what a pipeline is connected to.
	Decorate(c *pipeline.Config)
	// Hit is called at each named step of outflow init --snapshot.
	Hit(step string)
}

// Main runs the command that the command line names, until it is done or a signal ends it, and exits with its
// code.
func Main(a *App, root func(a *App) *cobra.Command) {
	a.Stdout, a.Stderr, a.environ = os.Stdout, os.Stderr, os.Environ()
	a.throughLine()
	ctx, signals, stop := interruptible(context.Background(), a.endAtOnce)
	a.signals = signals
	crash.Set(a.panicked)
	defer crash.Guard()
	code := a.run(ctx, root, os.Args[1:])
	stop()
	os.Exit(code)
}

func (a *App) run(ctx context.Context, root func(a *App) *cobra.Command, args []string) int {
	if a.Arm != nil {
		var err error
		if a.faults, a.environ, err = a.Arm(a.environ); err != nil {
			return a.fail(err)
		}
	}
	if a.line == nil { // a test
		a.throughLine()
	}
	r := root(a)
	a.addSettings(r, args)
	r.SetArgs(append([]string{}, args...)) // nil would mean those of the process
	cmd, err := r.ExecuteContextC(ctx)
	return a.report(ctx, cmd, err)
}

// help lists the commands in the order in which they are used
func init() { cobra.EnableCommandSorting = false }

// configure takes the settings of the command that runs from its command line.
func (a *App) configure() (config.Config, error) {
	a.load = func() (config.Config, error) { return config.Load(a.args, a.environ, checks...) }
	repeat := a.args.Repeat(a.environ)
	a.repeat = repeat
	a.line.SetPrint(func(u progress.Update) { fmt.Fprintln(a.line.Stderr(), repeat.In(u.Text)) })
	cfg, err := a.load()
	if err == nil {
		where := wiring.WhereIs(cfg)
		a.where = &where
	}
	return cfg, err
}

// printf prints a text for people, in which each suggested command is complete.
func (a *App) printf(w io.Writer, format string, args ...any) {
	_, _ = io.WriteString(w, a.repeat.In(fmt.Sprintf(format, args...)))
}

// printLines prints the lines of a report on standard output.
func (a *App) printLines(lines []string) {
	for _, line := range lines {
		a.printf(a.Stdout, "%s\n", line)
	}
}

// printJSON prints a report on standard output.
func (a *App) printJSON(report any) error {
	e := json.NewEncoder(a.Stdout)
	e.SetIndent("", "  ")
	return e.Encode(report)
}
