package cli

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	lifecycle "github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/partition"
	"github.com/outflowhq/outflow/outbox"
)

// partitionTimeout is far above what a run takes that finds much to do.
const partitionTimeout = 6 * time.Hour

// limited is the context of a run. Who accepts rows waits until all is read, whatever that takes: in no other
// way would they ever go.
func limited(ctx context.Context, o partition.Options) (context.Context, context.CancelFunc) {
	if o.AcceptUnpublished > 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, partitionTimeout)
}

func (a *App) partitionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "partition",
		Short: "Keep the outbox table small: partitions ahead, and old ones dropped when everybody has them",
		Long: `Makes partitions of the outbox ahead of time, detaches those whose range is over, and
drops them when every replication slot that uses pgoutput in the database has confirmed their rows, their
ids are in the stream, and a repair no longer needs them. See docs/retention.md. It runs as the role that
owns the table, from cron for example: outflow run does nothing of it.`,
		Example: "  outflow partition plan --config outflow.yaml\n  outflow partition apply",
	}
	cmd.AddCommand(a.partitionPlanCommand(), a.partitionApplyCommand())
	return cmd
}

func (a *App) partitionPlanCommand() *cobra.Command {
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "plan",
		Short: "Say what apply would do, and what each partition waits for",
		Long: `Says of each partition what apply would do next, or what it waits for: a slot, by
name; a transaction; the time that a repair needs it. It changes nothing.

Exit code 0, 2 for a wrong option, 3 if the set-up cannot work or a server can't be reached, 4 if outflow
run could not start because of a gap: then nothing may go.`,
		Example: "  outflow partition plan --config outflow.yaml\n  outflow partition plan --json",
	}, func(ctx context.Context, cfg config.Config) error {
		return a.partition(ctx, cfg, partition.Options{}, asJSON)
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	return cmd
}

func (a *App) partitionApplyCommand() *cobra.Command {
	var o partition.Options
	var asJSON, dryRun bool
	cmd := a.configured(&cobra.Command{
		Use:   "apply",
		Short: "Make, detach, verify and drop partitions, as far as that is possible now",
		Long: `Takes each partition as far as it goes now, and says what it waits for then. Run it
every hour, or more often than a partition lasts. It may be killed at any point and run again, and goes on
where it was. Of two runs at the same time the second one ends at once.

Rows that were never published (they are older than init, or were attached with a partition) are counted and
named, and stay. --accept-unpublished N lets partitions go that have exactly N of them.

Exit code 0 if all was done that can be done now, 2 for a wrong option, 3 if the set-up cannot work or a
server can't be reached, 4 if rows were never published or outflow run could not start because of a gap, 1
if a lock was not to be had, a server was lost, or another run is at it: run it again.`,
		Example: "  outflow partition apply --config outflow.yaml\n  outflow partition apply --dry-run\n" +
			"  outflow partition apply --accept-unpublished 17",
	}, func(ctx context.Context, cfg config.Config) error {
		if o.AcceptUnpublished < 0 {
			return &outbox.Fault{Class: outbox.Usage, Code: "flags",
				Message: "--accept-unpublished is less than 0",
				Hint:    "Give the number that the command printed, or leave it out"}
		}
		o.Apply = !dryRun
		return a.partition(ctx, cfg, o, asJSON)
	})
	f := cmd.Flags()
	f.BoolVar(&dryRun, "dry-run", false, "only say what would be done, as plan does")
	f.Int64Var(&o.AcceptUnpublished, "accept-unpublished", 0,
		"let partitions go that have exactly so many rows that were never published")
	f.BoolVar(&asJSON, "json", false, "print the report as JSON, progress on standard error")
	return cmd
}

func (a *App) partition(ctx context.Context, cfg config.Config, o partition.Options, asJSON bool) error {
	ctx, cancel := limited(ctx, o)
	defer cancel()
	if a.faults != nil {
		o.Hit = a.faults.Hit
	}
	if o.Apply && asJSON {
		o.Step = func(s lifecycle.Step) { a.line.Step("%v", s) }
	}
	report, err := partition.Run(ctx, cfg, newLogger(a.Stderr, cfg), o)
	if report == nil {
		return err
	}
	if asJSON {
		return errors.Join(err, a.printJSON(report))
	}
	a.printf(a.Stdout, "at %v\n", a.where)
	for _, step := range report.Steps {
		a.printf(a.Stdout, "%v\n", step)
	}
	for _, note := range report.Notes {
		a.printf(a.Stdout, "note: %s\n", note)
	}
	return err
}
