package metrics

import (
	"bytes"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/pipeline"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

// full is a registry that has a series of each family, also of one that nothing has happened to yet.
type full struct{ *prometheus.Registry }

func (r full) Register(c prometheus.Collector) error {
	descs := make(chan *prometheus.Desc, 1)
	c.Describe(descs)
	labels := strings.Split(regexp.MustCompile(`variableLabels: {(.+)}`).FindStringSubmatch(
		(<-descs).String())[1], ",")
	switch c := c.(type) {
	case *prometheus.CounterVec:
		c.WithLabelValues(labels...)
	case *prometheus.GaugeVec:
		c.WithLabelValues(labels...)
	}
	return r.Registry.Register(c)
}

// ofConsumer gathers each metric of package consumer.
func ofConsumer(t *testing.T) []*dto.MetricFamily {
	t.Helper()
	registry := prometheus.NewRegistry()
	_, err := consumer.New(struct{ jetstream.JetStream }{}, consumer.JetStream(),
		consumer.Config{Name: "search", Stream: "OUTBOX", Registerer: full{registry}})
	must.Succeed(t, err)
	families, err := registry.Gather()
	must.Succeed(t, err)
	return families
}

// everything gathers each metric that there is of the program, by a process that knows everything.
func everything(t *testing.T) []*dto.MetricFamily {
	t.Helper()
	now, safe := time.Now(), int64(1)
	read := watch.Read{At: now}
	status := pipeline.Status{
		State: pipeline.StateRunning, Fault: &pipeline.Fault{Code: "slot_missing"}, Received: 1, Published: 1,
		WALEnd: 2, Oldest: now, CaughtUp: now, HeldLimit: 1, HeldLimitBytes: 1,
		Gaps: []pipeline.Gap{{Since: now}}, Unlisted: now,
		Said:  relay.Said{At: now, LSN: 1, Events: 2},
		Tally: relay.Tally{Since: 1, Events: 1}, Owner: 1, Epoch: 1,
		Agreed: &pipeline.Agreement{WaitsFor: []int{3}, Heard: now},
		Kept:   checkpoint.Kept{Bytes: 1, Since: now},
	}
	reading := watch.Reading{
		Postgres: watch.Postgres{Read: read}, NATS: watch.NATS{Read: read, StorageLimit: 1},
		Slot: watch.Slot{Read: read, Exists: true, Safe: &safe},
		Stream: watch.Stream{Read: read, Exists: true, MaxBytes: 1,
			Replicas: []watch.Replica{{Name: "n2"}}},
		Consumers: []watch.Consumer{{Name: "search"}}, ConsumerList: read,
		Subscribers: []watch.Subscriber{{Slot: "to_3"}},
		Partitions: watch.Partitions{Read: read, Managed: true, Ranges: true, Until: now,
			Blocked: []watch.Blocked{{Slot: "debezium", Since: now}}},
		Maintenance: watch.Maintenance{Read: read, Maintained: &watch.Maintained{At: now,
			Interval: time.Minute, Archive: &watch.Archived{Oldest: now}, Kept: &watch.Kept{},
			Parts: []watch.MaintainPart{{Name: "archive", Succeeded: now, Failing: now,
				Code: "archive_gap"}}}},
	}
	reading.Postgres.Certificates = []watch.Certificate{{Side: "server", Until: now}}
	reading.NATS.Certificates = []watch.Certificate{{Side: "client", Until: now}}
	info := Info{Slot: "outflow", MaxSpill: 1, Started: now,
		Cluster: config.Cluster{ID: 2, Subscription: "from_1"}}
	registry, own := New(info)
	_, _, stop := wiring.Pipeline(config.Config{}, slog.New(slog.DiscardHandler), own)
	stop()
	own.MustRegister(State(info, func() pipeline.Status { return status },
		func() watch.Reading { return reading }))
	families, err := registry.Gather()
	must.Succeed(t, err)
	ofMaintain, err := NewMaintain(info.Slot, func() Maintaining {
		return Maintaining{true, reading.Partitions, reading.Maintenance.Maintained}
	}).Gather()
	must.Succeed(t, err)
	for _, f := range ofMaintain {
		if !slices.ContainsFunc(families, func(o *dto.MetricFamily) bool {
			return o.GetName() == f.GetName()
		}) {
			families = append(families, f)
		}
	}
	slices.SortFunc(families, func(a, b *dto.MetricFamily) int {
		return strings.Compare(a.GetName(), b.GetName())
	})
	families = slices.DeleteFunc(families, func(f *dto.MetricFamily) bool {
		return !strings.HasPrefix(f.GetName(), "outflow_")
	})
	for _, d := range all {
		name := regexp.MustCompile(`fqName: "(\w+)"`).FindStringSubmatch(d.String())[1]
		if !slices.ContainsFunc(families, func(f *dto.MetricFamily) bool {
			return f.GetName() == "outflow_"+name
		}) {
			t.Errorf("%s has no series though everything is known", name)
		}
	}
	return families
}

func TestNamesAreAsPrometheusWantsThem(t *testing.T) {
	for label, families := range map[string][]*dto.MetricFamily{
		"slot": everything(t), "consumer": ofConsumer(t),
	} {
		problems, err := promlint.NewWithMetricFamilies(families).Lint()
		must.Succeed(t, err)
		for _, p := range problems {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				if !slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool {
					return l.GetName() == label
				}) {
					t.Errorf("%s has a series without the label %s", f.GetName(), label)
				}
			}
		}
	}
}

