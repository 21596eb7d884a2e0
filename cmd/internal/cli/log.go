package cli

import (
	"context"
	"io"
	"log/slog"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/finding"
)

// newLogger returns the logger that the settings ask for.
func newLogger(w io.Writer, cfg config.Config) *slog.Logger {
	return slog.New(logHandler(w, cfg, cfg.Log.Level))
}

func logHandler(w io.Writer, cfg config.Config, level slog.Leveler) slog.Handler {
	options := &slog.HandlerOptions{Level: level}
	h := &handler{repeat: cfg.Repeat, where: wiring.WhereIs(cfg)}
	if h.Handler = slog.NewTextHandler(w, options); cfg.Log.Format == "json" {
		h.Handler = slog.NewJSONHandler(w, options)
	}
	return h
}

// handler makes a line complete for those who have several installations: commands that it suggests have
// their options, and what is wrong has the servers.
type handler struct {
	slog.Handler
	repeat finding.Options
	where  wiring.Where
}

// Handle implements slog.Handler.
func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	full := slog.NewRecord(r.Time, r.Level, h.repeat.In(r.Message), r.PC)
	r.Attrs(func(attr slog.Attr) bool {
		switch v := attr.Value.Resolve().Any().(type) {
		case error:
			attr.Value = slog.StringValue(h.repeat.In(v.Error()))
		case string:
			attr.Value = slog.StringValue(h.repeat.In(v))
		}
		full.AddAttrs(attr)
		return true
	})
	if r.Level >= slog.LevelWarn {
		full.AddAttrs(slog.String("postgres", h.where.Postgres), slog.String("nats", h.where.NATS))
	}
	return h.Handler.Handle(ctx, full)
}

// WithAttrs implements slog.Handler.
func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{h.Handler.WithAttrs(attrs), h.repeat, h.where}
}

// WithGroup implements slog.Handler.
func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.Handler.WithGroup(name), h.repeat, h.where}
}
