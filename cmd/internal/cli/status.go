package cli

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/status"
)

func (a *App) statusCommand() *cobra.Command {
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "status",
		Short: "Show lag, watermarks, and the health of slot and stream",
		Long: `Reads slot, checkpoint record, stream and server, and shows where outflow is. It needs no running outflow, and
changes nothing. The exit code is 0 if everything could be read, also where the health says that run would not start.`,
		Example: "  outflow status --config outflow.yaml\n  outflow status --json",
	}, func(ctx context.Context, cfg config.Config) error {
		ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
		report, err := status.Read(ctx, cfg, newLogger(a.Stderr, cfg.Log))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(report)
		}
		w := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
		for _, line := range report.Lines() {
			fmt.Fprintf(w, "%s\t%s\n", line[0], line[1])
		}
		return w.Flush()
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
