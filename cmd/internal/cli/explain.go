package cli

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) explainCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "explain [code or text]",
		Short: "Say what a code means and what to do, or find the code of a message",
		Long: `Explains a code that a command, a log, a metric or the status page has shown. With
other words, such as the message itself, it lists the codes that are most likely meant; without any it lists
all. It needs no connection.`,
		Example:           "  outflow explain slot_missing\n  outflow explain \"replication slot is in use\"",
		ValidArgsFunction: cobra.FixedCompletions(codes(), cobra.ShellCompDirectiveNoFileComp),
		RunE: func(_ *cobra.Command, args []string) error {
			text := strings.Join(args, " ")
			if f, ok := finding.Of(text); ok {
				explain(a.Stdout, f)
				return nil
			}
			found := finding.Search(text)
			switch {
			case text == "":
				for _, s := range finding.Subjects() {
					fmt.Fprintf(a.Stdout, "%s\n", s.Name)
					listFindings(a.Stdout, s.Findings)
					fmt.Fprintln(a.Stdout)
				}
			case len(found) == 0:
				return unknownCode(text)
			case len(found) == 1:
				explain(a.Stdout, found[0])
			default:
				listFindings(a.Stdout, found)
			}
			return nil
		},
	}
}

// maxEcho is how much of a text that nothing was found for is said again, in bytes: it may be a whole log.
const maxEcho = 200

func unknownCode(text string) error {
	if len(text) > maxEcho {
		text = strings.ToValidUTF8(text[:maxEcho], "") + "…"
	}
	f := &outbox.Fault{Class: outbox.Usage, Code: "unknown_code",
		Message: fmt.Sprintf("there is no code %q, and nothing has these words", text)}
	if near := config.Nearest(text, codes()); near != "" {
		f.Hint = "The nearest is " + near
	}
	return f
}

// codes returns all codes.
func codes() []string {
	var all []string
	for _, f := range finding.All() {
		all = append(all, f.Code)
	}
	return all
}

func listFindings(w io.Writer, all []finding.Finding) {
	for _, f := range all {
		fmt.Fprintf(w, "  %-22s %s\n", f.Code, f.Title)
	}
}

// explain prints all that the catalogue says of a finding.
func explain(w io.Writer, f finding.Finding) {
	fmt.Fprintf(w, "%s: %s\n\nSeverity:  %v\n", f.Code, f.Title, f.Severity)
	if len(f.Classes) > 0 {
		fmt.Fprintf(w, "Exit code: %s\n", exits(f))
	}
	fmt.Fprintf(w, "\n%s", f.Text())
}

// exits says which exit codes the commands have that end with a finding.
func exits(f finding.Finding) string {
	var all []string
	for _, c := range f.Classes {
		all = append(all, strconv.Itoa(exitCode(&outbox.Fault{Class: c, Code: f.Code})))
	}
	s := strings.Join(all, " or ")
	if slices.Contains(f.Classes, outbox.Transient) {
		s += ", but `outflow run` goes on by itself"
	}
	return s
}
