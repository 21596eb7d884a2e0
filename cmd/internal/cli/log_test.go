package cli

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/app/config"
)

func TestTheLogHasItsFormatAndLevel(t *testing.T) {
	t.Parallel()
	for format, want := range map[string]string{"text": "level=WARN msg=behind",
		"json": `"level":"WARN","msg":"behind"`} {
		var b bytes.Buffer
		log := newLogger(&b, config.Config{Log: config.Log{Format: format, Level: slog.LevelWarn}})
		log.Info("started")
		log.Warn("behind")
		if got := b.String(); !strings.Contains(got, want) || strings.Contains(got, "started") {
			t.Errorf("%s: %s", format, got)
		}
	}
}
