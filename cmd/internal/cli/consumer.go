package cli

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/operate/consumeradmin"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) consumerCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "consumer",
		Short: "The consumers of the stream: list them, set one back, repartition it, delete it",
		Long: "Shows who reads the stream and how far each one is, sets one back so that it reads events " +
			"again, changes into how many partitions it is divided, and deletes one.",
		Example: "  outflow consumer list\n  outflow consumer rewind search --to time:2h\n  outflow " +
			"consumer repartition search --partitions 16",
	}
	cmd.AddCommand(a.consumerListCommand(), a.consumerRewindCommand(), a.consumerRepartitionCommand(),
		a.consumerDeleteCommand())
	return cmd
}

// onConsumers runs a command that looks at the stream's consumers, over a connection to NATS and, if it is
// given, one to the consumer's database; otherwise it tries postgres.url.
func (a *App) onConsumers(cmd *cobra.Command, d *consumerDatabase,
	do func(ctx context.Context, w *consumeradmin.Admin) error) *cobra.Command {
	a.configured(cmd, func(ctx context.Context, cfg config.Config) error {
		conn, err := wiring.ConnectBroker(ctx, cfg, newLogger(a.Stderr, cfg))
		if err != nil {
			return err
		}
		defer conn.Close()
		js, err := conn.API().JetStream()
		if err != nil {
			return err
		}
		w := &consumeradmin.Admin{Stream: cfg.Stream, JS: js, API: conn.API(), Schema: d.schema,
			From: "the consumer's database", Archive: cfg.Archive.URL}
		switch w.DB, err = d.connect(ctx, a, cfg); {
		case err == nil:
			defer w.DB.Close(context.WithoutCancel(ctx)) //nolint:errcheck // nothing depends on it any more
		case d.url != "":
			return err
		default:
			a.printf(a.Stderr, "without what consumers keep in a database: %v\n", err)
			w.DB = nil
		}
		defer wiring.WaitNATS(ctx, cfg)()
		whileConnected, explain := conns.WhileConnected(ctx, conn)
		return explain(do(whileConnected, w))
	})
	d.flags(cmd)
	return cmd
}

