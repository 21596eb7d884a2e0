package cli

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/uninstall"
)

// uninstallTimeout is far above what uninstall takes, unless the slot holds very much.
const uninstallTimeout = 30 * time.Minute

func (a *App) uninstallCommand() *cobra.Command {
	var o uninstall.Options
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "uninstall",
		Short: "Remove what init has made for a slot; without --yes, say what would be removed",
		Long: `Removes the slot, the publication (unless another slot may read it) and the
checkpoint record. The outbox table stays, always. The stream stays, with its messages, unless --with-stream
is given; outflow init then goes on behind them. Without --yes nothing is changed: it says what would be
removed, in this order, and what stays and why.

It refuses what would lose something: a slot that is held, or has events that are not published; with
--with-stream, consumers that have not read all of it, or have parked events; a repair or a snapshot that
has not finished; a slot or a server that the record does not know. It names the way out of each. --accept
CODE passes over it, where it can be accepted.

While it reads the slot, until that is dropped, nobody can write to the table. If a server doesn't exist any
more, --gone nats or --gone postgres removes what the other one has.

It may be killed at any point and run again, and goes on where a part is gone already.

Exit code 0 if it was done, would be, or there is nothing to do, 2 for a wrong option, 3 if it is refused or
a server can't be reached, 1 if a server was lost on the way: run it again.`,
		Example: "  outflow uninstall --config outflow.yaml\n  outflow uninstall --yes\n " +
			" outflow uninstall --with-stream --sql-api --yes\n " +
			" outflow uninstall --accept uninstall_unpublished --yes",
	}, func(ctx context.Context, cfg config.Config) error {
		ctx, cancel := context.WithTimeout(ctx, uninstallTimeout)
		defer cancel()
		if a.faults != nil {
			o.Hit = a.faults.Hit
		}
		o.Progress = a.line.Step
		o.Progress("at %v", a.where)
		report, err := uninstall.Run(ctx, cfg, newLogger(a.Stderr, cfg), o)
		if report == nil {
			return err
		}
		if asJSON {
			return errors.Join(err, a.printJSON(report))
		}
		a.printLines(report.Lines())
		if err == nil && !o.Yes && report.Removes() {
			a.printf(a.Stdout, "Nothing was changed. To do it: `%s`\n", again(o))
		}
		return err
	})
	f := cmd.Flags()
	f.BoolVar(&o.Yes, "yes", false, "do it")
	// the name of the stream is a setting, --stream
	f.BoolVar(&o.Stream, "with-stream", false, "remove the stream as well, and the bucket of the record")
	f.BoolVar(&o.SQLAPI, "sql-api", false, "remove the SQL function outflow.enqueue as well")
	f.BoolVar(&o.Publication, "with-publication", false,
		"drop the publication also where another slot may read it, or init would have made another one")
	f.StringVar(&o.Gone, "gone", "", "nats or postgres: that server is gone for good, with what it had")
	f.StringSliceVar(&o.Accept, "accept", nil,
		"pass over this refusal: its code, as it is printed; may be given several times")
	f.BoolVar(&asJSON, "json", false, "print the report as JSON, progress on standard error")
	return cmd
}

// again is the command line that does what was asked.
func again(o uninstall.Options) string {
	words := []string{"outflow uninstall"}
	for _, flag := range []struct {
		set  bool
		name string
	}{{o.Stream, "--with-stream"}, {o.SQLAPI, "--sql-api"}, {o.Publication, "--with-publication"}} {
		if flag.set {
			words = append(words, flag.name)
		}
	}
	if o.Gone != "" {
		words = append(words, "--gone "+o.Gone)
	}
	for _, code := range o.Accept {
		words = append(words, "--accept "+code)
	}
	return strings.Join(append(words, "--yes"), " ")
}
