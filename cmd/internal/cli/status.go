package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/status"
)

func (a *App) statusCommand() *cobra.Command {
	var asJSON, watching bool
	cmd := a.configured(&cobra.Command{
		Use:   "status",
		Short: "Show what is wrong, lag, positions, and the health of slot and stream",
		Long: `Reads slot, checkpoint record, stream, consumers and servers, and shows where outflow
is and what to do. It needs no running outflow, and changes nothing. It shows what it can read where a
server does not answer.

The exit code is 0 if everything could be read, also where the health says that run would not start; 3 if
something could not be read. With --watch it shows all of it again every 2 seconds until it is interrupted,
and ends with 0; if the output is not a terminal, in a line each.`,
		Example: "  outflow status --config outflow.yaml\n  outflow status --watch\n  outflow status --json",
	}, func(ctx context.Context, cfg config.Config) error {
		log := newLogger(a.Stderr, cfg)
		if watching {
			first := sync.OnceFunc(func() { a.line.Pause() }) // what is shown every 2 seconds is a word
			return status.Watch(ctx, cfg, log, func(r *status.Report) error {
				first()
				return a.show(r, asJSON)
			})
		}
		report, err := status.Read(ctx, cfg, log)
		if ctx.Err() != nil {
			return err
		}
		if asJSON {
			return errFirst(a.printJSON(report), err)
		}
		style, _ := styleOf(a.Stdout)
		style.Width = 0 // what runs beyond the line is not lost
		return errFirst(report.Print(a.Stdout, style), err)
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&watching, "watch", false, "show it again every 2 seconds")
	return cmd
}

func errFirst(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// show shows a report over the one before it.
func (a *App) show(r *status.Report, asJSON bool) error {
	style, terminal := styleOf(a.Stdout)
	switch {
	case asJSON:
		return json.NewEncoder(a.Stdout).Encode(r)
	case !terminal:
		_, err := fmt.Fprintln(a.Stdout, r.Line())
		return err
	}
	var b bytes.Buffer
	if err := r.Print(&b, style); err != nil {
		return err
	}
	// Over the old text, each line to its end: to clear the screen first would flicker.
	text := bytes.ReplaceAll(b.Bytes(), []byte("\n"), []byte("\x1b[K\n"))
	_, err := fmt.Fprintf(a.Stdout, "\x1b[H%s\x1b[J", text)
	return err
}

// styleOf tells whether an output is a terminal, and how it shows reports.
func styleOf(w io.Writer) (s status.Style, terminal bool) {
	f, ok := fileOf(w)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return s, false
	}
	s.Width, _, _ = term.GetSize(int(f.Fd())) // 0 if it does not say
	s.Colour = os.Getenv("NO_COLOR") == ""
	return s, true
}
