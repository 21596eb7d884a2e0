package cli

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"runtime"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/cmd/internal/hangup"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/httpstatus"
	"github.com/outflowhq/outflow/internal/app/metrics"
	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/sink"
)

// serviceName is the command that a service manager starts.
const serviceName = "run"

func (a *App) runCommand() *cobra.Command {
	return a.configured(&cobra.Command{
		Use:   serviceName,
		Short: "Publish the outbox until stopped",
		Long: `Streams the slot, publishes the outbox's events in order, and confirms to PostgreSQL
what is durable. It reconnects and recovers by itself. While another outflow holds the slot it stands by and
takes over when that ends.

SIGTERM or SIGINT stop it cleanly: what is in flight is acknowledged first, within stop_timeout. A second
signal ends it at once, which loses nothing either.

SIGHUP takes over log.level and sink.on_poison of the file, and tries whether new connections can be opened
with the credentials and certificates that the files hold now. It never ends run; it ends the other
commands.

With on_fault: hold it stays at a fault, with its page, metrics and probes, publishes nothing, and goes on
when the fault is gone. SIGTERM ends it with the exit code of the fault.

Exit code 3 if the set-up can't work, 4 for a gap or a divergence that an operator has to decide about, 5
for a row that can't be published (sink.on_poison: stop), 1 after a second signal. Outages have none: it
goes on after them.`,
		Example: "  outflow run --config outflow.yaml",
	}, a.publish)
}

func (a *App) publish(ctx context.Context, cfg config.Config) (err error) {
	version, _ := buildVersion()
	level := new(slog.LevelVar)
	level.Set(cfg.Log.Level)
	events := httpstatus.NewEvents(logHandler(a.Stderr, cfg, level))
	log := slog.New(events).With("slot", cfg.Slot, "stream", cfg.Stream)
	if !cfg.Shard.Whole() {
		log = log.With("shard", cfg.Shard.String())
	}
	if cfg.Log.Format == "json" {
		a.log.Store(log)
	}
	hold, retry := cfg.OnFault == config.FaultHold, make(chan struct{}, 1)
	decorate := []func(*pipeline.Config){func(c *pipeline.Config) {
		c.Hold, c.Retry = hold, retry
		c.Failed = func(f *outbox.Fault, since time.Time) { a.saveEnd(cfg, log, f, since, hold) }
	}}
	if a.faults != nil {
		decorate = append(decorate, a.faults.Decorate)
		log.Warn("this outflow does harm to itself, as a test wants it to")
	}
	known := metrics.Info{
		Version: version, Slot: cfg.Slot, Stream: cfg.Stream, Shard: cfg.Shard.String(),
		MaxSpill: cfg.Reorder.MaxSpill, Started: time.Now(), Cluster: cfg.Cluster,
	}
	registry, own := metrics.New(known)
	p, reload, closeWriter := wiring.Pipeline(cfg, log, own, decorate...)
	defer closeWriter()
	watcher := watch.New(watch.Config{Config: cfg, Logger: log, Seen: p.Watched,
		Standby:    func() bool { return p.Status().State == pipeline.StateStandby },
		Waits:      func(held bool) string { return waitsAt(p.Status(), held) },
		Partitions: partition.Watched(cfg)})
	own.MustRegister(metrics.State(known, p.Status, watcher.Reading))
	defer runBeside(ctx, watcher.Run)()

	table := cfg.Table
	if !cfg.Source.Rows() {
		table = ""
	}
	if cfg.Listen != "" {
		l, err := httpstatus.Listen(ctx, "listen", cfg.Listen)
		if err != nil {
			return err
		}
		pages := httpstatus.Serve(l, hosts(cfg, cfg.Listen), httpstatus.Source{
			Info: info(cfg, version, table), Status: p.Status,
			Reading: watcher.Reading,
			Events:  events, Metrics: registry,
		})
		defer func() { err = errors.Join(err, pages.Close()) }()
		log.Info("pages served", "url", "http://"+l.Addr().String()+"/")
	}
	log.Info("outflow started", "version", version, "source", cfg.Source.String(), "table", table,
		"postgres", a.where.Postgres, "nats", a.where.NATS)
	reloads := reloader{load: a.load, cfg: cfg, log: log, level: level, apply: reload,
		connect: wiring.TryConnections, retry: retry}
	n := newNotifier(p.Status, log)
	defer context.AfterFunc(ctx, func() { _ = notify(daemon.SdNotifyStopping) })() // nothing depends on it
	defer runBeside(ctx, func(ctx context.Context) { supervised(ctx, hangup.Signals(), reloads.reload, n) })()
	defer runBeside(ctx, func(stopped context.Context) { a.showRun(ctx, stopped, log, p.Status) })()
	if err = p.Run(ctx); err == nil {
		log.Info("outflow stopped")
	}
	if f := outbox.FaultOf(err); f != nil && hold {
		since := time.Now()
		if held := p.Status().Fault; held != nil {
			since = held.Since
		}
		a.saveEnd(cfg, log, f, since, false) // it waits no longer
	}
	return err
}

// waitsAt is the code of what keeps a process from publishing, "" if nothing does; held: somebody has the
// slot, and if that is another process, that one publishes.
func waitsAt(s pipeline.Status, held bool) string {
	switch s.State {
	case pipeline.StateAway:
		return cmp.Or(s.Code, sink.CodeConnect)
	case pipeline.StateWaiting, pipeline.StateConnecting:
		if !held {
			return s.Code
		}
	}
	return ""
}

// hosts are the names by which pages at an address may be requested.
func hosts(cfg config.Config, listen string) string {
	if host, _, err := net.SplitHostPort(listen); err == nil {
		return cfg.ListenHosts + "," + host
	}
	return cfg.ListenHosts
}

// saveEnd stores why this process stopped publishing, and since when, for outflow status; held: it stays.
// Nothing waits for a NATS that is away.
func (a *App) saveEnd(cfg config.Config, log *slog.Logger, f *outbox.Fault, since time.Time, held bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	end := checkpoint.NewEnd(f)
	end.Exit, end.Held, end.PID = exitCode(f), held, os.Getpid()
	end.Since = since.UTC().Truncate(time.Millisecond)
	end.Host, _ = os.Hostname() // "" if the system does not know
	end.Version, _ = buildVersion()
	if err := wiring.WithStore(ctx, cfg, func(s *checkpoint.Store) error {
		return s.SaveEnd(ctx, end)
	}); err != nil {
		log.Debug("where status reads it, nothing says why this process stopped publishing", "err", err)
	}
}

// runBeside runs f in a goroutine, also while ctx has ended and what it ended still stops, until the function
// that it returns is called. That one waits for f's end.
func runBeside(ctx context.Context, f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	over := make(chan struct{})
	go func() {
		defer crash.Guard()
		defer close(over)
		f(ctx)
	}()
	return func() {
		cancel()
		<-over
	}
}

// info is what the pages say of this process.
func info(cfg config.Config, version, table string) overview.Info {
	host, _ := os.Hostname() // "" if the system does not know
	return overview.Info{
		Version: version, Go: runtime.Version(), Host: host, PID: os.Getpid(), Started: time.Now(),
		Source: cfg.Source.String(), Table: table, Shard: cfg.Shard.String(), Slot: cfg.Slot,
		Stream: cfg.Stream, Cluster: cfg.Cluster,
		InFlightLimit: sink.MaxInFlight, Where: wiring.WhereIs(cfg), Repeat: cfg.Repeat,
	}
}
