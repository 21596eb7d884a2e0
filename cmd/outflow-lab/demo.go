package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/cmd/internal/cli"
	"github.com/outflowhq/outflow/internal/lab/demo"
	"github.com/outflowhq/outflow/outbox"
)

func demoCommand(a *cli.App) *cobra.Command {
	o := demo.Options{}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show it: PostgreSQL and NATS for the moment, a real editing trace, a verdict",
		Long: `Starts a PostgreSQL (found on this machine) and NATS servers for the moment, writes a
recorded editing session through connections that commit out of order, stall, and once roll back. Three
outflows publish it at the same time, in commit order, with a horizon and in gap mode; they are killed with
kill -9 on the way and started again. It ends with a table: what each mode published late, how long events
took, and whether the streams are what a separate reader makes of the WAL. Nothing is left behind.

Exit code 0 if the verdict is good, 1 if not.`,
		Example:           "  outflow-lab demo\n  outflow-lab demo --keep",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			if o.Writers < 1 || o.Rate < 1 {
				return &outbox.Fault{
					Class: outbox.Usage, Code: "demo",
					Message: fmt.Sprintf("--writers %d --rate %d is not possible", o.Writers, o.Rate),
					Hint:    "Give numbers of 1 or more",
				}
			}
			o.Out = a.Stdout
			good, err := demo.Run(cmd.Context(), o)
			if err == nil && !good {
				err = errors.New("the demo's verdict is not good")
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.PostgresURL, "postgres.url", "", "use this PostgreSQL (wal_level=logical, "+
		"test_decoding installed); a database is made there and dropped at the end")
	f.IntVar(&o.Writers, "writers", 16, "connections that write")
	f.IntVar(&o.Rate, "rate", 2500, "events per second that they write, about")
	f.BoolVar(&o.All, "all", false, "show every message")
	f.BoolVar(&o.Keep, "keep", false,
		"leave everything running at the end, until Ctrl-C, and print how to connect")
	return cmd
}
