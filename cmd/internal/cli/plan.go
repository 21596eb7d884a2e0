package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/plan"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) planCommand() *cobra.Command {
	o := plan.Options{Measure: 10 * time.Second,
		Outages: []time.Duration{4 * time.Hour, 24 * time.Hour}, Days: 7}
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "plan",
		Short: "Measure rates, and say how large slot, disk, stream and memory have to be",
		Long: `Measures for a while how much WAL the server writes and how many events come, and how
large they are, and says what an outage and a retention take: max_slot_wal_keep_size, disk, size of the
stream, network, memory, connections. Each figure says how it was derived, from what is measured, configured
or assumed, and what is set now. It changes nothing.

What is measured in a quiet hour holds for a quiet hour: run it when the most is written, with --measure 5m.
It also works before outflow init, and without NATS, with what the table shows.

Exit code 0, 2 for a wrong option, 3 if PostgreSQL can't be reached.`,
		Example: "  outflow plan --config outflow.yaml\n  outflow plan --measure 5m --outage 8h --days 30\n" +
			"  outflow plan --json",
	}, func(ctx context.Context, cfg config.Config) error {
		if err := checkPlan(o); err != nil {
			return err
		}
		o.Progress = a.line.Step
		m, err := plan.Read(ctx, cfg, newLogger(a.Stderr, cfg), o)
		if err != nil {
			return err
		}
		figures := plan.Derive(m, cfg, o)
		if asJSON {
			return a.printJSON(figures)
		}
		a.printf(a.Stdout, "at %v\n", a.where)
		for _, f := range figures {
			now := ""
			if f.Now != "" {
				now = "   now " + f.Now
			}
			a.printf(a.Stdout, "%-36s %15s%s\n    %s: %s\n", f.Name, f.Text(), now, f.From, f.How)
		}
		return nil
	})
	f := cmd.Flags()
	f.DurationVar(&o.Measure, "measure", o.Measure, "so long the rates are measured: 1s to 1h")
	f.DurationSliceVar(&o.Outages, "outage", o.Outages,
		"an outage of NATS or of Outflow to get through; may be given several times")
	f.IntVar(&o.Days, "days", o.Days, "so many days the stream keeps its messages")
	f.BoolVar(&asJSON, "json", false, "print JSON, progress on standard error")
	return cmd
}

func checkPlan(o plan.Options) error {
	wrong := func(message string) error {
		return &outbox.Fault{Class: outbox.Usage, Code: "flags", Message: message,
			Hint: "Give another value, or leave it out"}
	}
	if o.Measure < time.Second || o.Measure > time.Hour {
		return wrong("--measure is not between 1s and 1h")
	}
	if o.Days < 1 || o.Days > 36500 {
		return wrong("--days is not between 1 and 36500")
	}
	for _, outage := range o.Outages {
		if outage <= 0 {
			return wrong("--outage is not more than 0")
		}
	}
	return nil
}
