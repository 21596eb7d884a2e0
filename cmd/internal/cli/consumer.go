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
		Short: "The consumers of the stream: list them, set one back",
		Long: "Shows who reads the stream and how far each one is, and sets one back so that it reads " +
			"events again.",
		Example: "  outflow consumer list\n  outflow consumer rewind search --to time:2h",
	}
	cmd.AddCommand(a.consumerListCommand(), a.consumerRewindCommand())
	return cmd
}

// consumerAdmin connects to NATS and, if it is given, the consumer's database; otherwise it tries
// postgres.url.
func (a *App) consumerAdmin(ctx context.Context, cfg config.Config,
	d *consumerDatabase) (w *consumeradmin.Admin, closeAll func(), err error) {
	log := newLogger(a.Stderr, cfg)
	sc, err := wiring.Broker(cfg, log)
	if err != nil {
		return nil, nil, err
	}
	conn, err := wiring.Connect(ctx, cfg, sc)
	if err != nil {
		return nil, nil, err
	}
	js, err := conn.API().JetStream()
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	w = &consumeradmin.Admin{Stream: cfg.Stream, JS: js, Conn: conn, Schema: d.schema,
		From: "the consumer's database"}
	w.DB, err = d.connect(ctx, a, cfg)
	if err != nil {
		if d.url != "" {
			conn.Close()
			return nil, nil, err
		}
		a.printf(a.Stderr, "without what consumers keep in a database: %v\n", err)
		w.DB = nil
	}
	return w, func() {
		if w.DB != nil {
			w.DB.Close(context.WithoutCancel(ctx)) //nolint:errcheck // nothing depends on it any more
		}
		conn.Close()
	}, nil
}

func (a *App) consumerListCommand() *cobra.Command {
	var d consumerDatabase
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "list",
		Short: "The consumers of the stream, with lag and position",
		Long: `Lists the consumers of the stream: how many messages each has still to be given (lag) and has not acknowledged, the
sequence and the position up to which everything is done, and whether somebody reads from it now. Of those of the Go
package consumer also where they keep their marks, the smallest and the largest mark, and how many events are parked,
where their database is at hand.`,
		Example: "  outflow consumer list\n" +
			"  outflow consumer list --database postgres://app@db/search --json",
	}, func(ctx context.Context, cfg config.Config) error {
		w, closeAll, err := a.consumerAdmin(ctx, cfg, &d)
		if err != nil {
			return err
		}
		defer closeAll()
		defer wiring.WaitNATS(ctx, cfg)()
		whileConnected, explain := conns.WhileConnected(ctx, w.Conn)
		all, err := w.List(whileConnected)
		err = explain(err)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(append([]consumeradmin.Consumer{}, all...))
		}
		return a.printConsumers(cfg, all)
	})
	d.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *App) printConsumers(cfg config.Config, all []consumeradmin.Consumer) error {
	if len(all) == 0 {
		_, err := fmt.Fprintf(a.Stdout, "stream %s has no consumers\n", cfg.Stream)
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CONSUMER\tMARKS\tLAG\tUNACKED\tDONE UP TO\tPOSITION\tREAD "+
		"NOW\tPARTITIONS\tPARKED\tFILTER")
	for _, c := range all {
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
	for _, c := range all {
		if c.Note != "" {
			a.printf(a.Stdout, "%s: %s\n", c.Name, c.Note)
		}
	}
	return nil
}

func (a *App) consumerRewindCommand() *cobra.Command {
	var d consumerDatabase
	var r consumeradmin.Rewind
	var yes bool
	cmd := a.configured(&cobra.Command{
		Use:   "rewind <consumer>",
		Short: "Set a consumer back, so that it reads events again",
		Long: `Sets a consumer back to a place in the stream: start, seq:N (the first one that comes again), position:LSN-i,
time:2026-01-31T12:00:00Z, or time:2h for two hours ago. Says what will come again, and asks first.

A consumer of the Go package consumer sees the events that it had before marked as replayed. Of any other durable the
configuration is kept and the durable made again. It has to be stopped. It only goes back, and only to what the stream
still has: what retention removed, outflow replay --from table --to consumer:NAME reads.

Exit code 2 without --yes where nobody can be asked, 3 if it runs, if there is no such consumer or place or a server
can't be reached, 1 if a server is lost on the way: run it again.`,
		Example: "  outflow consumer rewind search --to start\n  outflow consumer rewind billing --to " +
			"time:2026-01-31T12:00:00Z --yes",
	}, func(ctx context.Context, cfg config.Config) error {
		if r.To == "" {
			return &outbox.Fault{Class: outbox.Usage, Code: "rewind_to", Message: "--to is missing",
				Hint: "Write --to start, seq:N, position:P or time:T"}
		}
		w, closeAll, err := a.consumerAdmin(ctx, cfg, &d)
		if err != nil {
			return err
		}
		defer closeAll()
		r.Confirm = func(p *consumeradmin.Plan) error {
			for _, line := range p.Lines() {
				a.printf(a.Stdout, "%s\n", line)
			}
			if yes {
				return nil
			}
			return a.ask(ctx, fmt.Sprintf("Set consumer %s back?", p.Name))
		}
		defer wiring.WaitNATS(ctx, cfg)()
		whileConnected, explain := conns.WhileConnected(ctx, w.Conn)
		if err := explain(w.Rewind(whileConnected, r)); err != nil {
			return err
		}
		fmt.Fprintf(a.Stdout, "done: start consumer %s again\n", r.Name)
		return nil
	})
	run := cmd.RunE
	cmd.Args = cobra.ExactArgs(1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		r.Name = args[0]
		return run(cmd, args)
	}
	d.flags(cmd)
	cmd.Flags().StringVar(&r.To, "to", "", "start, seq:N, position:LSN-i or time:T")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
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
