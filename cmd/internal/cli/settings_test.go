package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
)

// TestSettingsAreFlagsOfTheCommandThatRuns: they are added to that command alone, which has to be found on
// any command line. A command that knows none of them, or has a flag of the same name, fails here.
func TestSettingsAreFlagsOfTheCommandThatRuns(t *testing.T) {
	t.Parallel()
	run := func(line string) (code int, stdout, stderr string) {
		var out, err bytes.Buffer
		a := &App{Name: "outflow", Stdout: &out, Stderr: &err}
		code = a.run(t.Context(), (*App).Outflow, strings.Fields(line))
		return code, out.String(), err.String()
	}
	// The first flag that a command does not know is the one that it names.
	names := func(line, flag string) {
		t.Helper()
		if code, _, said := run(line); code != 2 || !strings.Contains(said, "unknown flag: "+flag+"\n") {
			t.Errorf("%s: code %d, %s, want the unknown flag %s", line, code, said, flag)
		}
	}
	with := 0
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, c := range cmd.Commands() {
			walk(c)
		}
		path := strings.TrimPrefix(cmd.CommandPath(), "outflow ")
		switch {
		case config.HasSettings(cmd):
			with++
			names(path+" --sink.msg_id --stream X --reorder.horizon=1ms --no-such-flag", "--no-such-flag")
			if _, out, _ := run(path + " --help"); !strings.Contains(out, "outflow help settings") {
				t.Errorf("%s --help does not say where the settings are:\n%s", path, out)
			}
			if _, out, _ := run("__complete " + path + " --reorder.h"); !strings.Contains(out,
				"--reorder.horizon\t") {
				t.Errorf("%s --reorder.h is completed to\n%s", path, out)
			}
		case cmd.Runnable() && cmd.HasParent() && !cmd.DisableFlagParsing:
			names(path+" --stream X", "--stream")
		}
	}
	walk((&App{Name: "outflow", Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}).Outflow())
	if with < 20 {
		t.Errorf("%d commands have settings", with)
	}
	all := &cobra.Command{}
	config.AddFlags(all, config.Args{})
	_, settings := splitFlags(all.Flags())
	_, page, _ := run("help settings")
	for line := range strings.SplitSeq(settings.FlagUsages(), "\n") {
		if flag, _, _ := strings.Cut(strings.TrimSpace(line), " "); !strings.Contains(page, flag) {
			t.Errorf("help settings does not list %s", flag)
		}
	}
}

// TestAnImpossibleOptionSaysWhatItMayBe, as an impossible setting does.
func TestAnImpossibleOptionSaysWhatItMayBe(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"partition apply --accept-unpublished many": `--accept-unpublished = "many" is not possible. Give a whole`,
		"archive rows --from -1":                    `--from = "-1" is not possible. Give a whole number, 0 or more`,
		"tail --last 1.5":                           `--last = "1.5" is not possible. Give a whole number`,
		"drain --timeout 5":                         `--timeout = "5" is not possible. Give a duration such as`,
		"uninstall --yes=perhaps":                   `--yes = "perhaps" is not possible. Give true or false`,
	} {
		var out, err bytes.Buffer
		a := &App{Name: "outflow", Stdout: &out, Stderr: &err}
		code := a.run(t.Context(), (*App).Outflow, strings.Fields(line))
		if code != 2 || !strings.Contains(err.String(), want) {
			t.Errorf("%s: code %d, %s, want %s", line, code, &err, want)
		}
	}
}
