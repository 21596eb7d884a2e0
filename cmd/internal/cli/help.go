package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/outflowhq/outflow/internal/app/config"
)

// usage prints how a command is called. The flags of the settings are left to a topic of their own: they are
// many, and the same everywhere.
func usage(cmd *cobra.Command) error {
	var b strings.Builder
	b.WriteString("Usage:\n")
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "  %s <command> [flags]\n", cmd.CommandPath())
	} else {
		fmt.Fprintf(&b, "  %s\n", cmd.UseLine())
	}
	list(&b, "Commands", cmd, (*cobra.Command).IsAvailableCommand)
	list(&b, "Topics", cmd, (*cobra.Command).IsAdditionalHelpTopicCommand)
	if cmd.HasExample() {
		fmt.Fprintf(&b, "\nExample:\n%s\n", cmd.Example)
	}
	own, _ := splitFlags(cmd.Flags())
	if own.HasAvailableFlags() {
		fmt.Fprintf(&b, "\nFlags:\n%s", own.FlagUsages())
	}
	if config.HasSettings(cmd) {
		b.WriteString("\nEvery setting is a flag as well: outflow help settings\n")
	}
	_, err := fmt.Fprint(cmd.OutOrStderr(), b.String())
	return err
}

func list(b *strings.Builder, title string, cmd *cobra.Command, which func(*cobra.Command) bool) {
	head := "\n" + title + ":\n"
	for _, c := range cmd.Commands() {
		if which(c) {
			fmt.Fprintf(b, "%s  %-11s %s\n", head, c.Name(), c.Short)
			head = ""
		}
	}
}

// splitFlags tells a command's own flags from those of the settings.
func splitFlags(all *pflag.FlagSet) (own, settings *pflag.FlagSet) {
	own, settings = pflag.NewFlagSet("", pflag.ContinueOnError), pflag.NewFlagSet("", pflag.ContinueOnError)
	settings.SortFlags = false
	all.VisitAll(func(f *pflag.Flag) {
		if config.IsSetting(f) {
			settings.AddFlag(f)
		} else {
			own.AddFlag(f)
		}
	})
	return own, settings
}

// settingsTopic is the page with all settings.
func settingsTopic() *cobra.Command {
	topic := &cobra.Command{
		Use:   "settings",
		Short: "All settings: as flags, in the environment, in the file",
		Long: `Each setting can be given as a flag, in the environment as OUTFLOW_ and its path in
upper case with _ for each dot, or in the YAML file that --config or OUTFLOW_CONFIG names. Flags come before
the environment, the environment before the file, the file before the defaults:

  --reorder.horizon 50ms
  OUTFLOW_REORDER_HORIZON=50ms
  reorder: {horizon: 50ms}

`,
	}
	topic.SetHelpFunc(func(topic *cobra.Command, args []string) {
		all := &cobra.Command{}
		all.Flags().SortFlags = false
		config.AddFlags(all, config.Args{})
		topic.Long += strings.TrimRight(all.Flags().FlagUsagesWrapped(110), "\n")
		topic.Parent().HelpFunc()(topic, args)
	})
	return topic
}

// helpCommand is cobra's, but for what it does when there is no such command.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:   "help [command or topic]",
		Short: "Help about a command or a topic",
		Args: func(_ *cobra.Command, args []string) error {
			if found, rest, err := root.Find(args); err != nil || found == nil || len(rest) > 0 {
				return fmt.Errorf("there is no command or topic %q", strings.Join(args, " "))
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			found, _, err := root.Find(args)
			if err != nil {
				return err
			}
			found.InitDefaultHelpFlag()
			return found.Help()
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion,
			cobra.ShellCompDirective) {
			var names []cobra.Completion
			if found, _, err := root.Find(args); err == nil {
				for _, c := range found.Commands() {
					names = append(names, cobra.CompletionWithDesc(c.Name(), c.Short))
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
}

// wanted is what an option may be, by the type that its help names.
var wanted = map[string]string{"int": "a whole number", "int64": "a whole number",
	"uint64": "a whole number, 0 or more", "duration": "a duration such as 90s or 1h30m",
	"bool": "true or false"}

// flagError says what an option may be, and names the flag that an unknown one was meant to be, where the
// command knows the settings.
func flagError(cmd *cobra.Command, err error) error {
	var bad *pflag.InvalidValueError
	if errors.As(err, &bad) && wanted[bad.GetFlag().Value.Type()] != "" {
		return fmt.Errorf("--%s = %q is not possible. Give %s", bad.GetFlag().Name, bad.GetValue(),
			wanted[bad.GetFlag().Value.Type()])
	}
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "" && config.HasSettings(cmd) {
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				names = append(names, f.Name)
			}
		})
		if near := config.Nearest(unknown.GetSpecifiedName(), names); near != "" {
			return fmt.Errorf("%w. The nearest is --%s", err, near)
		}
	}
	return err
}
