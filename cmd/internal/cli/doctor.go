package cli

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/doctor"
	"github.com/outflowhq/outflow/outbox"
)

// ended is the end of a command that has said all that there is to say: only its exit code is left.
type ended int

func (e ended) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func (a *App) doctorCommand() *cobra.Command {
	o := doctor.Options{Timeout: 5 * time.Second}
	var asJSON, strict bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check the whole chain, and say what is wrong or may become so",
		Long: `Looks at the configuration, PostgreSQL, slot, table and publication, NATS, stream,
checkpoint record, consumers, this host and the outflow that runs on it, also where some of them are down.
It changes nothing. What could not be read is shown as not known, with the right that is missing.

Checks have names such as slot.headroom; --only and --skip take those, or the part before the dot.

Exit code 0 if nothing is worse than a warning, 1 if not everything could be read, 2 for a wrong option or
setting, 3 for an error, 4 for something critical.`,
		Example: "  outflow doctor --config outflow.yaml\n  outflow doctor --before-init\n" +
			"  outflow doctor --standby postgres://outflow@db2/app",
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
	}
	config.AddFile(cmd, a.args)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := a.configure()
		cfg.Command = "doctor"
		if err != nil {
			return err
		}
		if o.Timeout <= 0 {
			return &outbox.Fault{Class: outbox.Usage, Code: "flags",
				Message: fmt.Sprintf("--timeout %v is no time", o.Timeout),
				Hint:    "Give more than 0, such as 5s"}
		}
		o.Log = slog.New(slog.DiscardHandler)
		report, err := doctor.Run(cmd.Context(), cfg, o)
		if err = cmp.Or(err, context.Cause(cmd.Context())); err != nil {
			return err
		}
		if asJSON {
			err = a.printJSON(report)
		} else {
			err = report.Write(a.Stdout)
		}
		if code := report.ExitCode(strict); err == nil && code != 0 {
			return ended(code)
		}
		return err
	}
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "print JSON")
	f.StringSliceVar(&o.Only, "only", nil, "make only these checks, such as slot,nats.storage")
	f.StringSliceVar(&o.Skip, "skip", nil, "leave these checks out")
	f.DurationVar(&o.Timeout, "timeout", o.Timeout, "how long reading each part may take")
	f.BoolVar(&o.BeforeInit, "before-init", false, "check only what outflow init needs")
	f.BoolVar(&o.Deep, "deep", false, "also read the table's newest rows, and the consumers twice")
	f.StringVar(&o.Standby, "standby", "",
		"the URL of a standby: also check whether it can become the primary")
	f.BoolVar(&strict, "strict", false, "exit code 3 for a warning, too")
	return cmd
}
