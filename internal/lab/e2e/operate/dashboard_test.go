package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	consume "github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/alerts"
	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// emptyWhileHealthy are the series that a healthy pair has none of, and why.
var emptyWhileHealthy = map[string]string{
	"outflow_fault": "there is none",
	"outflow_oldest_unpublished_timestamp_seconds":  "everything is published",
	"outflow_gap_oldest_timestamp_seconds":          "no counter is missing",
	"outflow_no_checkpoint_since_timestamp_seconds": "checkpoints are recorded",
	"outflow_stream_replica":                        "the stream has one copy",
	"changes(process_start_time_seconds":            "nothing has started again",

	"outflow_cluster_":      "there is one database",
	"outflow_rows_blocked_": "no row is to go",
	"outflow_stream_kept_":  "no message is to go",

	"outflow_archive_oldest_waiting_":     "everything is archived",
	"outflow_maintain_part_failing_since": "each part works",
	"outflow_maintain_active":             "outflow maintain --once has no page",
}

// ask asks Prometheus and returns how many results there are that are numbers.
func ask(t *testing.T, at, expr string) (results int, err error) {
	t.Helper()
	var answer struct {
		Error string
		Data  struct{ Result []struct{ Value [2]any } }
	}
	if err := get(t, at+"/api/v1/query?"+url.Values{"query": {expr}}.Encode(), &answer); err != nil {
		return 0, err
	}
	if answer.Error != "" {
		return 0, errors.New(answer.Error)
	}
	for _, r := range answer.Data.Result {
		if r.Value[1] != "NaN" {
			results++
		}
	}
	return results, nil
}

func get(t *testing.T, from string, into any) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.AskTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	harness.Must(t, err)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(into)
}

// startPrometheus starts a Prometheus with the alerts that scrapes each target every second.
func startPrometheus(t *testing.T, targets map[string][]string) (at string, running *process.Process) {
	t.Helper()
	program := alerts.Tool(t, "prometheus")
	port, err := freeport.Port()
	harness.Must(t, err)
	type static struct {
		Targets []string `json:"targets"`
	}
	type job struct {
		Name   string   `json:"job_name"`
		Static []static `json:"static_configs"`
	}
	config := struct {
		Global map[string]string `json:"global"`
		Rules  []string          `json:"rule_files"`
		Jobs   []job             `json:"scrape_configs"`
	}{
		Global: map[string]string{"scrape_interval": "1s", "evaluation_interval": "1s"},
		Rules:  []string{harness.Path(alerts.RulesFile)},
	}
	for name, all := range targets {
		config.Jobs = append(config.Jobs, job{name, []static{{all}}})
	}
	content, err := json.Marshal(config) // which is YAML
	harness.Must(t, err)
	at = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	var log harness.Log
	cmd := exec.Command(program, "--config.file", harness.WriteFile(t, "prometheus.yml", string(content)),
		"--storage.tsdb.path", filepath.Join(t.TempDir(), "data"), "--web.listen-address", at)
	cmd.Stdout, cmd.Stderr = &log, &log
	running, err = process.Start(cmd, syscall.SIGKILL)
	harness.Must(t, err)
	t.Cleanup(func() {
		if err := running.Kill(); err != nil || t.Failed() {
			t.Logf("prometheus: %v\n%s", err, log.Tail(4000))
		}
	})
	return "http://" + at, running
}

// limitStorage gives the account of a server a limit of file storage.
func limitStorage(t *testing.T, ns *natsserver.Server, bytes int64) {
	t.Helper()
	limits := server.JetStreamAccountLimits{MaxMemory: -1, MaxStore: bytes, MaxStreams: -1, MaxConsumers: -1}
	harness.Must(t, ns.Embedded().GlobalAccount().UpdateJetStreamLimits(
		map[string]server.JetStreamAccountLimits{"": limits}))
}

