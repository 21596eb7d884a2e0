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
	var printOnly, sqlAPI bool
	cmd := a.configured(&cobra.Command{
		Use:   "init",
		Short: "Make what is missing: table, publication, stream, slot, checkpoint record",
		Long: `Makes the outbox table (if there is none), the publication, the JetStream stream, the slot and the checkpoint
record. Run again it finishes what is missing, and changes nothing that is there, but for the table's columns in the
record, once all that was written before is published. Rows older than the slot are not published.

With --sql-api it also makes the function outflow.enqueue(doc_id, actor_id, counter, payload), for services in any language, and
the table outflow_counter, from which it takes the next counter where the call gives none. Run it again after a change of the
table, of columns, headers, source or sink.max_payload.

Exit code 3 if something is there that outflow can't use, 4 if the record says that something was lost.`,
		Example: "  outflow init --config outflow.yaml\n  outflow init --print\n  outflow init --sql-api",
	}, func(ctx context.Context, cfg config.Config) error {
		if printOnly {
			return a.printSQL(ctx, cfg, sqlAPI)
		}
		ctx, cancel := context.WithTimeout(ctx, initTimeout)
		defer cancel()
		log, report := newLogger(a.stderr, cfg.Log), func(format string, args ...any) {
			fmt.Fprintf(a.stdout, format+"\n", args...)
		}
		if err := setup.Run(ctx, cfg, log, report); err != nil || !sqlAPI {
			return err
		}
		return setup.SQLAPI(ctx, cfg, log, report)
	})
	cmd.Flags().BoolVar(&printOnly, "print", false, "print the SQL for table and publication, which their owner can run, and do nothing")
	cmd.Flags().BoolVar(&sqlAPI, "sql-api", false, "also make the SQL function outflow.enqueue; with --print, read the table and print its SQL")
	return cmd
}

func (a *app) printSQL(ctx context.Context, cfg config.Config, sqlAPI bool) error {
	statements, err := replication.SQL(setup.SQLConfig(cfg, nil))
	if err != nil {
		return err
	}
	// The last one makes the slot. Whoever ran it would have a slot that no record speaks of, which init never adopts.
	statements = statements[:len(statements)-1]
	if sqlAPI {
		more, err := setup.SQLAPIStatements(ctx, cfg)
		if err != nil {
			return err
		}
		statements = append(statements, more...)
	}
	_, err = fmt.Fprintf(a.stdout, "%s;\n\n-- Then run outflow init as a role with REPLICATION: it makes stream, checkpoint record and slot.\n",
		strings.Join(statements, ";\n\n"))
	return err
}
