package cli

import (
	"context"
	"log/slog"
	"strings"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/outbox"
)

// reloader takes over, at SIGHUP, what a running process can. Nothing that it finds ends the process.
type reloader struct {
	load  func() (config.Config, error) // as at the start
	cfg   config.Config                 // in force
	log   *slog.Logger
	level *slog.LevelVar
	apply func(config.Config) // to sessions that begin from now on

	// connect opens a connection to each server with what the files hold now, and closes it. Those that are
	// open stay: what the servers no longer accept, they close.
	connect func(context.Context, config.Config) []error

	retry chan<- struct{} // a fault that is held is looked at again
}

func (r *reloader) reload(ctx context.Context) {
	next, err := r.load()
	if err != nil {
		r.log.Error("nothing was reloaded: the settings can't be read", reason(err)...)
		return
	}
	cfg, taken, others := r.cfg.Reload(next)
	r.level.Set(min(r.cfg.Log.Level, cfg.Log.Level)) // whichever of them would show the next line
	r.cfg = cfg
	r.apply(cfg)
	r.log.Info("reloaded", "settings", strings.Join(taken, ", "))
	r.level.Set(cfg.Log.Level)
	if len(others) > 0 {
		r.log.Warn("settings were changed that need a restart", "settings", strings.Join(others, ", "))
	}
	failed := r.connect(ctx, cfg)
	if ctx.Err() != nil { // the process ends: that says nothing about credentials
		return
	}
	for _, err := range failed {
		r.log.Error("no new connection can be opened", reason(err)...)
	}
	if len(failed) == 0 {
		r.log.Info("credentials and certificates are good for new connections")
	}
	select {
	case r.retry <- struct{}{}:
	default: // it is asked for already
	}
}

// reason is an error as the attributes of a log line: with its code, if it has one.
func reason(err error) []any {
	if f := outbox.FaultOf(err); f != nil && f.Code != "" {
		return []any{"code", f.Code, "err", err}
	}
	return []any{"err", err}
}
