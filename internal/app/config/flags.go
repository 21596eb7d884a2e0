package config

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// AddFile adds --config to cmd, which makes it a command with settings. args is filled when the flags are
// parsed.
func AddFile(cmd *cobra.Command, args Args) {
	cmd.Flags().Var(&argument{args, fileArg, "file", ""}, fileArg,
		"the file with the settings (also "+fileEnv+")")
	_ = cmd.MarkFlagFilename(fileArg, "yaml", "yml")
}

// HasSettings tells whether cmd is a command with settings.
func HasSettings(cmd *cobra.Command) bool { return cmd.Flags().Lookup(fileArg) != nil }

// AddFlags adds a flag for each setting to cmd. args is filled when the flags are parsed.
func AddFlags(cmd *cobra.Command, args Args) {
	flags := cmd.Flags()
	var scratch Config
	for i := range settings {
		s := &settings[i]
		kind := s.bind(&scratch).kind()
		f := flags.VarPF(&argument{args, s.path, kind, s.def}, s.path, "", s.doc)
		f.Annotations = map[string][]string{settingAnnotation: {s.defText()}}
		if kind == "bool" {
			f.NoOptDefVal = "true"
		}
		_ = cmd.RegisterFlagCompletionFunc(s.path, completion(s))
	}
}

const settingAnnotation = "outflow_setting"

// IsSetting tells the flags of settings from a command's own.
func IsSetting(f *pflag.Flag) bool { return f.Annotations[settingAnnotation] != nil }

// argument keeps the text it is given: values are checked together with those of the other sources.
type argument struct {
	args       Args
	path, kind string
	def        string
}

func (f *argument) Set(text string) error {
	if old := f.args[f.path]; old != "" && f.path == "headers" {
		text = old + "," + text
	}
	f.args[f.path] = text
	return nil
}

func (f *argument) String() string { return f.def }
func (f *argument) Type() string   { return f.kind }

func completion(s *setting) cobra.CompletionFunc {
	switch {
	case s.choices != nil:
		return cobra.FixedCompletions(s.choices, cobra.ShellCompDirectiveNoFileComp)
	case s.want == wantFile:
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
	case s.want == wantDir:
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
	}
	return cobra.NoFileCompletions
}
