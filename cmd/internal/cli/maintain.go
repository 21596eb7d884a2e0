package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/httpstatus"
	"github.com/outflowhq/outflow/internal/app/metrics"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	segments "github.com/outflowhq/outflow/internal/lifecycle/archive"
	lifecycle "github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/archive"
	"github.com/outflowhq/outflow/internal/operate/maintain"
	"github.com/outflowhq/outflow/internal/operate/partition"
	"github.com/outflowhq/outflow/internal/operate/streamretain"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func (a *App) maintainCommand() *cobra.Command {
	var once bool
	var urls []string
	cmd := a.configured(&cobra.Command{
		Use:   "maintain",
		Short: "Archive the stream, and keep outbox table and stream small, in a loop",
		Long: `Does every maintain.every what outflow archive run does, if archive.url is set, what
outflow partition apply does, if the table is partitioned or retain.table.method is delete, and what
outflow stream apply does, if retain.stream.age, size or messages is set. While another maintain of the same
slot is at work it stands by, and goes on when that is gone. A part that fails does not stop the others, and
is tried again. See docs/retention.md.

Where maintain.listen is set, it serves metrics and probes there. What it did last is also on the status page
of outflow run and in outflow status.

SIGTERM or SIGINT stop it between two steps. It may be killed at any point.

With --once each part is run once, as from cron. It prints what has changed, what failed, and that there is
nothing to do by the settings.

Exit code 0 after a signal, 2 for a wrong option, 3 if the set-up cannot work; with --once that of the part
that needs a decision, otherwise that of the first one that failed, as the commands of the parts have them,
and 1 after a signal.`,
		Example: "  outflow maintain --config outflow.yaml\n  outflow maintain --once",
	}, func(ctx context.Context, cfg config.Config) (err error) {
		c, err := a.maintenance(cfg, urls, once)
		if err != nil {
			return err
		}
		if once {
			a.line.SetPrint(func(progress.Update) {}) // cron sends what is printed; a terminal has its line
			return maintain.Once(ctx, c)
		}
		a.line.Serve(inLog(c.Log))
		stop, err := maintainPages(ctx, cfg, &c)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
		c.Log.Info("outflow maintain started", "every", c.Every, "postgres", a.where.Postgres,
			"nats", a.where.NATS)
		if err := maintain.Run(ctx, c); !maintain.Ended(ctx, err) {
			return err
		}
		c.Log.Info("outflow maintain stopped")
		return nil
	})
	cmd.Flags().BoolVar(&once, "once", false, "run each part once and end")
	consumerDatabases(cmd.Flags(), &urls)
	return cmd
}

// maintainPages serves what outflow maintain knows of itself, where maintain.listen is set.
func maintainPages(ctx context.Context, cfg config.Config, c *maintain.Config) (stop func() error,
	err error) {
	if cfg.Maintain.Listen == "" {
		return func() error { return nil }, nil
	}
	l, err := httpstatus.Listen(ctx, "maintain.listen", cfg.Maintain.Listen)
	if err != nil {
		return nil, err
	}
	m := c.Monitor
	known := func() metrics.Maintaining {
		doc := m.Maintained()
		return metrics.Maintaining{Active: m.Active(), Partitions: m.Partitions(), Maintained: &doc}
	}
	pages := httpstatus.ServeProbes(l, hosts(cfg, cfg.Maintain.Listen), httpstatus.Probes{
		Alive: m.Alive, Ready: m.Ready, Metrics: metrics.NewMaintain(cfg.Slot, known),
		Status: func() any {
			k := known()
			return struct {
				Active     bool              `json:"active"`
				WaitsFor   string            `json:"waits_for,omitempty"`
				Partitions watch.Partitions  `json:"partitions"`
				Maintained *watch.Maintained `json:"maintained"`
			}{k.Active, m.WaitsFor(), k.Partitions, k.Maintained}
		},
	})
	c.Log.Info("pages served", "url", "http://"+l.Addr().String()+"/status.json")
	return pages.Close, nil
}

// monitor is told what the parts do, and leaves it beside the checkpoint record.
func monitor(cfg config.Config, log *slog.Logger) *maintain.Monitor {
	m := &maintain.Monitor{Log: log, PID: os.Getpid(), Survey: lifecycle.Watched(cfg)}
	m.Host, _ = os.Hostname() // "" if the system does not know
	m.Version, _ = buildVersion()
	m.Load = func(ctx context.Context) (found *watch.Maintained, err error) {
		err = wiring.WithStore(ctx, cfg, func(s *checkpoint.Store) error {
			found, err = watch.ReadMaintained(ctx, s)
			return err
		})
		return found, err
	}
	m.Save = func(ctx context.Context, doc *watch.Maintained) error {
		text, err := json.Marshal(doc)
		if err != nil {
			return err
		}
		return wiring.WithStore(ctx, cfg, func(s *checkpoint.Store) error {
			return s.SaveMaintained(ctx, text)
		})
	}
	return m
}

