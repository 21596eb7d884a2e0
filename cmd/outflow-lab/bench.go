package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/cmd/internal/cli"
	"github.com/outflowhq/outflow/internal/lab/bench"
	"github.com/outflowhq/outflow/outbox"
)

func benchCommand(a *cli.App) *cobra.Command {
	o := bench.Options{}
	var horizon time.Duration
	var builds, settings []string
	var file string
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure it beside pg_recvlogical, a bare publisher and a polling relay, in one run",
		Long: `Starts a PostgreSQL (found on this machine) and NATS for the moment, and measures
outflow beside other ways to do the same, on the same data and one after the other: pg_recvlogical, which
throws away what it reads; a publisher of the same messages out of its memory; a polling relay (100 rows,
FOR UPDATE SKIP LOCKED, publish, mark). Other builds of outflow take part with --outflow.

The cases:
  drain       a backlog of single-row transactions, and one of 100 rows each: events/s
  latency     1,000 commits a second: from a commit's return to the stream, and to a consumer
  payload     a backlog with payloads of 200 B, 1 KB, 10 KB
  shape       transactions of 1, 100, 100,000 rows
  documents   1, 1,000, 100,000
  actors      1, 10, 1,000 in 10 documents
  horizon     0 and 20 ms
  replicas    R1, and R3 with three NATS servers
  sync        a NATS that syncs before it acknowledges, with sink.durable_after 0s
  restart     kill -9 behind a backlog, and a start at once: until the first new message; R1 and R3

Without --case or --full: drain and latency. Every repetition begins with another contender; what is printed
are medians, and of ratios, which are taken within one repetition, also the lowest and the highest. A run in
which a message is missing is an error, not a figure. Nothing is left behind.

Exit code 0 when everything was measured, 2 for a wrong option, 1 if something went wrong or it was
interrupted.`,
		Example: "  outflow-lab bench\n  outflow-lab bench --case drain --rows 2000000 --repetitions 3\n  " +
			"outflow-lab bench --full --json report.json\n" +
			"  outflow-lab bench --outflow before=/tmp/outflow-v1 --settings before:reorder.max_events=1000",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			if cmd.Flags().Changed("horizon") {
				o.Horizon = &horizon
			}
			if err := readBench(&o, builds, settings); err != nil {
				return &outbox.Fault{Class: outbox.Usage, Code: "bench", Message: err.Error(),
					Hint: "See outflow-lab bench --help"}
			}
			o.Version, o.Out = a.VersionLine(), a.Stdout
			if file == "-" {
				o.Out = a.Stderr
			}
			report, err := bench.Run(cmd.Context(), o)
			if report == nil || file == "" {
				return err
			}
			return errors.Join(err, writeReport(a, report, file))
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Cases, "case", nil,
		"what to measure, comma-separated or several times (default drain,latency)")
	f.BoolVar(&o.Full, "full", false,
		"all cases: most of an hour; with --rows 40000 --repetitions 1 ten minutes")
	f.IntVar(&o.Rows, "rows", bench.DefaultRows, "rows of a backlog, fewer where payloads are large")
	f.IntVar(&o.Payload, "payload", bench.DefaultPayload, "bytes of a payload, about")
	f.IntVar(&o.Repetitions, "repetitions", bench.DefaultRepetitions, "of each case")
	f.DurationVar(&horizon, "horizon", 0,
		"reorder.horizon of all outflows (default 0s, and 20ms in latency and horizon)")
	f.StringArrayVar(&builds, "outflow", nil, "name=path of another build that takes part; several times")
	f.StringArrayVar(&settings, "settings", nil,
		"setting=value of all outflows, or name:setting=value of one; several times")
	f.StringVar(&o.PostgresURL, "postgres.url", "",
		"use this PostgreSQL (wal_level=logical); a database is made there and dropped at the end")
	f.StringVar(&o.NATSURL, "nats.url", "",
		"use this NATS with JetStream; streams are made there and removed at the end")
	f.IntVar(&o.PGMajor, "pg-major", 0, "the major version of our own PostgreSQL, of those on this machine")
	f.StringVar(&file, "json", "", "write the report as JSON to this file; -: to standard output, and all "+
		"else to standard error")
	f.BoolVar(&o.Keep, "keep", false, "keep logs and the servers' files")
	return cmd
}

// readBench reads the flags that have a form of their own.
func readBench(o *bench.Options, builds, settings []string) error {
	for i, name := range o.Cases {
		o.Cases[i] = strings.TrimSpace(name)
	}
	for _, text := range builds {
		b, err := bench.ParseBuild(text)
		if err != nil {
			return fmt.Errorf("--outflow %w", err)
		}
		o.Builds = append(o.Builds, b)
	}
	for _, text := range settings {
		s, err := bench.ParseSetting(text)
		if err != nil {
			return fmt.Errorf("--settings %w", err)
		}
		o.Settings = append(o.Settings, s)
	}
	return nil
}

func writeReport(a *cli.App, r *bench.Report, file string) error {
	if file == "-" {
		return r.WriteJSON(a.Stdout)
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	return errors.Join(r.WriteJSON(f), f.Close())
}
