package cli

import (
	"io"
	"log/slog"

	"github.com/outflowhq/outflow/internal/app/config"
)

// newLogger returns the logger that the settings ask for.
func newLogger(w io.Writer, cfg config.Log) *slog.Logger {
	options := &slog.HandlerOptions{Level: cfg.Level}
	if cfg.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}
