package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/cmd/internal/cli"
	"github.com/outflowhq/outflow/internal/lab/demo"
	"github.com/outflowhq/outflow/outbox"
)

func demoCommand(a *cli.App) *cobra.Command {
	o := demo.Options{Load: demo.DefaultLoad}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show it: PostgreSQL and NATS for the moment, a real editing trace, a verdict",
		Long: `Starts a PostgreSQL (found on this machine) and NATS servers for the moment, writes a
recorded editing session through connections that commit out of order, stall, and once roll back. Three
outflows publish it at the same time, in commit order, with a horizon and in gap mode; they are killed with
kill -9 on the way and started again. It ends with a table: what each mode published late, how long events
took, and whether the streams are what a separate reader makes of the WAL. Nothing is left behind.

Exit code 0 if the verdict is good, 1 if not.`,
		Example: "  outflow-lab demo\n  outflow-lab demo --keep\n" +
			"  outflow-lab demo --notes 1000 --in-a-row 1 --stall 5s --bound 10s --cold 10s " +
			"--rollback=false\n" +
			"  outflow-lab demo --notes 0 --spans --writers 64",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			if err := checkDemo(&o); err != nil {
				return err
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
	f.IntVar(&o.Notes, "notes", o.Notes, "documents, each with the beginning of one recording; 0: three "+
		"recordings, whole")
	f.IntVar(&o.InARow, "in-a-row", o.InARow, "operations of a note before the next note has some")
	f.DurationVar(&o.Stall, "stall", o.Stall, "how long the longest stalls are, one of --stall-every "+
		"transactions")
	f.IntVar(&o.Every, "stall-every", o.Every, "transactions; one in 200 stalls for up to 0.3s besides")
	f.BoolVar(&o.Rollback, "rollback", o.Rollback, "roll back one transaction, so that a counter never comes")
	f.BoolVar(&o.Spans, "spans", o.Spans, "counters are clocks that advance by the characters of an "+
		"operation, in columns counter and span")
	f.DurationVar(&o.Bound, "bound", o.Bound, "reorder.bound of gap mode")
	f.DurationVar(&o.Cold, "cold", o.Cold, "reorder.cold of gap mode, at most as long as --bound")
	f.BoolVar(&o.All, "all", false, "show every message")
	f.BoolVar(&o.Keep, "keep", false,
		"leave everything running at the end, until Ctrl-C, and print how to connect")
	return cmd
}

// checkDemo refuses what no demo can be made of.
func checkDemo(o *demo.Options) error {
	wrong := ""
	switch {
	case o.Writers < 1 || o.Rate < 1 || o.Every < 1:
		wrong = fmt.Sprintf("--writers %d --rate %d --stall-every %d", o.Writers, o.Rate, o.Every)
	case o.Notes < 0 || o.InARow < 1 || o.InARow > demo.MaxOps || o.Notes > demo.MaxOps/o.InARow:
		wrong = fmt.Sprintf("--notes %d --in-a-row %d", o.Notes, o.InARow)
	case o.Stall < 0 || o.Bound < time.Millisecond || o.Cold < 0 || o.Cold > o.Bound:
		wrong = fmt.Sprintf("--stall %v --bound %v --cold %v", o.Stall, o.Bound, o.Cold)
	default:
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Usage, Code: "demo", Message: wrong + " is not possible",
		Hint: fmt.Sprintf("Give numbers of 1 or more, notes with at most %d operations in a row together, "+
			"and a cold of at most bound", demo.MaxOps),
	}
}
