package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/archive"
	"github.com/outflowhq/outflow/outbox"
)

// archiveTimeout is far above what a run takes that finds much to do.
const archiveTimeout = 24 * time.Hour

func (a *App) archiveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "archive",
		Short: "Keep the confirmed messages of the stream outside of NATS, and check them",
		Long: `Writes the messages that are confirmed to files of JSON lines, compressed with zstd,
in the order of the stream, and checks what was written. See docs/archive.md. outflow run does nothing of
it: run it from cron for example.`,
		Example: "  outflow archive run --config outflow.yaml\n  outflow archive verify",
	}
	cmd.AddCommand(a.archiveRunCommand(), a.archiveListCommand(), a.archiveVerifyCommand(),
		a.archiveRestoreCommand(), a.archiveRowsCommand())
	return cmd
}

func (a *App) archiveRunCommand() *cobra.Command {
	var o archive.Options
	var accept string
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "run",
		Short: "Archive the stream's messages up to the confirmed checkpoint",
		Long: `Writes segments of archive.segment_size, and the rest once it is archive.segment_age
old. Each is read back whole before it counts. It may be killed at any point and run again, and goes on
where it was; two runs at the same time do no harm. PostgreSQL is not needed.

Exit code 0, 2 for a wrong option, 3 if the set-up cannot work or a server can't be reached, 4 if messages
were removed from the stream before they were archived, or archive and stream are not what they were, 1 if a
server was lost, or an erasure of the stream has not finished: run it again.`,
		Example: "  outflow archive run --config outflow.yaml\n  outflow archive run --now\n" +
			"  outflow archive run --accept-gap 1-4711",
	}, func(ctx context.Context, cfg config.Config) error {
		if accept != "" {
			r := &o.AcceptGap
			if _, err := fmt.Sscanf(accept, "%d-%d", &r.From, &r.To); err != nil || r.From == 0 ||
				r.To < r.From || accept != fmt.Sprintf("%d-%d", r.From, r.To) {
				return &outbox.Fault{Class: outbox.Usage, Code: "flags",
					Message: fmt.Sprintf("--accept-gap %q is no range of sequences", accept),
					Hint:    "Give the range that the command printed, such as 1-4711"}
			}
		}
		if a.faults != nil {
			o.Hit = a.faults.Hit
		}
		ctx, cancel := context.WithTimeout(ctx, archiveTimeout)
		defer cancel()
		report, err := archive.Run(ctx, cfg, newLogger(a.Stderr, cfg), o)
		if report == nil {
			return err
		}
		if asJSON {
			return errors.Join(err, a.printJSON(report))
		}
		a.printf(a.Stdout, "at %v\n", a.where)
		for _, s := range report.Segments {
			a.printf(a.Stdout, "%v\n", s)
		}
		switch {
		case report.Stands == 0 && err == nil:
			a.printf(a.Stdout, "nothing to archive: no message is confirmed yet\n")
		case report.Archived < report.Stands && err == nil:
			a.printf(a.Stdout, "archived up to %d of the confirmed %d: the rest makes a segment when it is "+
				"%v old (archive.segment_age), or with --now\n", report.Archived, report.Stands,
				cfg.Archive.SegmentAge)
		default:
			a.printf(a.Stdout, "archived up to %d of the confirmed %d\n", report.Archived, report.Stands)
		}
		return err
	})
	f := cmd.Flags()
	f.BoolVar(&o.Now, "now", false, "archive the rest too, however young it is")
	f.StringVar(&accept, "accept-gap", "", "sequences `FROM-TO` whose messages may be lost")
	f.BoolVar(&asJSON, "json", false, "print the report as JSON")
	return cmd
}

func (a *App) archiveListCommand() *cobra.Command {
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "list",
		Short: "List the archive's segments",
		Long: `Lists the segments of the stream, and of streams that had its name before, from their
manifests, and checks that these form a chain. It needs neither NATS nor PostgreSQL.

Exit code 0, also if there is no segment, 2 for a wrong option, 3 if the folder of archive.url does not exist,
4 if a manifest is lost or damaged, 1 if the archive can't be read.`,
		Example: "  outflow archive list --config outflow.yaml\n  outflow archive list --json",
	}, func(ctx context.Context, cfg config.Config) error {
		all, err := archive.List(ctx, cfg)
		if asJSON {
			return errors.Join(err, a.printJSON(all))
		}
		none := true
		for _, l := range all {
			a.printf(a.Stdout, "%s\n", l.Folder)
			for _, s := range l.Segments {
				none = false
				a.printf(a.Stdout, "  %v\n", s)
			}
		}
		if err == nil && none {
			a.printf(a.Stdout, "nothing of stream %s is archived yet: a segment is made when it is "+
				"%v old (archive.segment_age), or at once with --now. If there was one: is "+
				"its volume mounted, and are archive.url, with its prefix, and stream those of whoever "+
				"archives?\n",
				cfg.Stream, cfg.Archive.SegmentAge)
		}
		return err
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	return cmd
}

