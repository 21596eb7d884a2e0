package cli

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// Set by the linker: -X github.com/outflowhq/outflow/cmd/internal/cli.version=... and cli.commit=... Without
// them, what Go records of the build counts.
var (
	version string
	commit  string
)

// buildVersion returns the version and the commit that the binary was built from, the latter "" where it is
// not known.
func buildVersion() (v, rev string) {
	v, rev = version, commit
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return cmp.Or(v, "(devel)"), rev
	}
	dirty := ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && commit == "":
			rev = s.Value
		case s.Key == "vcs.modified" && s.Value == "true" && commit == "":
			dirty = "+dirty"
		}
	}
	if rev != "" {
		rev += dirty
	}
	return cmp.Or(v, info.Main.Version, "(devel)"), rev
}

// VersionLine says which version this is, of which commit, made by which Go and for what.
func (a *App) VersionLine() string {
	v, rev := buildVersion()
	line := a.Name + " " + v
	if rev != "" {
		line += " commit " + rev
	}
	return fmt.Sprintf("%s %s %s/%s", line, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func (a *App) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "version",
		Short:             "Print the version, the commit and the version of Go",
		Example:           "  " + a.Name + " version",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(a.Stdout, a.VersionLine())
			return err
		},
	}
}
