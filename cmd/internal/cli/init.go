package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/outbox"
)

// initTimeout is far above what init takes: a slot may have to wait for open transactions.
const initTimeout = 2 * time.Minute

func (a *App) initCommand() *cobra.Command {
	var printOnly, dryRun, withSnapshot, asJSON, sqlAPI bool
	var acceptOwners []string
	cmd := a.configured(&cobra.Command{
		Use:   "init",
		Short: "Make what is missing: table, publication, stream, slot, checkpoint record",
		Long: `Makes the outbox table (if there is none), the publication, the JetStream stream, the
slot and the checkpoint record. Run again it finishes what is missing, and changes nothing that is there,
but for the table's columns in the record, once all that was written before is published. Rows older than
the slot are not published: it says how many there are. It looks at the table's newest rows and says which
ordering mode (reorder.mode) fits; it changes no setting. It makes nothing unless everything fits. With
--dry-run it makes nothing at all, and says of each object whether it is there, would be made, or does not
fit; the exit code is the one that it would end with.

With --snapshot rows older than the slot are published: first the rows that are there, in the order (doc_id,
seq_key), then what is written from then on, each row once. It may be killed at any point and run again;
outflow run starts when it has finished. Writers may go on.

With --sql-api it also makes the function outflow.enqueue(doc_id, actor_id, counter, payload), for services
in any language, and the table outflow_counter, from which it takes the next counter where the call gives
none. Run it again after a change of the table, of columns, headers, source or sink.max_payload.

What somebody else has made is not used: a table in a schema in which every role may create, or function,
schema and counters of --sql-api, unless its owner is the role that runs the command or one that it is a
member of, the owner of the database or of the table, a superuser, or named with --accept-owner.

Exit code 3 if something is there that outflow can't use, 4 if the record says that something was lost or a
snapshot did not finish, 5 if the snapshot has come to a row that can't be published (sink.on_poison: stop).`,
		Example: "  outflow init --config outflow.yaml\n  outflow init --dry-run\n  outflow init --print\n " +
			" outflow init --snapshot\n  outflow init --sql-api",
	}, func(ctx context.Context, cfg config.Config) error {
		if printOnly && (withSnapshot || asJSON) {
			return &outbox.Fault{Class: outbox.Usage, Code: "print",
				Message: "--print changes nothing, and goes with neither --snapshot nor --json"}
		}
		if dryRun && (printOnly || withSnapshot || asJSON || sqlAPI) {
			return &outbox.Fault{Class: outbox.Usage, Code: "dry_run",
				Message: "--dry-run goes with none of --print, --snapshot, --sql-api and --json"}
		}
		if printOnly {
			return a.printSQL(ctx, cfg, sqlAPI)
		}
		if asJSON && !withSnapshot {
			return &outbox.Fault{Class: outbox.Usage, Code: "json", Message: "--json is for --snapshot"}
		}
		log, report := newLogger(a.Stderr, cfg), func(format string, args ...any) {
			a.printf(a.Stdout, format+"\n", args...)
		}
		if !asJSON {
			report("at %v", a.where)
		}
		// it takes as long as the table is
		made := func(ctx context.Context) error { return a.initSnapshot(ctx, cfg, asJSON, acceptOwners) }
		if !withSnapshot {
			made = func(ctx context.Context) error {
				ctx, cancel := context.WithTimeout(ctx, initTimeout)
				defer cancel()
				if dryRun {
					return initialize.DryRun(ctx, cfg, log, report, acceptOwners)
				}
				return initialize.Run(ctx, cfg, log, report, acceptOwners)
			}
		}
		if err := made(ctx); err != nil || !sqlAPI {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, initTimeout)
		defer cancel()
		return initialize.SQLAPI(ctx, cfg, report, acceptOwners)
	})
	cmd.Flags().BoolVar(&printOnly, "print", false,
		"print the SQL for table and publication, as far as they are missing, which their owner can run")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false,
		"say what is there, what would be made and what does not fit, and change nothing")
	cmd.Flags().BoolVar(&sqlAPI, "sql-api", false,
		"also make the SQL function outflow.enqueue; with --print, read the table and print its SQL")
	cmd.Flags().StringSliceVar(&acceptOwners, "accept-owner", nil,
		"use what is there although this role owns it; may be given several times")
	cmd.Flags().BoolVar(&withSnapshot, "snapshot", false,
		"publish the rows that are in the table already, before all others")
	cmd.Flags().BoolVar(&asJSON, "json", false,
		"with --snapshot: print the report as JSON, progress as JSON lines on standard error")
	return cmd
}

// printTimeout is how long PostgreSQL is waited for before the SQL is printed without it.
const printTimeout = 10 * time.Second

func (a *App) printSQL(ctx context.Context, cfg config.Config, sqlAPI bool) error {
	ctx, cancel := context.WithTimeout(ctx, printTimeout)
	defer cancel()
	statements, err := initialize.Statements(ctx, cfg)
	if err != nil {
		return err
	}
	if sqlAPI {
		more, err := initialize.SQLAPIStatements(ctx, cfg)
		if err != nil {
			return err
		}
		for _, statement := range more {
			statements = append(statements, statement+";")
		}
	}
	_, err = fmt.Fprintf(a.Stdout, "%s\n\n-- Then run %s as a role with REPLICATION: it makes "+
		"stream, checkpoint record and slot.\n", strings.Join(statements, "\n\n"),
		a.repeat.To("outflow init"))
	return err
}