// A process that knows nothing says nothing that it does not know: a 0 would be a figure.
func TestWhatIsNotKnownHasNoSeries(t *testing.T) {
	registry, own := New(Info{Slot: "outflow"})
	standby := pipeline.Status{State: pipeline.StateStandby, WALEnd: 5}
	var reading watch.Reading
	own.MustRegister(State(Info{}, func() pipeline.Status { return standby },
		func() watch.Reading { return reading }))
	names := func() string {
		families, err := registry.Gather()
		must.Succeed(t, err)
		all := ""
		for _, f := range families {
			if name, ok := strings.CutPrefix(f.GetName(), "outflow_"); ok {
				all += name + " "
			}
		}
		return all
	}
	const always = "build_info gaps_open held_bytes held_events in_flight_bytes in_flight_limit_bytes " +
		"in_flight_limit_messages in_flight_messages "
	if got := names(); got != always+"slot_held spill_bytes state " {
		t.Errorf("before anything was read: %s", got)
	}
	reading.Postgres.FailingSince, reading.NATS.FailingSince = time.Now(), time.Now()
	if got := names(); got != always+"nats_up postgres_up slot_held spill_bytes state " {
		t.Errorf("both sides were down from the start: %s", got)
	}
}

// TestThePageOfMetricsIsThatOfTheProgram compares docs/metrics.md with what the program has; -update writes
// it.
func TestThePageOfMetricsIsThatOfTheProgram(t *testing.T) {
	families := append(everything(t), ofConsumer(t)...)
	var b bytes.Buffer
	b.WriteString(docHead)
	rest := slices.Clone(families)
	for _, s := range sections {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n| name | type | unit | labels | meaning |\n"+
			"| --- | --- | --- | --- | --- |\n", s.title, s.text)
		rest = slices.DeleteFunc(rest, func(f *dto.MetricFamily) bool {
			name := strings.TrimPrefix(f.GetName(), "outflow_")
			if !s.names.MatchString(name) {
				return false
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", f.GetName(),
				strings.ToLower(f.GetType().String()), unit(name), labels(f), f.GetHelp())
			return true
		})
	}
	for _, f := range rest {
		t.Errorf("%s is in no section", f.GetName())
	}
	b.WriteString(docAlerts)
	root := filepath.Join("..", "..", "..")
	for _, user := range []string{"packaging/prometheus/outflow.rules.yaml",
		"packaging/grafana/outflow.json"} {
		content, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(user)))
		must.Succeed(t, err)
		for _, used := range regexp.MustCompile(`\boutflow_[a-z_]+`).FindAllString(string(content), -1) {
			base := regexp.MustCompile("_(bucket|sum|count)$").ReplaceAllString(used, "")
			if !slices.ContainsFunc(families, func(f *dto.MetricFamily) bool {
				return f.GetName() == base
			}) {
				t.Errorf("%s names %s, which there is not", user, used)
			}
		}
	}
	path := filepath.Join(root, "docs", "metrics.md")
	if *update {
		must.Succeed(t, os.WriteFile(path, b.Bytes(), 0o644))
	}
	got, err := os.ReadFile(path)
	must.Succeed(t, err)
	if !bytes.Equal(got, b.Bytes()) {
		t.Error("docs/metrics.md is not what the program has: go test ./internal/app/metrics -update")
	}
}

