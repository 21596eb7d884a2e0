// Package alerts reads what Outflow brings for Prometheus and Grafana, the alerting rules and the dashboard,
// and keeps recordings of outages, on which the rules are tested.
package alerts

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// RulesFile and dashboardFile are their paths in the repository.
var (
	RulesFile     = filepath.Join("packaging", "prometheus", "outflow.rules.yaml")
	dashboardFile = filepath.Join("packaging", "grafana", "outflow.json")
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

var labelValues = regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)

// Query is an expression of the dashboard, for all jobs and slots, and where it stands: the title of a panel,
// or the name of an annotation or of a variable.
type Query struct{ Of, Expr string }

// Dashboard reads the dashboard of the repository at root: its panels, and the queries of all of them, of its
// annotations and of its variables.
func Dashboard(root string) (panels []Panel, queries []Query, err error) {
	var file struct {
		Panels      []Panel
		Annotations struct{ List []struct{ Name, Expr string } }
		Templating  struct {
			List []struct{ Name, Definition string }
		}
	}
	content, err := os.ReadFile(filepath.Join(root, dashboardFile))
	if err == nil {
		err = json.Unmarshal(content, &file)
	}
	fill := strings.NewReplacer("$__rate_interval", "1m", "$job", ".+", "$slot", ".+")
	for _, p := range file.Panels {
		for _, t := range p.Targets {
			queries = append(queries, Query{p.Title, fill.Replace(t.Expr)})
		}
	}
	for _, a := range file.Annotations.List {
		queries = append(queries, Query{a.Name, fill.Replace(a.Expr)})
	}
	for _, v := range file.Templating.List {
		// Grafana reads label_values(series, label) with another request than a query.
		if of := labelValues.FindStringSubmatch(v.Definition); of != nil {
			queries = append(queries, Query{v.Name, fill.Replace("group by (" + of[2] + ") (" + of[1] + ")")})
		}
	}
	return file.Panels, queries, err
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