// maintenance are the parts that there are by the settings.
func (a *App) maintenance(cfg config.Config, urls []string, once bool) (maintain.Config, error) {
	log := newLogger(a.Stderr, cfg).With("slot", cfg.Slot, "stream", cfg.Stream)
	hit := func(string) {}
	if a.faults != nil {
		hit = a.faults.Hit
	}
	known := &segments.Known{}
	turn := cfg.Maintain.Every // how long a part works through a backlog while the others wait
	if once {
		turn = 0
	}
	c := maintain.Config{Every: cfg.Maintain.Every, Log: log, Slot: cfg.Slot, Monitor: monitor(cfg, log),
		Connect: func(ctx context.Context) (*pgx.Conn, error) {
			defer wiring.WaitPostgres(ctx, cfg)()
			return postgres.Target{URL: cfg.Postgres.URL, Slot: cfg.Slot, Command: cfg.Command}.Connect(ctx)
		}}
	if cfg.Archive.URL != "" {
		c.Parts = append(c.Parts, maintain.Part{Name: "archive", Run: func(ctx context.Context,
			m *watch.Maintained) error {
			ctx, cancel := context.WithTimeout(ctx, archiveTimeout)
			defer cancel()
			o := archive.Options{Known: known, Hit: hit}
			if !once {
				o.Over = cfg.Maintain.Every * 3 / 4
			}
			o.Turn = turn
			report, err := archive.Run(ctx, cfg, log, o)
			if report != nil {
				m.Archive = &watch.Archived{Sequence: report.Archived, Oldest: report.Waits,
					Messages:   max(report.Stands, report.Archived) - report.Archived,
					SegmentAge: cfg.Archive.SegmentAge}
				for _, s := range report.Segments {
					log.Info("archived", "segment", s.String())
				}
			}
			return err
		}})
	}
	if cfg.Source.Rows() {
		pass, noted := &lifecycle.Pass{}, map[string]bool{}
		c.Parts = append(c.Parts, maintain.Part{Name: "partition", Run: func(ctx context.Context,
			_ *watch.Maintained) error {
			ctx, cancel := context.WithTimeout(ctx, partitionTimeout)
			defer cancel()
			report, err := partition.Run(ctx, cfg, log, partition.Options{Apply: true, PlainStays: true,
				Known: known, Turn: turn, Pass: pass, Hit: hit, Step: func(s lifecycle.Step) {
					if s.Done() {
						log.Info("done", "step", s.String())
					}
				}})
			// With --once only one that does nothing at all says so: cron sends whatever is printed.
			if report != nil && (!once || len(c.Parts) == 1 && len(report.Steps) == 0) {
				for _, note := range report.Notes {
					if !noted[note] {
						log.Info("note", "part", "partition", "text", note)
					}
					noted[note] = true
				}
			}
			return err
		}})
	}
	if r := cfg.Retain.Stream; r.Age > 0 || r.Size > 0 || r.Messages > 0 {
		o := a.streamOptions(cfg, urls, true)
		o.Known, o.Turn = known, turn
		c.Parts = append(c.Parts, maintain.Part{Name: "stream", Run: func(ctx context.Context,
			m *watch.Maintained) error {
			ctx, cancel := context.WithTimeout(ctx, streamTimeout)
			defer cancel()
			report, err := streamretain.Run(ctx, cfg, log, o)
			if report != nil {
				m.Kept = kept(report)
			}
			if report != nil && report.Applied && report.Gone > 0 {
				log.Info("removed from the stream", "messages", report.Gone, "up_to", report.GoesTo)
			}
			return err
		}})
	}
	if len(c.Parts) == 0 {
		return c, &outbox.Fault{Class: outbox.Usage,
			Message: fmt.Sprintf("source is %v, and neither archive.url nor retain.stream.* is set",
				cfg.Source),
			Hint: "There is nothing to maintain"}
	}
	return c, nil
}

// kept says what stays in the stream beyond its limits, and for whose sake. What may go goes soon.
func kept(r *streamretain.Report) *watch.Kept {
	k := &watch.Kept{}
	gone := max(r.GoesTo, min(r.Wanted, r.MayGo), max(r.First, 1)-1)
	if r.Wanted <= gone {
		return k
	}
	k.Messages = r.Wanted - gone
	if len(r.Bounds) > 0 { // the one that holds the most
		b := r.Bounds[0]
		k.By, k.Why = strings.TrimSpace(b.Clause+" "+b.Name), b.Why
	}
	return k
}