func unit(name string) string {
	switch {
	case strings.HasSuffix(name, "_timestamp_seconds"):
		return "Unix time in seconds"
	case strings.HasSuffix(name, "_lsn"):
		return "LSN, in bytes of WAL"
	}
	name = strings.TrimSuffix(name, "_total")
	switch word := name[strings.LastIndex(name, "_")+1:]; word {
	case "seconds", "bytes", "events", "messages", "operations":
		return word
	}
	return ""
}

// labels lists the labels but slot.
func labels(f *dto.MetricFamily) string {
	var names []string
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			if n := "`" + l.GetName() + "`"; l.GetName() != "slot" && !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
	}
	return strings.Join(names, ", ")
}

var sections = []struct {
	title, text string
	names       *regexp.Regexp
}{
	{"State", "", regexp.MustCompile(`^(state|start_timestamp_seconds|slot_held|fault|build_info|certificate_.*)$`)},
	{"Progress", "", regexp.MustCompile(`^(published_lsn|received_lsn|published_sequence|unpublished_.*|` +
		`oldest_.*|caught_up.*|events_published_total|sent_bytes_total|commit_to_ack_seconds)$`)},
	{"PostgreSQL and the slot", "Read by a connection of their own, whatever publishing does.\n",
		regexp.MustCompile(`^(postgres_up|wal_end_lsn|confirmed_lsn|unconfirmed_.*|slot_.*)$`)},
	{"Order and buffer", "", regexp.MustCompile(`^(held_.*|spill_.*|in_flight_.*|window_events|late_.*|` +
		`gaps?_.*|ticks?_.*|ignored_.*|malformed_.*|foreign_.*|dead_letters_.*|no_checkpoint_.*)$`)},
	{"NATS and the stream", "Read by a connection of their own, whatever publishing does.\n",
		regexp.MustCompile(
			`^(nats_up|jetstream_.*|stream_(messages|bytes|limit|last|exists|read|replica).*)$`)},
	{"Consumers", "As JetStream knows them: durable ones, whoever wrote them, and those of package " +
		"`consumer`, as long as an instance reads. How far these are is in their database, and in [their " +
		"own metrics](#package-consumer): [decision 0035](decisions/0035-lag-of-consumers.md).\n",
		regexp.MustCompile(`^stream_consumer.*$`)},
	{"Retention and archive", "What [`outflow maintain`](maintain.md) does. It serves them " +
		"itself where `maintain.listen` is set, and `outflow run` does as well: the partitions by SQL, the " +
		"rest as `outflow maintain`, in a loop or `--once`, left it beside the checkpoint record.\n",
		regexp.MustCompile(`^(maintain_.*|partitions_.*|rows_.*|archive_.*|stream_kept_.*)$`)},
	{"Package consumer", docConsumer, regexp.MustCompile(`^consumer_.*$`)},
	{"Clusters", "Where `cluster.id` is set: [what to watch](clusters.md#what-to-watch).\n",
		regexp.MustCompile(`^cluster_.*$`)},
	{"Tracing", "See [tracing](tracing.md).\n", regexp.MustCompile(`^spans_.*$`)},
	{"Failures", "", regexp.MustCompile(`^(failures_total|connect_attempts_total|sessions_total|` +
		`resumptions_total)$`)},
}

