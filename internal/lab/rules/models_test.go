package rules

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// TestTheModelsHoldWhatTheyClaim runs each program of docs/models for a few trials, in long runs for more, in
// which each of their rules is taken away as well and has to be missed.
func TestTheModelsHoldWhatTheyClaim(t *testing.T) {
	t.Parallel()
	python, err := exec.LookPath("python3")
	if err != nil {
		tier.Missing(t, "python", "the models need python3: %v", err)
	}
	models, err := filepath.Glob(filepath.Join("..", "..", "..", "docs", "models", "*.py"))
	must.Succeed(t, err)
	if len(models) < 4 {
		t.Fatalf("models: %v", models)
	}
	for _, model := range models {
		t.Run(strings.TrimSuffix(filepath.Base(model), ".py"), func(t *testing.T) {
			t.Parallel()
			run := func(says string, args ...string) {
				out, err := exec.CommandContext(t.Context(), python, append([]string{model}, args...)...).
					CombinedOutput()
				if err != nil || !strings.Contains(string(out), says) {
					t.Errorf("%s %s: %v\n%s", model, strings.Join(args, " "), err, out)
				}
			}
			if !tier.Long() {
				run("10 trials", "10")
				return
			}
			run("500 trials", "500")
			run("fails", "mutations")
		})
	}
}
