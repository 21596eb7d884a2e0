package cli

import (
	"context"
	"errors"
	"net"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/httpstatus"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/pipeline"
)

func (a *App) runCommand() *cobra.Command {
	return a.configured(&cobra.Command{
		Use:   "run",
		Short: "Publish the outbox until stopped",
		Long: `Streams the slot, publishes the outbox's events in order, and confirms to PostgreSQL what is durable. It
reconnects and recovers by itself. While another outflow holds the slot it stands by and takes over when that ends.

SIGTERM or SIGINT stop it cleanly: what is in flight is acknowledged first, within stop_timeout. A second signal
ends it at once, which loses nothing either.

Exit code 3 if the set-up can't work, 4 for a gap or a divergence that an operator has to decide about, 5 for a
row that can't be published (sink.on_poison: stop), 1 after a second signal. Outages have none: it goes on after them.`,
		Example: "  outflow run --config outflow.yaml",
	}, a.publish)
}

func (a *App) publish(ctx context.Context, cfg config.Config) (err error) {
	version, _ := buildVersion()
	log := newLogger(a.Stderr, cfg.Log)
	decorate := func(*pipeline.Config) {}
	if a.faults != nil {
		decorate = a.faults.Decorate
		log.Warn("this outflow does harm to itself, as a test wants it to")
	}
	metrics := prometheus.NewRegistry()
	prefixed := prometheus.WrapRegistererWithPrefix("outflow_", metrics)
	metrics.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	prefixed.MustRegister(buildInfo(version))
	p, closeWriter := wiring.Pipeline(cfg, log, prefixed, decorate)
	defer closeWriter()

	table := cfg.Table
	if !cfg.Source.Rows() {
		table = ""
	}
	if cfg.Listen != "" {
		l, err := httpstatus.Listen(ctx, cfg.Listen)
		if err != nil {
			return err
		}
		info := httpstatus.Info{Version: version, Slot: cfg.Slot, Stream: cfg.Stream,
			Source: cfg.Source.String(), Table: table, Shard: cfg.Shard.String()}
		hosts := cfg.ListenHosts
		if host, _, err := net.SplitHostPort(cfg.Listen); err == nil {
			hosts += "," + host
		}
		pages := httpstatus.Serve(l, hosts, info, p.Status, metrics)
		defer func() { err = errors.Join(err, pages.Close()) }()
		log.Info("pages served", "url", "http://"+l.Addr().String()+"/")
	}
	log.Info("outflow started", "version", version, "slot", cfg.Slot, "stream", cfg.Stream, "source",
		cfg.Source, "table", table, "shard", cfg.Shard)
	if err = p.Run(ctx); err == nil {
		log.Info("outflow stopped")
	}
	return err
}

// buildInfo is the metric that carries the version.
func buildInfo(version string) prometheus.Collector {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "build_info", Help: "1, with the version as a " +
		"label."}, []string{"version"})
	g.WithLabelValues(version).Set(1)
	return g
}
