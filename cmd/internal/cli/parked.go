package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/operate/parked"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) parkedCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "parked",
		Short: "Events that a consumer could not process: list, show, retry, skip",
		Long: `A consumer (the Go package consumer) parks an event that failed for good, and all
later ones of its document, in a table of its database; other documents go on. These commands show what is
parked and say what is to be released. The running consumer does it, within seconds; if none runs, the next
one does.`,
		Example: "  outflow parked list\n  outflow parked show orders note-1\n  outflow parked retry " +
			"orders note-1 --wait",
	}
	cmd.AddCommand(a.parkedListCommand(), a.parkedShowCommand(), a.parkedRetryCommand(),
		a.parkedSkipCommand())
	return cmd
}

func (a *App) parkedListCommand() *cobra.Command {
	var limit int
	cmd := a.onParked(&cobra.Command{
		Use:     "list [consumer]",
		Short:   "The documents that are parked, with the error of the first event",
		Example: "  outflow parked list\n  outflow parked list orders --json",
	}, cobra.MaximumNArgs(1), func(ctx context.Context, w *parked.Command, args []string) error {
		name := ""
		if len(args) > 0 {
			name = args[0]
		}
		return w.List(ctx, name, limit)
	})
	cmd.Flags().IntVar(&limit, "limit", 1000, "print no more documents than that")
	return cmd
}

func (a *App) parkedShowCommand() *cobra.Command {
	var limit int
	cmd := a.onParked(&cobra.Command{
		Use:     "show <consumer> <document>",
		Short:   "A parked document: its events in their order, with error, headers and data",
		Example: "  outflow parked show orders note-1 --limit 100",
	}, cobra.ExactArgs(2), func(ctx context.Context, w *parked.Command, args []string) error {
		return w.Show(ctx, args[0], args[1], limit)
	})
	cmd.Flags().IntVar(&limit, "limit", 10, "show no more events than that")
	return cmd
}

func (a *App) parkedRetryCommand() *cobra.Command {
	r := parked.Release{}
	cmd := a.onParked(&cobra.Command{
		Use:   "retry <consumer> [document ...]",
		Short: "Release documents: the first event is tried again, the others follow",
		Long: `Says that documents are to be released. The running consumer tries the first event
again, and if that has its effect all later ones in their order. Where one fails, it and what follows stay
parked.`,
		Example: "  outflow parked retry orders note-1 --wait\n  outflow parked retry orders --all",
	}, cobra.MinimumNArgs(1), func(ctx context.Context, w *parked.Command, args []string) error {
		if r.Consumer, r.Documents = args[0], args[1:]; r.All == (len(r.Documents) > 0) {
			return &outbox.Fault{Class: outbox.Usage, Code: "documents",
				Message: "it is not clear which documents are to be released"}
		}
		return w.Release(ctx, r)
	})
	cmd.Flags().BoolVar(&r.All, "all", false, "all documents that are parked")
	waiting(cmd, &r)
	return cmd
}

func (a *App) parkedSkipCommand() *cobra.Command {
	r := parked.Release{Skip: true}
	cmd := a.onParked(&cobra.Command{
		Use:   "skip <consumer> <document> ...",
		Short: "Drop the first event of documents without its effect, and release the others",
		Long: `Says that the first parked event of each document is to be dropped: it has no effect,
now or later. The others are released as retry does it. outflow parked show prints what is going to be
dropped.`,
		Example: "  outflow parked skip orders note-1 --wait",
	}, cobra.MinimumNArgs(2), func(ctx context.Context, w *parked.Command, args []string) error {
		r.Consumer, r.Documents = args[0], args[1:]
		return w.Release(ctx, r)
	})
	waiting(cmd, &r)
	return cmd
}

func waiting(cmd *cobra.Command, r *parked.Release) {
	cmd.Flags().BoolVar(&r.Wait, "wait", false,
		"wait until the running consumer has done it, and say how it went")
	cmd.Flags().DurationVar(&r.Timeout, "timeout", time.Minute, "so long --wait waits")
}

// onParked completes a command that works on parked events.
func (a *App) onParked(cmd *cobra.Command, args cobra.PositionalArgs,
	do func(ctx context.Context, w *parked.Command, args []string) error,
) *cobra.Command {
	var d consumerDatabase
	var asJSON bool
	var given []string
	a.configured(cmd, func(ctx context.Context, cfg config.Config) error {
		conn, err := d.connect(ctx, a, cfg)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // nothing depends on it any more
		defer progress.Wait(ctx, "waiting for the consumer's database")()
		return do(ctx, &parked.Command{Parked: consumer.NewParked(conn, d.schema), JSON: asJSON,
			Out: a.Stdout, Log: a.Stderr}, given)
	})
	run := cmd.RunE
	cmd.Args = args
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		given = args
		return run(cmd, args)
	}
	d.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
