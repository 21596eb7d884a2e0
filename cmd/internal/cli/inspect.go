package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/inspect"
)

func (a *App) inspectCommand() *cobra.Command {
	var o inspect.Options
	cmd := a.configured(&cobra.Command{
		Use:   "inspect",
		Short: "Decode a slot without consuming it: commits, events, windows",
		Long: `Decodes what the slot holds and shows each commit with its events and each window
that the ordering rules make of them, without consuming, publishing or changing anything. The slot must not
be in use. The rules start from the newest checkpoint of the record, where NATS can be reached, else
from the slot's confirmed LSN with the configured settings.`,
		Example: "  outflow inspect --config outflow.yaml --limit 1000",
	}, func(ctx context.Context, cfg config.Config) error {
		return inspect.Run(ctx, cfg, newLogger(a.Stderr, cfg), o, a.Stdout)
	})
	cmd.Flags().IntVar(&o.Limit, "limit", 10_000, "read no further transaction after so many changes; 0: all")
	cmd.Flags().BoolVar(&o.Payload, "payload", false, "show payloads")
	return cmd
}
