package cli

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
)

// A message that a command prints leads to its page: by its code, in any text that has the code, or by words.
func TestExplainFindsACode(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"slot_missing": "slot_missing: The",
		"stream":       "stream: The",
		"code memory_lost: see `outflow explain memory_lost`":               "memory_lost: ",
		`{"level":"ERROR","code":"nats_connect","msg":"no server answers"}`: "nats_connect: ",
		"code=memory_lost err=...\ncode memory_lost: see ...":               "memory_lost: Mess",
		"replication slot outflow was invalidated: wal_removed":             "  slot_invalidated ",
		"the server takes messages of 8 bytes, sink.max_payload is 9":       "  server_max_payload ",
		"": "PostgreSQL\n  postgres_connect ",
	} {
		r := outflow(t, nil, "explain", text)
		if r.code != 0 || r.stderr != "" || !strings.HasPrefix(r.stdout, want) {
			t.Errorf("%q: code %d, want %q\n%s%s", text, r.code, want, r.stdout, r.stderr)
		}
	}
	if r := outflow(t, nil, "explain", "slot", "missing"); !strings.Contains(r.stdout, "slot_missing") {
		t.Errorf("several words: %+v", r)
	}
	r := outflow(t, nil, "explain", "slot_mising")
	if want := "outflow: there is no code \"slot_mising\", and nothing has these words. The nearest is " +
		"slot_missing\ncode unknown_code: see `outflow explain unknown_code`\n"; r.code != 2 ||
		r.stderr != want {
		t.Errorf("an unknown code: code %d, want 2 and %q\n%s", r.code, want, r.stderr)
	}
	r = outflow(t, nil, "explain", strings.Repeat("☃ß", 20_000))
	if r.code != 2 || len(r.stderr) > 600 || !strings.Contains(r.stderr, "☃ß") {
		t.Errorf("much of what is in no entry: code %d, %d bytes", r.code, len(r.stderr))
	}
}

var update = flag.Bool("update", false, "write docs/troubleshooting.md")

// TestTroubleshootingIsTheCatalogue: the page is what go generate ./internal/finding makes of it.
func TestTroubleshootingIsTheCatalogue(t *testing.T) {
	t.Parallel()
	const name = "../../../docs/troubleshooting.md"
	want := troubleshooting()
	if *update {
		if err := os.WriteFile(name, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(name); err != nil || string(got) != want {
		t.Errorf("%s is not up to date (%v): run go generate ./internal/finding", name, err)
	}
}

// troubleshooting is the page: a table to search, and a section for each code.
func troubleshooting() string {
	var table, sections strings.Builder
	for _, s := range finding.Subjects() {
		fmt.Fprintf(&table, "| **%s** | | | |\n", s.Name)
		fmt.Fprintf(&sections, "\n## %s\n", s.Name)
		for _, f := range s.Findings {
			code, how := "–", f.Severity.String()
			if len(f.Classes) > 0 {
				how += ", exit code " + exits(f)
				if code, _, _ = strings.Cut(exits(f), ","); slices.Contains(f.Classes, outbox.Transient) {
					code += `\*`
				}
			}
			fmt.Fprintf(&table, "| %s | [`%s`](#%[2]s) | %v | %s |\n", f.Title, f.Code, f.Severity, code)
			fmt.Fprintf(&sections, "\n### %s\n\n%s", f.Code,
				finding.Wrap(fmt.Sprintf("**%s** (%s). %s", f.Title, how, f.Hint), 140))
			if f.Runbook != "" {
				fmt.Fprintf(&sections, "\n%s", finding.Wrap(f.Runbook, 140))
			}
		}
	}
	return `<!-- Made by go generate ./internal/finding from the entries there: change those. -->

# Troubleshooting

Everything that Outflow can find wrong has a code. A command that fails ends with it, and it stays the same in logs, metrics and the status
page. Search this page for the code, or for words of the message. Without the page at hand, ` + "`outflow explain`" + ` says the same: give it
the code, or the message.

*Critical* means that publishing has stopped, or that something is lost or about to be; *error* that something fails, and nothing is lost;
*warning* a risk; *note* nothing to do. An asterisk: ` + "`outflow run`" + ` does not end, it goes on by itself. A dash: only
` + "`outflow doctor`" + ` and the status page say it.
[What the exit codes mean](operations.md#exit-codes).

| you see | code | how bad | exit code |
| --- | --- | --- | --- |
` + table.String() + sections.String()
}
