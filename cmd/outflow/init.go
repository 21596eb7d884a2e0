package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/config"
	"github.com/outflowhq/outflow/internal/setup"
	"github.com/outflowhq/outflow/replication"
)

// initTimeout is far above what init takes: a slot may have to wait for open transactions.
const initTimeout = 2 * time.Minute

func (a *app) initCommand() *cobra.Command {
	var printOnly bool
	cmd := a.configured(&cobra.Command{
		Use:   "init",
		Short: "Make what is missing: table, publication, stream, slot, checkpoint record",
		Long: `Makes the outbox table (if there is none), the publication, the JetStream stream, the slot and the checkpoint
record. Run again it finishes what is missing, and changes nothing that is there, but for the table's columns in the
record, once all that was written before is published. Rows older than the slot are not published.

Exit code 3 if something is there that outflow can't use, 4 if the record says that something was lost.`,
		Example: "  outflow init --config outflow.yaml\n  outflow init --print",
	}, func(ctx context.Context, cfg config.Config) error {
		if printOnly {
			return a.printSQL(cfg)
		}
		ctx, cancel := context.WithTimeout(ctx, initTimeout)
		defer cancel()
		return setup.Run(ctx, cfg, newLogger(a.stderr, cfg.Log), func(format string, args ...any) {
			fmt.Fprintf(a.stdout, format+"\n", args...)
		})
	})
	cmd.Flags().BoolVar(&printOnly, "print", false, "print the SQL for table and publication, which their owner can run, and do nothing")
	return cmd
}

func (a *app) printSQL(cfg config.Config) error {
	statements, err := replication.SQL(setup.SQLConfig(cfg, nil))
	if err != nil {
		return err
	}
	// The last one makes the slot. Whoever ran it would have a slot that no record speaks of, which init never adopts.
	statements = statements[:len(statements)-1]
	_, err = fmt.Fprintf(a.stdout, "%s;\n\n-- Then run outflow init as a role with REPLICATION: it makes stream, checkpoint record and slot.\n",
		strings.Join(statements, ";\n\n"))
	return err
}
