package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/operate/consumeradmin"
	"github.com/outflowhq/outflow/internal/operate/replay"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) replayCommand() *cobra.Command {
	var o replay.Options
	var r replay.Ranges
	var ids []string
	var asJSON bool
	var d consumerDatabase
	cmd := a.configured(&cobra.Command{
		Use:   "replay",
		Short: "Read events again: to standard output, to another stream, or to one consumer",
		Long: `Reads again the events for which all that is given holds, in their original order,
and never puts them among the live ones. It reads from the stream, before which the archive is read where
archive.url is set, while these still have all of them, else from the outbox table in the order (doc_id,
seq_key, id); it says which, and why. Where neither has everything it refuses, until --from says which.

--to stdout prints a line of JSON for each event; stream:NAME publishes under NAME's subjects (the stream is
made if there is none); subject:again.> to another stream's subjects; consumer:NAME to one consumer of
package consumer alone (--database is that of its marks), which handles them, marked as replayed, before it
goes on with the live ones. Messages have the header Outflow-Replay. A replay that was interrupted goes on
with --replay-id.

Ranges are from..to, both included, either may be left out. Times are RFC 3339, or how long ago: 2h, 7d.

Exit code 0 when all is read, 1 if it was interrupted, a server was lost on the way (run it again with its
--replay-id) or an erasure is at work, 2 for a selection or target that can't be, 3 if nobody has the range
any more, it can't be known or a server can't be reached, 4 if an object of the archive is lost or damaged,
or the stream has other messages than the archive, 5 if a row of the table can't be published.`,
		Example: "  outflow replay --doc note-17 --to stdout\n" +
			"  outflow replay --time 2026-01-31T00:00:00Z..2026-02-01T00:00:00Z --to consumer:search " +
			"--dry-run\n" +
			"  outflow replay --id @ids.txt --from table --to stream:AGAIN --rate 500",
	}, func(ctx context.Context, cfg config.Config) error {
		var err error
		if o.Selection.IDs, err = listOf(ids); err != nil {
			return err
		}
		if err := o.Selection.SetRanges(r, time.Now()); err != nil {
			return err
		}
		return a.replay(ctx, cfg, &d, o, asJSON)
	})
	d.flags(cmd)
	f := cmd.Flags()
	f.StringArrayVar(&o.Selection.Docs, "doc", nil, "events of this document; may be given several times")
	f.StringArrayVar(&o.Selection.Actors, "actor", nil, "events by this actor; may be given several times")
	f.StringVar(&o.Selection.Filter, "filter", "",
		"events whose subject matches this one, which may have NATS's wildcards * and >")
	f.StringSliceVar(&ids, "id", nil, "events with these ids, separated by commas; @file: one a line")
	f.StringVar(&r.Key, "key", "", "events whose seq_key is in this range")
	f.StringVar(&r.Position, "position", "", "events at these positions: LSN or LSN-index")
	f.StringVar(&r.Time, "time", "",
		"events stored in the stream, or written to the table (--time-column), in this time")
	f.StringVar(&r.Seq, "seq", "", "events at these sequences of the stream")
	f.StringVar(&o.From, "from", "", "stream or table; otherwise whichever has the events")
	f.StringVar(&o.To, "to", "stdout", "stdout, stream:NAME, subject:SUBJECT or consumer:NAME")
	f.StringVar(&o.ID, "replay-id", "",
		"go on with the replay of this id, or begin it; not for standard output")
	f.StringVar(&o.TimeColumn, "time-column", "",
		"the column of the table that --time goes by (default created_at, or another of the usual names)")
	f.Float64Var(&o.Rate, "rate", 0, "events per second at most; 0: no limit")
	f.BoolVar(&o.DryRun, "dry-run", false, "say how many events of which subjects there are, the first and "+
		"the last; read and publish nothing")
	f.BoolVar(&asJSON, "json", false, "print the report as JSON: with --dry-run, and where the events go "+
		"elsewhere than to standard output")
	return cmd
}

func (a *App) replay(ctx context.Context, cfg config.Config, d *consumerDatabase, o replay.Options,
	asJSON bool) error {
	o.Out = a.Stdout
	if a.faults != nil {
		o.Hit = a.faults.Hit
	}
	o.Filters = func(ctx context.Context, js jetstream.JetStream, api *jsapi.Client, name string) ([]string,
		error) {
		w := &consumeradmin.Admin{Stream: cfg.Stream, JS: js, API: api, Schema: d.schema,
			From: "the consumer's database"}
		var err error
		if w.DB, err = d.connect(ctx, a, cfg); err != nil {
			return nil, err
		}
		defer w.DB.Close(context.WithoutCancel(ctx)) //nolint:errcheck // nothing depends on it any more
		return w.Filters(ctx, name)
	}
	report, err := replay.Run(ctx, cfg, newLogger(a.Stderr, cfg), o)
	if report == nil || o.To == "stdout" && !o.DryRun {
		return err
	}
	switch {
	case asJSON:
		err = errors.Join(err, a.printJSON(report))
	case o.DryRun:
		a.printLines(report.Lines())
	default:
		fmt.Fprintf(a.Stdout, "replay %s: %s published to %s", report.ID, units.Of(report.Done, "event"),
			report.To)
		if report.Before > 0 {
			fmt.Fprintf(a.Stdout, ", behind the %d that were there", report.Before)
		}
		fmt.Fprintln(a.Stdout)
	}
	if err != nil && report.ID != "" && outbox.ClassOf(err) == outbox.Transient {
		err = fmt.Errorf("%w. Run it again with --replay-id %s", err, report.ID)
	}
	return err
}

// listOf reads a list in which @file stands for the lines of a file.
func listOf(words []string) (all []string, err error) {
	for _, w := range words {
		name, isFile := strings.CutPrefix(w, "@")
		if !isFile {
			all = append(all, w)
			continue
		}
		lines, err := linesOf(name)
		if err != nil {
			return nil, &outbox.Fault{Class: outbox.Usage, Code: "list",
				Message: fmt.Sprintf("--id @%s", name), Err: err, Hint: "Name a file with one id a line"}
		}
		all = append(all, lines...)
	}
	for i, w := range all {
		if w == "" {
			return nil, &outbox.Fault{Class: outbox.Usage, Code: "list",
				Message: fmt.Sprintf("--id: the %d. id is empty", i+1), Hint: "Leave it out"}
		}
	}
	return all, nil
}

func linesOf(name string) (lines []string, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); ; {
		if !s.Scan() {
			return lines, s.Err()
		}
		if line := strings.TrimSpace(s.Text()); line != "" {
			lines = append(lines, line)
		}
	}
}
