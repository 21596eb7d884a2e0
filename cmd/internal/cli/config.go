package cli

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// configured completes a command that needs the configuration: the settings become its flags, if it is the
// one that is run, and do gets the result.
func (a *App) configured(cmd *cobra.Command,
	do func(ctx context.Context, cfg config.Config) error) *cobra.Command {
	config.AddFile(cmd, a.args)
	cmd.Args = cobra.NoArgs
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := a.configure()
		name := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
		if name != "run" {
			cfg.Command = name
		}
		if err == nil && !slices.Contains(away, name) {
			err = wiring.NeedHome(cfg, "outflow "+name)
		}
		if err != nil {
			return err
		}
		return do(cmd.Context(), cfg)
	}
	return cmd
}

// addSettings makes the settings flags of the command that a command line names. There are many settings and
// many commands: all of each would take longer than most commands do.
func (a *App) addSettings(root *cobra.Command, line []string) {
	if len(line) > 0 && (line[0] == cobra.ShellCompRequestCmd || line[0] == cobra.ShellCompNoDescRequestCmd) {
		line = line[1:]
	}
	if cmd, _, _ := root.Find(line); config.HasSettings(cmd) {
		config.AddFlags(cmd, a.args)
	}
}

// away are the commands for a stream that is made of another cluster's rows. The others compare positions,
// which are the home's, with this server's, or read the table, which has the rows of all clusters.
var away = []string{"init", "run", "status", "config", "healthcheck", "tail", "support", "uninstall"}

// checks are the rules about settings that config does not know.
var checks = []config.Check{
	{Paths: []string{"subject"}, Of: func(c config.Config) error {
		_, err := outbox.ParseSubjectTemplate(c.Subject)
		return err
	}},
	{Paths: []string{"sink.dead_letter_subject", "subject", "stream", "headers"},
		Of: func(c config.Config) error {
			return sink.Config{
				Stream: c.Stream, Subject: c.Subject, DeadLetter: c.Sink.OnPoison == config.PoisonDeadLetter,
				DeadLetterSubject: c.Sink.DeadLetterSubject, MaxPayload: c.Sink.MaxPayload,
				Resolve: func(string) (sink.Field, bool) {
					return 0, true
				}, // the table decides about the columns
			}.Validate()
		}},
}

func (a *App) configCommand() *cobra.Command {
	return a.configured(&cobra.Command{
		Use:   "config",
		Short: "Print the configuration in force, and where each value comes from",
		Long: `Prints the effective configuration in the form of the file, each value with where it
comes from, secrets hidden. Nothing is connected to. Exit code 2 if a setting is unknown or a value is not
possible.`,
		Example: "  outflow config --config outflow.yaml --reorder.horizon 50ms",
	}, func(_ context.Context, cfg config.Config) error {
		_, err := a.Stdout.Write(cfg.YAML())
		return err
	})
}
