package cli

import (
	"io"
	"log/slog"

	"github.com/outflowhq/outflow/internal/app/config"
)

// newLogger returns the logger that the settings ask for.
func newLogger(w io.Writer, cfg config.Log) *slog.Logger {
	return slog.New(logHandler(w, cfg.Format, cfg.Level))
}

func logHandler(w io.Writer, format string, level slog.Leveler) slog.Handler {
	options := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.NewJSONHandler(w, options)
	}
	return slog.NewTextHandler(w, options)
}
