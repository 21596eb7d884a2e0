package operate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestSuggestedCommandsRunAsTheyArePrinted: pasted into a shell, each one is about the installation of the
// command that suggests it, whatever its file is called; and each message names the servers, never a secret.
func TestSuggestedCommandsRunAsTheyArePrinted(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "pasted")
	dir := filepath.Join(t.TempDir(), "it's some dir")
	harness.Must(t, os.Mkdir(dir, 0o700))
	file := filepath.Join(dir, "with space.yaml")
	url := strings.Replace(f.URL, "postgres@", "postgres:hunter2@", 1)
	harness.Must(t, os.WriteFile(file, fmt.Appendf(nil,
		"postgres: {url: %q}\nnats: {url: %q}\npublication: %s\nsink: {durable_after: 1s}\nlisten: \"\"\n",
		url, ns.URL(), f.Slot), 0o600))
	bin := t.TempDir() // for the name: the program may be called otherwise
	harness.Must(t, os.Symlink(harness.Binary, filepath.Join(bin, "outflow")))
	env := []string{"PATH=" + bin + ":" + os.Getenv("PATH")}
	sh := func(wantCode int, command string) (said string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*harness.Patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, "sh", "-c", command)
		var out bytes.Buffer
		cmd.Env, cmd.Stdout, cmd.Stderr = env, &out, &out
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		said = out.String()
		if code := cmd.ProcessState.ExitCode(); code != wantCode {
			t.Fatalf("%s\nexit code %d, want %d\n%s", command, code, wantCode, said)
		}
		if strings.Contains(said, "hunter2") {
			t.Errorf("%s\nshows the password: %s", command, said)
		}
		where := strings.TrimPrefix(strings.Split(f.URL, "?")[0], "postgres://")
		f.MustContain(command, said, where, ns.URL())
		return said
	}
	code := regexp.MustCompile("`(outflow (?:[^`'\\\\]|'[^']*'|\\\\.)*)`")
	// suggested returns the command that a text suggests and begins with these words
	suggested := func(said, begin string) (found string) {
		t.Helper()
		for _, m := range code.FindAllStringSubmatch(said, -1) {
			if strings.HasPrefix(m[1], "outflow explain ") {
				continue
			}
			if !strings.Contains(m[1], "with space.yaml'") || !strings.Contains(m[1], "--slot="+f.Slot) {
				t.Errorf("not the command's own options in %s", m[1])
			}
			if strings.HasPrefix(m[1], begin+" --config") {
				found = m[1]
			}
		}
		if found == "" {
			t.Fatalf("no `%s` with options in %s", begin, said)
		}
		return found
	}
	// the rest is chosen on the command line
	options := " --config " + `'` + strings.ReplaceAll(file, "'", `'\''`) + `'` + " --slot " + f.Slot +
		" --stream=" + f.Stream

	said := sh(3, "outflow run"+options)
	said = sh(3, suggested(said, "outflow init")+" --dry-run --table nowhere.x")
	if !strings.Contains(said, "nowhere.x") {
		t.Errorf("an option behind it does not count: %s", said)
	}
	sh(0, suggested(sh(3, "outflow drain"+options), "outflow init"))
	f.MustContain("outflow status", sh(0, "outflow status"+options), "at ", "`outflow run --config ")
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	f.DropSlot(t)

	said = strings.TrimSpace(sh(4, "outflow run"+options+" --log.format json"))
	var last logLine
	harness.Must(t, json.Unmarshal([]byte(said[strings.LastIndexByte(said, '\n')+1:]), &last))
	repair := suggested(last.Hint, "outflow repair")
	accept := suggested(sh(4, repair), "outflow repair --accept slot_missing")
	f.MustContain("outflow doctor", sh(4, "outflow doctor"+options), "`"+repair+"`")
	if health := sh(0, "outflow status"+options); suggested(health, "outflow repair") != repair {
		t.Errorf("status suggests another one than %s:\n%s", repair, health)
	}
	f.MustContain(accept, sh(0, accept), "1 event published", "Start `outflow run --config ")
	f.MustContain("outflow repair", sh(0, repair), "nothing to repair")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
}
