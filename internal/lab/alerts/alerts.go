// Package alerts reads what Outflow brings for Prometheus and Grafana: the alerting rules and the dashboard.
//
// It is internal to Outflow: its API may change at any time.
package alerts

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/outflowhq/outflow/internal/lab/tier"
)

// Rule is an alerting rule.
type Rule struct {
	Alert, Expr         string
	Labels, Annotations map[string]string
}

// RulesFile and DashboardFile are their paths in the repository.
var (
	RulesFile     = filepath.Join("packaging", "prometheus", "outflow.rules.yaml")
	DashboardFile = filepath.Join("packaging", "grafana", "outflow.json")
)

// Rules reads the rules of the repository at root.
func Rules(root string) (all []Rule, err error) {
	var file struct{ Groups []struct{ Rules []Rule } }
	content, err := os.ReadFile(filepath.Join(root, RulesFile))
	if err == nil {
		err = yaml.Unmarshal(content, &file)
	}
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all, err
}

// Panel is a panel of the dashboard, or a row.
type Panel struct {
	ID      int
	Title   string
	Grid    struct{ X, Y, W, H int } `json:"gridPos"`
	Targets []struct{ Expr string }
}

// Dashboard reads the dashboard of the repository at root: its panels, and the expressions of all of them and
// of its annotations, for all jobs and slots.
func Dashboard(root string) (panels []Panel, expressions []string, err error) {
	var file struct {
		Panels      []Panel
		Annotations struct{ List []struct{ Expr string } }
	}
	content, err := os.ReadFile(filepath.Join(root, DashboardFile))
	if err == nil {
		err = json.Unmarshal(content, &file)
	}
	fill := strings.NewReplacer("$__rate_interval", "1m", "$job", ".+", "$slot", ".+")
	for _, p := range file.Panels {
		for _, t := range p.Targets {
			expressions = append(expressions, fill.Replace(t.Expr))
		}
	}
	for _, a := range file.Annotations.List {
		expressions = append(expressions, fill.Replace(a.Expr))
	}
	return file.Panels, expressions, err
}

// Tool finds a program of Prometheus: promtool or prometheus.
func Tool(t testing.TB, name string) (path string) {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		tier.Missing(t, "prometheus", "%s is not here: Debian has it in its package prometheus", name)
	}
	return path
}
