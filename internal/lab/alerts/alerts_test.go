package alerts

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

var update = flag.Bool("update", false, "copy the rules to the Helm chart")

var root = filepath.Join("..", "..", "..")

func rules(t *testing.T) []Rule {
	t.Helper()
	all, err := Rules(root)
	must.Succeed(t, err)
	return all
}

// promtool runs promtool, which must succeed.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), Tool(t, "promtool"), args...).CombinedOutput()
	if err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func write(t *testing.T, name, content string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), name)
	must.Succeed(t, os.WriteFile(path, []byte(content), 0o644))
	return path
}

func TestPrometheusTakesTheRules(t *testing.T) {
	t.Parallel()
	promtool(t, "check", "rules", filepath.Join(root, RulesFile))
}

// TestTheChartHasTheRules: Helm reads no file outside of a chart, and links get lost where files are copied.
func TestTheChartHasTheRules(t *testing.T) {
	t.Parallel()
	rules, err := os.ReadFile(filepath.Join(root, RulesFile))
	must.Succeed(t, err)
	file := filepath.Join(root, "packaging", "chart", "outflow", "rules.yaml")
	if *update {
		must.Succeed(t, os.WriteFile(file, rules, 0o644))
	}
	chart, err := os.ReadFile(file)
	must.Succeed(t, err)
	if !bytes.Equal(rules, chart) {
		t.Errorf("%s is not %s: go test ./internal/lab/alerts -update", file, RulesFile)
	}
}

// TestEachAlertHasARunbook: whoever is called finds what to do, and no section is of an alert that is gone.
func TestEachAlertHasARunbook(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join(root, "docs", "runbooks.md"))
	must.Succeed(t, err)
	sections := map[string]string{}
	for _, s := range regexp.MustCompile(`(?m)^### (Outflow\w+)\n\n\*\*(\w+)\.`).FindAllStringSubmatch(
		string(page), -1) {
		sections[s[1]] = strings.ToLower(s[2])
	}
	for _, r := range rules(t) {
		if of := r.Labels["severity"]; sections[r.Alert] != of || of != "page" && of != "ticket" {
			t.Errorf("%s is a %s, and in docs/runbooks.md %q", r.Alert, of, sections[r.Alert])
		}
		if url := r.Annotations["runbook_url"]; r.Annotations["summary"] == "" ||
			!strings.HasSuffix(url, "/docs/runbooks.md#"+strings.ToLower(r.Alert)) {
			t.Errorf("%s: %q", r.Alert, r.Annotations)
		}
		delete(sections, r.Alert)
	}
	for name := range sections {
		t.Errorf("docs/runbooks.md has %s, which is no alert", name)
	}
}

// unwatched are the metrics that neither an alert nor the dashboard uses, and why.
var unwatched = map[string]string{
	"outflow_start_timestamp_seconds":   "process_start_time_seconds says the same, of all programs",
	"outflow_slot_exists":               "without it there is a fault, slot_missing",
	"outflow_spans_exported_total":      "what is wrong is in outflow_spans_dropped_total",
	"outflow_stream_consumers_left_out": "nothing is wrong where there are many",

	"outflow_cluster_info":                    "which cluster it is, to join with the others",
	"outflow_cluster_watermark_confirmed_lsn": "kept_since says whether it stands still",

	"outflow_stream_consumers_read_timestamp_seconds": "doctor says which right is missing",

	"outflow_consumer_batch_events":           "speed, for whoever tunes Config.Batch",
	"outflow_consumer_conflicts_total":        "they are tried again; attempts and failures are watched",
	"outflow_consumer_events_total":           "effects_total is what came of them",
	"outflow_consumer_in_flight_bytes":        "bounded by Config.MaxBytes",
	"outflow_consumer_in_flight_messages":     "bounded by Config.MaxInFlight",
	"outflow_consumer_panics_total":           "they are among failures_total",
	"outflow_consumer_parked_total":           "parked_documents says what is parked now",
	"outflow_consumer_passed_over_total":      "nothing is wrong with them",
	"outflow_consumer_read_sequence":          "lag_messages counts what is not done",
	"outflow_consumer_released_total":         "parked_documents says what is still parked",
	"outflow_consumer_replayed_total":         "somebody has replayed them",
	"outflow_consumer_sessions_dropped_total": "the reasons; that sessions end is in sessions_total",
	"outflow_consumer_transactions_total":     "effects_total divided by batch_events",
}

// TestEachMetricIsOnTheDashboardOrInAnAlert: what is measured is looked at by somebody.
func TestEachMetricIsOnTheDashboardOrInAnAlert(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join(root, "docs", "metrics.md"))
	must.Succeed(t, err)
	_, queries, err := Dashboard(root)
	must.Succeed(t, err)
	used := map[string]bool{}
	name := regexp.MustCompile(`\boutflow_\w+`)
	note := func(expr string) {
		for _, n := range name.FindAllString(expr, -1) {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} { // of histograms
				used[strings.TrimSuffix(n, suffix)] = true
			}
		}
	}
	for _, q := range queries {
		note(q.Expr)
	}
	for _, r := range rules(t) {
		note(r.Expr)
	}
	metrics := regexp.MustCompile("(?m)^\\| `(outflow_\\w+)`").FindAllStringSubmatch(string(page), -1)
	if len(metrics) < 50 {
		t.Fatalf("docs/metrics.md has %d metrics", len(metrics))
	}
	for _, m := range metrics {
		if _, ok := unwatched[m[1]]; ok == used[m[1]] {
			t.Errorf("%s: used is %v, and it is listed as not watched: %v", m[1], used[m[1]], ok)
		}
	}
}

func TestPrometheusTakesTheExpressionsOfTheDashboard(t *testing.T) {
	t.Parallel()
	panels, queries, err := Dashboard(root)
	must.Succeed(t, err)
	at := map[[2]int]int{}
	for _, p := range panels {
		for x := range p.Grid.W {
			for y := range p.Grid.H {
				place := [2]int{p.Grid.X + x, p.Grid.Y + y}
				if at[place] != 0 || place[0] >= 24 {
					t.Errorf("panel %d (%s) and %d are at the same place, or outside", p.ID, p.Title,
						at[place])
				}
				at[place] = p.ID
			}
		}
	}
	var file strings.Builder
	file.WriteString("groups:\n- name: dashboard\n  rules:\n")
	for i, q := range queries {
		quoted, err := json.Marshal(q.Expr)
		must.Succeed(t, err)
		fmt.Fprintf(&file, "  - {record: 'dashboard:%d', expr: %s}\n", i, quoted)
	}
	promtool(t, "check", "rules", write(t, "dashboard.yaml", file.String()))
}