func (a *App) consumerListCommand() *cobra.Command {
	var d consumerDatabase
	var asJSON bool
	cmd := a.onConsumers(&cobra.Command{
		Use:   "list",
		Short: "The consumers of the stream, with lag and position",
		Long: `Lists the consumers of the stream: how many messages lie before each (lag), the
sequence and the position up to which everything is done, and whether somebody reads from it now. Of those
of the Go package consumer whose database is at hand also the instances that share their partitions,
partitions that nobody works on or that wait for what the broker has lost, a change of the layout that is
under way, and how many events are parked. Their lag counts from the slowest partition.`,
		Example: "  outflow consumer list\n" +
			"  outflow consumer list --database postgres://app@db/search --json",
	}, &d, func(ctx context.Context, w *consumeradmin.Admin) error {
		all, err := w.List(ctx)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(append([]consumeradmin.Consumer{}, all...))
		}
		return a.printConsumers(w.Stream, w.DB != nil, all)
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// printConsumers prints the consumers, those of a database only if that was read.
func (a *App) printConsumers(stream string, database bool, all []consumeradmin.Consumer) error {
	if len(all) == 0 {
		text := "stream %s has no consumers\n"
		if !database {
			text = "NATS has no consumers of stream %s; those of the database are not known\n"
		}
		_, err := fmt.Fprintf(a.Stdout, text, stream)
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CONSUMER\tMARKS\tLAG\tUNACKED\tDONE UP TO\tPOSITION\tREAD "+
		"NOW\tPARTITIONS\tPARKED\tFILTER")
	for i := range all {
		c := &all[i]
		name, position, running, partitions, parked := c.Name, "-", "no", "-", "-"
		if !c.Durable {
			name += " (not durable)"
		}
		if c.Position != nil {
			position = c.Position.String()
		}
		if c.Running {
			running = "yes"
		}
		if c.Partitions > 0 {
			partitions = fmt.Sprint(c.Partitions)
			if c.Least != nil && *c.Least != *c.Most {
				partitions += fmt.Sprintf(" (%d to %d)", *c.Least, *c.Most)
			}
		}
		if c.Parked != nil {
			parked = fmt.Sprint(*c.Parked)
		}
		filter := strings.Join(c.Filters, " ")
		if filter == "" {
			filter = ">"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n", name, c.Offsets, c.Pending, c.AckPending,
			c.Sequence, position, running, partitions, parked, filter)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for i := range all {
		for _, line := range all[i].Lines() {
			a.printf(a.Stdout, "%s: %s\n", all[i].Name, line)
		}
	}
	return nil
}

func (a *App) consumerRewindCommand() *cobra.Command {
	var d consumerDatabase
	var r consumeradmin.Rewind
	var yes bool
	cmd := a.onConsumers(&cobra.Command{
		Use:   "rewind <consumer>",
		Short: "Set a consumer back, so that it reads events again",
		Long: `Sets a consumer back to a place in the stream: start, seq:N (the first one that comes
again), position:LSN-i, time:2026-01-31T12:00:00Z, or time:2h for two hours ago. Says what will come again,
and asks first.

A consumer of the Go package consumer sees the events that it had before marked as replayed. Of any other
durable the configuration is kept and the durable made again. It has to be stopped; with --running one that
keeps its marks in PostgreSQL is set back while its instances run, which go on from there. It only goes
back, and only to what the stream still has or, with archive.url, the archive: the consumer then needs
Config.Archive. What neither has, outflow replay --from table --to consumer:NAME reads.

Exit code 2 without --yes where nobody can be asked, 3 if it runs, if there is no such consumer or place, if
one of them changed while it asked, or a server can't be reached, 1 if a server is lost on the way: run it
again.`,
		Example: "  outflow consumer rewind search --to start\n  outflow consumer rewind billing --to " +
			"time:2026-01-31T12:00:00Z --yes",
	}, &d, func(ctx context.Context, w *consumeradmin.Admin) error {
		r.Confirm = func(p *consumeradmin.Plan) error {
			a.printLines(p.Lines())
			if yes || r.DryRun {
				return nil
			}
			return a.ask(ctx, fmt.Sprintf("Set consumer %s back?", p.Name))
		}
		switch err := w.Rewind(ctx, r); {
		case err != nil:
			return err
		case r.DryRun:
			fmt.Fprintln(a.Stdout, "nothing was changed (--dry-run)")
		case r.Running:
			fmt.Fprintf(a.Stdout, "done: the instances of consumer %s go on from there\n", r.Name)
		default:
			fmt.Fprintf(a.Stdout, "done: start consumer %s again\n", r.Name)
		}
		return nil
	})
	named(cmd, &r.Name)
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if r.To == "" {
			return &outbox.Fault{Class: outbox.Usage, Code: "rewind_to", Message: "--to is missing",
				Hint: "Write --to start, seq:N, position:P or time:T"}
		}
		return nil
	}
	cmd.Flags().StringVar(&r.To, "to", "", "start, seq:N, position:LSN-i or time:T")
	cmd.Flags().BoolVar(&r.Running, "running", false, "also while it runs: its instances go on from there")
	confirmed(cmd, &yes, &r.DryRun)
	return cmd
}

// named takes a command's one argument.
func named(cmd *cobra.Command, name *string) {
	run := cmd.RunE
	cmd.Args = cobra.ExactArgs(1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		*name = args[0]
		return run(cmd, args)
	}
}

// confirmed gives a command that asks before it changes something its flags.
func confirmed(cmd *cobra.Command, yes, dryRun *bool) {
	cmd.Flags().BoolVar(yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(dryRun, "dry-run", false, "only say what would be done")
}

func (a *App) consumerDeleteCommand() *cobra.Command {
	var d consumerDatabase
	var r consumeradmin.Delete
	var yes, asJSON bool
	cmd := a.onConsumers(&cobra.Command{
		Use:   "delete <consumer>",
		Short: "Delete a consumer: its marks, what it has parked, what NATS has of it",
		Long: `Deletes what there is of a consumer: its marks, its instances' rows and what it has
parked, its durable, and messages that were replayed to it and not read. Its effects stay. Says what that
is, and asks first. It has to be stopped. What is parked is only deleted with --force: its effects would
never happen. Killed on the way, it is run again.

Exit code 2 without --yes where nobody can be asked, 3 if it runs, has parked events, if there is no such
consumer or a server can't be reached, 1 if a server is lost on the way: run it again.`,
		Example: "  outflow consumer delete search --dry-run\n  outflow consumer delete search --yes",
	}, &d, func(ctx context.Context, w *consumeradmin.Admin) error {
		var plan *consumeradmin.Deletion
		r.Confirm = func(p *consumeradmin.Deletion) error {
			if plan = p; !asJSON {
				a.printLines(p.Lines())
			}
			if yes || r.DryRun {
				return nil
			}
			return a.ask(ctx, fmt.Sprintf("Delete consumer %s?", p.Name))
		}
		if err := w.Delete(ctx, r); err != nil {
			return err
		}
		switch {
		case asJSON:
			return a.printJSON(plan)
		case r.DryRun:
			fmt.Fprintln(a.Stdout, "nothing was changed (--dry-run)")
		default:
			fmt.Fprintf(a.Stdout, "done: consumer %s is deleted\n", r.Name)
		}
		return nil
	})
	named(cmd, &r.Name)
	cmd.Flags().BoolVar(&r.Force, "force", false, "also what it has parked")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	confirmed(cmd, &yes, &r.DryRun)
	return cmd
}

func (a *App) consumerRepartitionCommand() *cobra.Command {
	var d consumerDatabase
	var r consumeradmin.Repartition
	var yes, asJSON bool
	cmd := a.onConsumers(&cobra.Command{
		Use:   "repartition <consumer>",
		Short: "Change into how many partitions a consumer is divided, or how a document is found",
		Long: `Asks for another number of partitions (--partitions), or for another way to find the
document of a message (--keying, as the error ErrKeying and outflow consumer list name it). The running
instances do it: they work up to one sequence, the barrier, and go on in the new layout when all partitions
are there. Says what that is, asks first, and waits, unless no instance runs. Killed or not, the change goes
on; run again, the command shows how far it is. --cancel takes it back, as long as it has not happened.

Exit code 2 without --yes where nobody can be asked, 3 if another change is under way, if there is no such
consumer or a server can't be reached, 1 if a server is lost on the way.`,
		Example: "  outflow consumer repartition search --partitions 16\n  outflow consumer repartition " +
			"search --cancel --yes",
	}, &d, func(ctx context.Context, w *consumeradmin.Admin) error {
		r.Confirm = func(p *consumeradmin.LayoutPlan) error {
			if !asJSON {
				a.printLines(p.Lines())
			}
			if yes || r.DryRun {
				return nil
			}
			return a.ask(ctx, fmt.Sprintf("Change the layout of consumer %s?", p.Name))
		}
		p, err := w.Repartition(ctx, r)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(p)
		}
		fmt.Fprintln(a.Stdout, p.Outcome())
		return nil
	})
	named(cmd, &r.Name)
	cmd.Flags().IntVar(&r.Partitions, "partitions", 0, "the new number of partitions")
	cmd.Flags().StringVar(&r.Keying, "keying", "", "the new way to find the document of a message")
	cmd.Flags().BoolVar(&r.Cancel, "cancel", false, "take a change back that is under way")
	cmd.Flags().BoolVar(&r.NoWait, "no-wait", false, "do not wait until the instances have done it")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	confirmed(cmd, &yes, &r.DryRun)
	return cmd
}

// ask asks for a yes at the terminal. If there is no terminal the answer is no.
func (a *App) ask(ctx context.Context, question string) error {
	refused := func(what string) error {
		return &outbox.Fault{Class: outbox.Usage, Code: "not_confirmed", Message: what +
			": nothing was changed"}
	}
	if !isTerminal(os.Stdin) {
		return refused("nobody can be asked, standard input is no terminal")
	}
	defer a.line.Pause()()
	fmt.Fprintf(a.Stdout, "%s [y/N] ", question)
	answer := make(chan string, 1)
	go func() { // reading a terminal can't be interrupted; the process ends with it
		defer crash.Guard()
		line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
		answer <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case line := <-answer:
		if line == "y" || line == "yes" {
			return nil
		}
		return refused("not confirmed")
	}
}

// isTerminal reports whether a file is a terminal.
func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return false
	}
	null, err := os.Stat(os.DevNull)
	return err == nil && !os.SameFile(info, null)
}
