package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/cmd/internal/hangup"
	"github.com/outflowhq/outflow/internal/app/config"
)

// Outflow returns the command line of outflow.
func (a *App) Outflow() *cobra.Command {
	return a.Root(&cobra.Command{
		Short: "Publish a PostgreSQL outbox to NATS JetStream, in order and exactly once",
		Long: `Outflow publishes the inserts of a PostgreSQL outbox table to a NATS JetStream stream:
committed rows only, each exactly once, in an order that depends on the WAL alone.

Exit codes: 0 clean, 1 unexpected or interrupted, 2 a wrong option or setting, 3 the set-up cannot work, 4 a
gap or a divergence that an operator has to decide about, 5 a row that cannot be published.`,
		Example: "  outflow init --config outflow.yaml\n  outflow run --config outflow.yaml",
	}, a.Service()...)
}

// Service returns the commands of the service and of those who operate it.
func (a *App) Service() []*cobra.Command {
	a.args = config.Args{}
	all := []*cobra.Command{
		a.initCommand(),
		a.runCommand(),
		a.statusCommand(),
		a.doctorCommand(),
		a.drainCommand(),
		a.tailCommand(),
		a.inspectCommand(),
		a.repairCommand(),
		a.replayCommand(),
		a.parkedCommand(),
		a.consumerCommand(),
		a.planCommand(),
		a.partitionCommand(),
		a.archiveCommand(),
		a.streamCommand(),
		a.eraseCommand(),
		a.maintainCommand(),
		a.uninstallCommand(),
		a.supportCommand(),
		a.configCommand(),
		a.healthcheckCommand(),
		a.explainCommand(),
		settingsTopic(),
	}
	for _, cmd := range all {
		a.shown(cmd)
	}
	return all
}

// Root completes the root of a command line: what is the same in both binaries, and its commands.
func (a *App) Root(root *cobra.Command, commands ...*cobra.Command) *cobra.Command {
	root.Use, root.Version, root.SilenceErrors, root.SilenceUsage = a.Name, a.VersionLine(), true, true
	// What fails before this is a wrong command line.
	root.PersistentPreRun = func(cmd *cobra.Command, _ []string) {
		a.started = true
		if a.signals != nil && cmd.Name() != serviceName {
			hangup.End(a.signals)
		}
	}
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SetUsageFunc(usage)
	root.SetFlagErrorFunc(flagError)
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetHelpCommand(helpCommand(root))
	root.AddCommand(commands...)
	root.AddCommand(a.versionCommand())
	root.InitDefaultCompletionCmd()
	for _, cmd := range append(root.Commands(), root) {
		if cmd.HasSubCommands() {
			cmd.Args, cmd.RunE, cmd.SuggestionsMinimumDistance = noSuchCommand, showHelp, 2
		}
	}
	return root
}

// showHelp is what a command with subcommands does by itself.
func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// noSuchCommand refuses the arguments of such a command: what stands there was meant to be a subcommand.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return fmt.Errorf("there is no command %q. The nearest is %s", args[0], near[0])
	}
	return fmt.Errorf("there is no command %q", args[0])
}
