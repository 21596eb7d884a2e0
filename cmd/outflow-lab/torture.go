package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/cmd/internal/cli"
	"github.com/outflowhq/outflow/internal/lab/torture"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func tortureCommand(a *cli.App) *cobra.Command {
	o := torture.Options{}
	cmd := &cobra.Command{
		Use:   "torture",
		Short: "Attack it: faults from a seeded schedule, then a verdict by an independent judge",
		Long: `Starts PostgreSQL, NATS and several outflows as processes of their own, writes
recorded editing sessions through many connections, injects faults from a schedule that the seed decides,
and ends with the verdict of a judge that reads the WAL (through a slot of its own with test_decoding), the
table and every message. Nothing is left behind after a good run; after a bad one the logs and the servers'
files are kept.

With --postgres.url or --nats.url it uses servers of yours and only does what harms nobody else; what it
makes there has names of its own and is removed at the end.

The faults:
` + torture.Faults() + `

Exit code 0 if the verdict is good, 4 if it is not, 3 if the run could not be carried out, 2 for a wrong
option, 1 if it was interrupted.`,
		Example: "  outflow-lab torture\n  outflow-lab torture --seed 42 --duration 10m --replicas 3\n  " +
			"outflow-lab torture --kills 500 --faults outflow,postgres,-outflow.zombie\n" +
			"  outflow-lab torture --postgres.url postgres://me@db/app --nats.url nats://nats:4222",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			o.Sabotage = os.Getenv("OUTFLOW_TORTURE_SABOTAGE")
			o.Out, o.Log = a.Stdout, a.Stderr
			good, err := torture.Run(cmd.Context(), o)
			if err == nil && !good {
				err = &outbox.Fault{
					Class: outbox.Gap, Code: "torture", Message: "the verdict is not good",
					Hint: "The report names the first difference; the same seed repeats the schedule. " +
						"Please report it with the kept files",
				}
			}
			return err
		},
	}
	f := cmd.Flags()
	f.Uint64Var(&o.Seed, "seed", 0, "of schedule and load; 0: a random one, which is printed")
	f.DurationVar(&o.Duration, "duration", 0,
		"how long the attack lasts (default 1m, or until --kills are reached)")
	f.IntVar(&o.Kills, "kills", 0, "end the attack after so many kills of outflow")
	f.StringVar(&o.Faults, "faults", "all", "which faults: names and groups (outflow, postgres, nats, "+
		"network, disk, clock), comma-separated; -name leaves out, name*3 strikes more often")
	f.IntVar(&o.Replicas, "replicas", 1, "of the streams: 1, or 3 with three NATS servers for each victim")
	f.IntVar(&o.Victims, "victims", 2,
		"slots that are attacked at the same time, each with two outflows and a NATS of its own")
	f.DurationVar(&o.Every, "every", o.Every, "mean time between two faults on one victim (default 1.5s)")
	f.IntVar(&o.Operations, "operations", 0, "rows to write at most; 0: as many as the attack has time for")
	f.IntVar(&o.Rate, "rate", 600, "rows per second, about")
	f.IntVar(&o.Writers, "writers", 8, "connections that write")
	f.StringVar(&o.Mode, "mode", "horizon",
		"reorder.mode of all outflows: horizon, or gap, of which the seed "+
			"chooses the other settings")
	f.DurationVar(&o.Horizon, "horizon", relay.DefaultHorizon, "reorder.horizon of all outflows")
	f.StringVar(&o.Sort, "sort", outbox.BySeqKey.String(), "reorder.sort of all outflows: seq_key or commit")
	f.StringVar(&o.Source, "source", relay.FromTable.String(),
		"source of all outflows: table, or both, and then many events are logical messages")
	f.StringVar(&o.PostgresURL, "postgres.url", "",
		"use this PostgreSQL (wal_level=logical, with the plugin test_decoding) in place of our own")
	f.StringVar(&o.NATSURL, "nats.url", "",
		"use this NATS with JetStream for the victims in place of our own")
	f.IntVar(&o.PGMajor, "pg-major", 0, "the major version of our own PostgreSQL, of those on this machine")
	f.BoolVar(&o.DryRun, "dry-run", false, "print the schedule and do nothing")
	f.BoolVar(&o.JSON, "json", false,
		"print the report as JSON on standard output, and all else on standard error")
	f.BoolVar(&o.Keep, "keep", false, "keep logs and the servers' files also after a good run")
	return cmd
}
