package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/drain"
)

// drainTimeout leaves room for the default durable_after, and for a backlog.
const drainTimeout = 10 * time.Minute

func (a *App) drainCommand() *cobra.Command {
	var asJSON bool
	timeout := drainTimeout
	cmd := a.configured(&cobra.Command{
		Use:   "drain",
		Short: "Publish all that is committed, wait until it is confirmed, say when it is safe to stop",
		Long: `Publishes everything that is committed and waits until all of it is confirmed to
PostgreSQL: before an upgrade or a move of the database, a change of the column mapping, or to end an
installation. Stop the writers first. While rows are still written it goes on, and says how many came.

Where an outflow holds the slot, drain only watches it. Where none does, drain publishes itself. What counts
as confirmed has been in the stream for sink.durable_after: that is how long it takes at least.

Exit code 0 when everything is confirmed, 1 when that was not so within the timeout or before a signal
(nothing is lost by that: run it again), 3 to 5 as of outflow run.`,
		Example: "  outflow drain --config outflow.yaml\n  outflow drain --timeout 1h --json",
	}, func(ctx context.Context, cfg config.Config) error {
		return a.drain(ctx, cfg, timeout, asJSON)
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().DurationVar(&timeout, "timeout", timeout, "give up after this time; 0: never")
	return cmd
}

func (a *App) drain(ctx context.Context, cfg config.Config, timeout time.Duration, asJSON bool) error {
	a.line.Step("at %v", a.where)
	a.line.Step("Stop the writers first: drain ends when no event is left, and goes on for as long as rows " +
		"are written.")
	limited, cancel := ctx, context.CancelFunc(func() {})
	if timeout > 0 {
		limited, cancel = context.WithTimeout(ctx, timeout)
	}
	defer cancel()
	if cfg.Log.Level == slog.LevelInfo {
		cfg.Log.Level = slog.LevelWarn // the steps are shown
	}
	r, err := drain.Run(limited, cfg, newLogger(a.Stderr, cfg))
	if errors.Is(err, context.DeadlineExceeded) && limited.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("not drained within %v: %s", timeout, r)
	}
	if asJSON {
		return errors.Join(err, a.printJSON(r))
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(a.Stdout, "drained: everything up to %v is published and confirmed; safe to stop, upgrade "+
		"or move PostgreSQL\n", r.Confirmed)
	if r.Holder != 0 {
		fmt.Fprintf(a.Stdout, "The outflow that holds the slot (server process %d) still runs: stop it, "+
			"and those that stand by, before an upgrade.\n", r.Holder)
	}
	return nil
}
