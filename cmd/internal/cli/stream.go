package cli

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
	lifecycle "github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	"github.com/outflowhq/outflow/internal/operate/consumeradmin"
	"github.com/outflowhq/outflow/internal/operate/streamretain"
)

// streamTimeout is far above what a run takes that finds much to do.
const streamTimeout = 24 * time.Hour

func (a *App) streamCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stream",
		Short: "Keep the stream small: the oldest messages go when nobody needs them any more",
		Long: `Removes messages from the front of the stream when they are confirmed, archived if there
is an archive, every consumer has them, and gap mode does not remember them. See docs/retention.md.
retain.stream.age, size and messages say how much of that goes. It is run from cron for example: outflow run
does nothing of it.`,
		Example: "  outflow stream plan --config outflow.yaml\n  outflow stream apply",
	}
	cmd.AddCommand(a.streamPlanCommand(), a.streamApplyCommand())
	return cmd
}

func (a *App) streamPlanCommand() *cobra.Command {
	return a.onStream(&cobra.Command{
		Use:   "plan",
		Short: "Say which messages apply would remove, and who needs the others",
		Long: `Says how many messages would go, and up to where each may for the sake of the confirmed
checkpoint, the archive, every consumer by its name, and gap mode's memory. It changes nothing.

Exit code 0, 2 for a wrong option, 3 if the set-up cannot work or a server can't be reached, 4 if the archive
is damaged.`,
		Example: "  outflow stream plan --config outflow.yaml\n  outflow stream plan --json\n" +
			"  outflow stream plan --database postgres://app@db/texts --database postgres://app@db/search",
	}, false)
}

func (a *App) streamApplyCommand() *cobra.Command {
	return a.onStream(&cobra.Command{
		Use:   "apply",
		Short: "Remove the messages from the front of the stream that nobody needs",
		Long: `Removes the oldest messages, as far as they are beyond retain.stream.age, size or
messages and nobody needs them, by one purge up to a sequence. What goes from the archived ones is read back
from the archive before. All is looked at again right before the purge. It may be killed at any point and run
again; two runs at the same time do no harm.

Consumers that keep their offsets in a database are seen in the databases of --database, in all schemas. One
that runs and has its offsets elsewhere is named, and nothing goes; one that does not run can't be seen.

Exit code 0 if all went that may go now, 2 for a wrong option, 3 if the set-up cannot work or a server can't
be reached, 4 if the archive is damaged or has other messages than the stream, or the stream was made anew, 1
if a server was lost: run it again.`,
		Example: "  outflow stream apply --config outflow.yaml\n" +
			"  outflow stream apply --database postgres://app@db/texts --database postgres://app@db/search",
	}, true)
}

// onStream completes either command.
func (a *App) onStream(cmd *cobra.Command, apply bool) *cobra.Command {
	var urls []string
	var asJSON bool
	a.configured(cmd, func(ctx context.Context, cfg config.Config) error {
		ctx, cancel := context.WithTimeout(ctx, streamTimeout)
		defer cancel()
		o := a.streamOptions(cfg, urls, apply)
		report, err := streamretain.Run(ctx, cfg, newLogger(a.Stderr, cfg), o)
		if report == nil {
			return err
		}
		if asJSON {
			return errors.Join(err, a.printJSON(report))
		}
		a.printf(a.Stdout, "at %v\n", a.where)
		a.printLines(report.Lines())
		return err
	})
	f := cmd.Flags()
	consumerDatabases(f, &urls)
	f.BoolVar(&asJSON, "json", false, "print the report as JSON")
	return cmd
}

// streamOptions are those of either command; urls are the databases of consumers.
func (a *App) streamOptions(cfg config.Config, urls []string, apply bool) streamretain.Options {
	databases := a.consumerTargets(cfg, urls)
	o := streamretain.Options{Apply: apply,
		Readers: func(ctx context.Context, api *jsapi.Client) ([]lifecycle.Reader, error) {
			return consumeradmin.Readers(ctx, api, cfg.Stream, databases)
		}}
	if a.faults != nil {
		o.Hit = a.faults.Hit
	}
	return o
}

func consumerDatabases(f *pflag.FlagSet, urls *[]string) {
	f.StringArrayVar(urls, "database", nil, "the `url` of a database of consumers, repeatable (default "+
		config.ConsumerDatabaseEnv+", else postgres.url, or postgres.write_url if that is a standby)")
}