// ignore is a handler without effects.
func ignore(context.Context, pgx.Tx, *consume.Event) error { return nil }

// consumeWith runs a consumer of package consumer until it is stopped or the test ends, and serves its
// metrics.
func consumeWith(t *testing.T, f *harness.Installation, cfg consume.Config,
	h consume.Handler) (listen string, stop func()) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), f.URL)
	harness.Must(t, err)
	registry := prometheus.NewRegistry()
	cfg.Name, cfg.Stream, cfg.Registerer = "orders", f.Stream, registry
	con, err := consume.New(f.JS, consume.Postgres(pool), cfg)
	harness.Must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := con.Run(ctx, h); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	page := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	stop = sync.OnceFunc(func() {
		cancel()
		<-ended
		page.Close()
		pool.Close()
	})
	t.Cleanup(stop)
	return page.Listener.Addr().String(), stop
}

// TestEachQueryOfTheDashboardHasDataOnAHealthyPair: a Prometheus scrapes a pair and a consumer, beside which
// outflow maintain archives, and takes each query of the dashboard, each of its variables and each alert.
// Nothing is empty that need not be, and no alert fires.
func TestEachQueryOfTheDashboardHasDataOnAHealthyPair(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	alerts.Tool(t, "prometheus")
	pg, ns := pgtest.Own(t, 0, "max_slot_wal_keep_size=1GB"), natstest.Server(t)
	limitStorage(t, ns, 1<<30)
	f := harness.NewInstallation(t, pg, ns.URL(), "pair", "REORDER_HORIZON=0s", "INIT_MAX_BYTES=100MiB",
		"INIT_PARTITION_BY=written_at", "ARCHIVE_URL=file://"+t.TempDir(), "ARCHIVE_SEGMENT_AGE=0s")
	f.Init()
	other := harness.New(t, f.URL, ns.URL(), f.Slot)
	other.Env = append(slices.Clone(f.Env), "OUTFLOW_LISTEN="+other.Listen)
	f.Start()
	other.Start()
	harness.AwaitRoles(f.Outflow, other)
	f.MustRun("maintain", "--once")
	service, _ := consumeWith(t, f, consume.Config{}, ignore)
	prom, running := startPrometheus(t, map[string][]string{
		"outflow": {f.Listen, other.Listen}, "service": {service},
	})

	_, queries, err := alerts.Dashboard(harness.Path())
	harness.Must(t, err)
	rules, err := alerts.Rules(harness.Path())
	harness.Must(t, err)
	unused := map[string]bool{}
	for series := range emptyWhileHealthy {
		unused[series] = true
	}
	counter := 0
	harness.Eventually(t, "each query has data", func() error {
		counter++
		harness.Insert(t, f.Conn, "doc", counter, "{}")
		var missing []error
		for _, q := range queries {
			n, err := ask(t, prom, q.Expr)
			if err == nil && n == 0 && !mayBeEmpty(q.Expr, unused) {
				err = errors.New("no data")
			}
			if err != nil {
				missing = append(missing, fmt.Errorf("%s: %s: %w", q.Of, q.Expr, err))
			}
		}
		return errors.Join(missing...)
	}, running)
	for series := range unused {
		t.Errorf("emptyWhileHealthy has %s, which no query is of", series)
	}
	for _, r := range rules {
		if _, err := ask(t, prom, r.Expr); err != nil {
			t.Errorf("%s: %v", r.Alert, err)
		}
	}
	if n, err := ask(t, prom, `ALERTS{alertstate="firing"}`); err != nil || n > 0 {
		t.Errorf("%d alerts fire: %v", n, err)
	}
}

// mayBeEmpty tells whether an expression is of a series that a healthy pair has none of, which is used then.
func mayBeEmpty(expr string, unused map[string]bool) (may bool) {
	for series := range emptyWhileHealthy {
		if strings.Contains(expr, series) {
			delete(unused, series)
			may = true
		}
	}
	return may
}