const docConsumer = `What a Go service serves that sets ` + "`Registerer` of its [`consumer.Config`](consumer.md)" + `. Every series has the
label ` + "`consumer`, its `Name`" + `.

Counters with the label ` + "`partition`" + ` are many: eight of them, so 32,768 series of each instance with 4,096 partitions. Five of
the eight are in no alert and on no dashboard. Where they are too many, let Prometheus drop them:

` + "```yaml" + `
metric_relabel_configs:
  - source_labels: [__name__]
    regex: outflow_consumer_(events|passed_over|panics|replayed|transactions)_total
    action: drop
` + "```" + `
`

const docHead = `# Metrics

What ` + "`outflow run`" + ` serves at ` + "`/metrics`" + `, at the address of [` + "`listen`" + `](configuration.md), and ` + "`outflow maintain`" + ` [of itself](#retention-and-archive), and
a service with [package ` + "`consumer`" + `](#package-consumer). This page is made from the program.

- **Every series of Outflow has the label ` + "`slot`" + `**, which both instances of a pair share. Aggregate by it: ` + "`max by (slot) (…)`" + `.
- **Figures are computed at each scrape** from what publishing and a watcher know. The watcher has connections of its own to PostgreSQL and
  NATS. It goes on while the other side is away, on a standby, and while a fault is held.
- **What is not known has no series**; it is never 0 instead. So a standby has no lag, and a process that never reached PostgreSQL has no
  figures of the slot.
- **A side that does not answer** keeps its last figures. ` + "`outflow_postgres_up`" + ` and ` + "`outflow_nats_up`" + ` say so, and the ` + "`…_read_timestamp_seconds`" + ` how old they are.
- Go's own metrics (` + "`go_…`, `process_…`" + `) are there too, without the label.
`

const docAlerts = `
## Prometheus and Grafana

[outflow.rules.yaml](../packaging/prometheus/outflow.rules.yaml) has alerts for Prometheus, each with a [runbook](runbooks.md), and
[outflow.json](../packaging/grafana/outflow.json) a dashboard for Grafana. In Kubernetes, the Helm chart makes PodMonitor and rules
([install](install.md#kubernetes)). By hand, in a clone of the repository, with the servers and variables of the
[README](../README.md#five-minutes-beside-your-own-servers):

` + "```" + `sh
outflow init
outflow run &
` + "```" + `

Prometheus reads the alerts and scrapes each process by its ` + "`listen`" + `:

` + "```" + `yaml
# file: prometheus.yml
global: {scrape_interval: 5s}
rule_files: [packaging/prometheus/outflow.rules.yaml]
scrape_configs:
  - job_name: outflow
    static_configs:
      - targets: ["127.0.0.1:7422"] # also the other instance of a pair, and outflow maintain by its maintain.listen
` + "```" + `

` + "```" + `sh
promtool check config prometheus.yml
prometheus --config.file prometheus.yml --web.listen-address 127.0.0.1:9090 &
` + "```" + `

Ask it what the panel *Lag* asks, in seconds:

` + "```" + `sh eventually
promtool query instant http://127.0.0.1:9090 'time() - max by (slot) (outflow_caught_up_timestamp_seconds)'
` + "```" + `

` + "```" + `text
{slot="outflow"} => …
` + "```" + `

Grafana takes data source and dashboard from two files, or import the dashboard by hand and choose the data source:

` + "```" + `yaml
# file: grafana/datasources/outflow.yml
apiVersion: 1
datasources:
  - {name: Prometheus, type: prometheus, access: proxy, url: "http://127.0.0.1:9090", isDefault: true}
` + "```" + `

` + "```" + `yaml
# file: grafana/dashboards/outflow.yml
apiVersion: 1
providers:
  - {name: Outflow, type: file, options: {path: /var/lib/grafana/dashboards}}
` + "```" + `

` + "```" + `sh norun
docker run --network host -v ./grafana/datasources:/etc/grafana/provisioning/datasources:ro \
  -v ./grafana/dashboards:/etc/grafana/provisioning/dashboards:ro \
  -v ./packaging/grafana:/var/lib/grafana/dashboards:ro grafana/grafana
` + "```" + `

Tests run this section as far as Prometheus answers, and ask it each query of the dashboard. They do not run Grafana. A limit that is not set
has no series, so an expression that divides by it has no result.
`
