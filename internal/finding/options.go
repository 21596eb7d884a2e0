package finding

import (
	"strings"

	"github.com/outflowhq/outflow/internal/lazyregexp"
)

// Options are the options that a command has to be given to be about the same installation as the process
// that suggests it, such as "--config '/etc/my outflow.yaml'": each one as it is typed into a shell.
type Options []string

var (
	// suggested is a command of outflow between backticks. Words that are quoted may have backticks, too.
	suggested = lazyregexp.New("`outflow (?:[^`'\\\\]|'[^']*'|\\\\.)*`")

	// unconfigured are the commands without settings, and what is no command.
	unconfigured = lazyregexp.New(`^outflow (explain|version|completion|help)\b|^outflow( -.*)?$| --help$`)

	// ofConsumers are the commands that read a consumer's database.
	ofConsumers = lazyregexp.New(`^outflow (parked|consumer)\b`)
)

// In returns a text in which each command of outflow that stands between backticks has the options.
func (o Options) In(text string) string {
	if len(o) == 0 {
		return text
	}
	return suggested().ReplaceAllStringFunc(text, func(s string) string {
		return "`" + o.To(strings.Trim(s, "`")) + "`"
	})
}

// To returns a command with those options that it can have, and has not yet. What is no command of outflow
// stays as it is.
func (o Options) To(command string) string {
	if !strings.HasPrefix(command, "outflow ") || unconfigured().MatchString(command) {
		return command
	}
	for _, option := range o {
		flag := option[:strings.IndexAny(option+" ", " =")]
		if (flag == "--database" || flag == "--schema") && !ofConsumers().MatchString(command) {
			continue
		}
		if strings.HasPrefix(flag, "--maintain.") && !strings.HasPrefix(command, "outflow maintain") {
			continue
		}
		if !strings.Contains(command+" ", " "+flag+" ") && !strings.Contains(command, " "+flag+"=") {
			command += " " + option
		}
	}
	return command
}

// Word returns a text as one word for a shell.
func Word(text string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune("_-./=:@%+,", r)
	}
	if text != "" && strings.IndexFunc(text, func(r rune) bool { return !plain(r) }) < 0 &&
		!strings.HasPrefix(text, "-") {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}
