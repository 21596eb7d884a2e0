package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/repair"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) repairCommand() *cobra.Command {
	var o repair.Options
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "repair",
		Short: "Say what a gap has cost, and close it from the outbox table",
		Long: `Reads everything as a start does, says what outflow run stops with (exit code 4),
which rows of the table are in no message of the stream, and what a repair would do. It changes nothing,
unless --accept names the fault: then it publishes the missing rows at the end of the stream, in the order
(doc_id, seq_key), and writes the checkpoint record that outflow run goes on from. It may be killed at any
point and run again. Outflow must be stopped, writers may go on.

With --check it compares table and stream also where outflow run finds nothing wrong, and ends with exit
code 4 (rows_missing) if a row is in no message and the slot will not bring it.

Rows are found by their id: rows that were deleted from the table, or that have no id, can't be. Memory
grows with the rows of the table for which --where holds, about 40 bytes each.

Events that were written as logical messages (source: message, both) are in no table. Where some of them may
be lost, the repair says so and refuses, unless --accept-loss says in these words: "message events". Without
a table it then publishes nothing, and makes slot and record such that outflow run goes on.

Where the stream is gone or empty, and the archive has messages of it, outflow archive restore comes first:
it refuses to fill the stream from the table, unless --archive.url "" says that they are not to count.

Rows that outflow erase has deleted, and that are in the table again, are not published. Where rows would be
published while an erasure has not finished, or the database is from before one, it refuses, unless
--despite-erasure says to go on.

Exit code 0 if there is no gap or it was closed, 4 if there is one, 2 if --accept is not what was found or
--accept-loss is missing, 3 if no repair is possible as things are (outflow still runs, no id column, a
server can't be reached, ...), 5 if a missing row can't be published, 1 if it was interrupted or has lost a
server on the way.`,
		Example: "  outflow repair --config outflow.yaml\n  outflow repair --accept slot_missing --where " +
			"\"created_at > '2026-10-25 12:00Z'\"",
	}, func(ctx context.Context, cfg config.Config) error {
		if o.Check && o.Accept != "" {
			return &outbox.Fault{
				Class: outbox.Usage, Code: "flags", Message: "--check changes nothing, --accept repairs",
				Hint: "Give one of them",
			}
		}
		a.line.Step("at %v", a.where)
		report, err := repair.Run(ctx, cfg, newLogger(a.Stderr, cfg), o)
		if report == nil {
			return err
		}
		report.Command = a.repeat.To(report.Command)
		if asJSON {
			return errors.Join(err, a.printJSON(report))
		}
		a.printLines(report.Lines())
		return err
	})
	f := cmd.Flags()
	f.StringVar(&o.Accept, "accept", "", "repair this fault: its code, as outflow repair prints it")
	f.BoolVar(&o.Check, "check", false, "compare table and stream also where nothing else is wrong")
	f.StringVar(&o.Where, "where", "",
		"an SQL condition on the outbox table: only rows for which it holds can be missing")
	f.StringArrayVar(&o.EarlierWhere, "earlier-where", nil,
		"the --where of an earlier repair that did not finish; may be given several times")
	f.StringVar(&o.AcceptLoss, "accept-loss", "",
		"accept in words that events which were written as messages are lost: \"message events\"")
	f.BoolVar(&o.DespiteErasure, "despite-erasure", false,
		"publish rows although an erasure has not finished, or the database is from before one")
	f.BoolVar(&o.NewSlot, "new-slot", false, "make the slot anew also where it could be kept")
	f.BoolVar(&asJSON, "json", false, "print the report as JSON")
	return cmd
}
