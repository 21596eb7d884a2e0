package cli

import (
	"encoding/json"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/progress"
)

// throughLine lets what is printed go through the line that shows progress: it shows nothing before a command
// begins.
func (a *App) throughLine() {
	a.line = progress.New(progress.Of(a.Stdout, a.Stderr))
	a.Stdout, a.Stderr = a.line.Stdout(), a.line.Stderr()
}

// fileOf returns the file that an output writes to, if it is one.
func fileOf(w io.Writer) (f *os.File, ok bool) {
	if through, is := w.(interface{ Unwrap() io.Writer }); is {
		w = through.Unwrap()
	}
	f, ok = w.(*os.File)
	return f, ok
}

// shown lets a command, and its subcommands, show what they do while they take their time: see package
// progress.
func (a *App) shown(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		a.shown(sub)
	}
	run := cmd.RunE
	if run == nil {
		return
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		a.line.Start(cmd.CommandPath())
		defer a.line.Close()
		cmd.SetContext(progress.With(cmd.Context(), a.line))
		return run(cmd, args)
	}
}

// inLog prints steps and progress as lines of the log.
func inLog(log *slog.Logger) func(progress.Update) {
	return func(u progress.Update) { log.Info("progress", "text", u.Text) }
}

// progressAsJSON prints steps and progress as lines of JSON.
func (a *App) progressAsJSON() {
	lines := json.NewEncoder(a.Stderr)
	a.line.SetPrint(func(u progress.Update) {
		if u.Figures == nil {
			_ = lines.Encode(map[string]string{"step": u.Text}) // nobody reads it
			return
		}
		report := struct {
			Step string   `json:"step"`
			Done int64    `json:"done"`
			Of   int64    `json:"of,omitempty"`
			Rate float64  `json:"per_second"`
			Left *float64 `json:"remaining_seconds,omitempty"`
		}{Step: u.Text, Done: u.Figures.Done, Of: u.Figures.Of, Rate: u.Figures.PerSecond}
		if u.Figures.LeftKnown {
			left := u.Figures.Left.Seconds()
			report.Left = &left
		}
		_ = lines.Encode(report)
	})
}