func (a *App) archiveVerifyCommand() *cobra.Command {
	var sample int
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "verify",
		Short: "Read the archive back and check every message",
		Long: `Checks the chain of all manifests, and reads each segment whole: the hash of the
object and of each message, their sequences and their Merkle root. With --sample N only the newest segment
and N-1 others by chance are read. It needs neither NATS nor PostgreSQL.

Exit code 0 if all is as it was written, 2 for a wrong option, 3 if there is nothing of the stream, 4 if an
object is lost or damaged, which is named, 1 if the archive can't be read.`,
		Example: "  outflow archive verify --config outflow.yaml\n  outflow archive verify --sample 3",
	}, func(ctx context.Context, cfg config.Config) error {
		if sample < 0 {
			return &outbox.Fault{Class: outbox.Usage, Code: "flags", Message: "--sample is less than 0",
				Hint: "Give a number of segments, or leave it out"}
		}
		v, err := archive.Verify(ctx, cfg, sample)
		switch {
		case err != nil:
			return err
		case asJSON:
			return a.printJSON(v)
		}
		a.printf(a.Stdout, "%v\n", v)
		return nil
	})
	cmd.Flags().IntVar(&sample, "sample", 0, "read only so many segments; 0: all")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the result as JSON")
	return cmd
}

func (a *App) archiveRestoreCommand() *cobra.Command {
	var o archive.RestoreOptions
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "restore",
		Short: "Make the stream again from the archive",
		Long: `Makes a stream with all messages of the archive, under the same sequences, so that
what consumers know of it is still right. The stream must not exist. It has no limits, such as max_age: those
of init are for new streams. It may be killed at any point and run again, and goes on where it was; until it
has finished, outflow run and outflow repair leave the stream alone. Then outflow repair publishes what the
archive did not have yet. See docs/archive.md. PostgreSQL is not needed.

Exit code 0, 2 for a wrong option, 3 if the stream exists, or a server can't be reached, 4 if an object of
the archive is lost or damaged, or somebody else published to the stream, 1 if a server was lost: run it
again.`,
		Example: "  outflow archive restore --config outflow.yaml\n" +
			"  outflow archive restore --to OUTBOX_PAST",
	}, func(ctx context.Context, cfg config.Config) error {
		if a.faults != nil {
			o.Hit = a.faults.Hit
		}
		ctx, cancel := context.WithTimeout(ctx, archiveTimeout)
		defer cancel()
		r, err := archive.Restore(ctx, cfg, newLogger(a.Stderr, cfg), o)
		switch {
		case err != nil:
			return err
		case asJSON:
			return a.printJSON(r)
		}
		a.printf(a.Stdout, "at %v\n%v\n", a.where, r)
		return nil
	})
	f := cmd.Flags()
	f.StringVar(&o.To, "to", "", "`stream` to make; by default the one of the settings")
	f.StringVar(&o.Folder, "folder", "", "`name` of the folder to restore; by default the newest one")
	f.Uint64Var(&o.From, "from", 0, "restore from this `sequence` on; 0: all")
	f.BoolVar(&asJSON, "json", false, "print the result as JSON")
	return cmd
}

func (a *App) archiveRowsCommand() *cobra.Command {
	var o archive.RowsOptions
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "rows",
		Short: "Put rows back into the outbox table from the archive",
		Long: `Inserts the rows of archived messages into the outbox table, those whose id it does not
have, with all columns that messages carry: id, document, key or actor and counter, payload, and what the
subject and mapped headers hold. It says which others are left to their defaults. outflow run does not publish
these rows: their transactions have a replication origin (outflow_restore). If the stream is lost as well,
restore it first. Killed at any point, it is run again. See docs/archive.md.

Exit code 0, 2 for a wrong option, 3 if the table needs more than messages carry, if the role lacks a right
or a server can't be reached, 4 if an object of the archive is lost or damaged, or some rows can't be put
back because their messages have only the beginning of a long value, 1 if a server was lost: run it again.`,
		Example: "  outflow archive rows --dry-run\n  outflow archive rows --config outflow.yaml",
	}, func(ctx context.Context, cfg config.Config) error {
		if a.faults != nil {
			o.Hit = a.faults.Hit
		}
		ctx, cancel := context.WithTimeout(ctx, archiveTimeout)
		defer cancel()
		r, err := archive.PutBack(ctx, cfg, newLogger(a.Stderr, cfg), o)
		switch {
		case r == nil:
			return err
		case asJSON:
			return errors.Join(err, a.printJSON(r))
		}
		a.printf(a.Stdout, "at %v\n%v\n", a.where, r)
		if o.DryRun {
			a.printf(a.Stdout, "nothing was changed (--dry-run)\n")
		}
		return err
	})
	f := cmd.Flags()
	f.StringVar(&o.Folder, "folder", "", "`name` of the folder to read; by default the newest one")
	f.Uint64Var(&o.From, "from", 0, "begin with the message at this `sequence`; 0: the first")
	f.Uint64Var(&o.To, "to", 0, "end with the message at this `sequence`; 0: the last")
	f.BoolVar(&o.DryRun, "dry-run", false, "only read the archive, and say what it carries")
	f.BoolVar(&asJSON, "json", false, "print the result as JSON")
	return cmd
}
