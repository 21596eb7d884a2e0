package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/internal/operate/snapshot"
)

// initSnapshot is outflow init --snapshot. Steps and progress go to standard error, as it may take long and
// the report is what is kept.
func (a *App) initSnapshot(ctx context.Context, cfg config.Config, asJSON bool, acceptOwners []string) error {
	hit := func(string) {}
	if a.faults != nil {
		hit = a.faults.Hit
	}
	step := func(text string) { a.printf(a.Stderr, "%s\n", text) }
	if asJSON {
		lines := json.NewEncoder(a.Stderr)
		step = func(text string) { _ = lines.Encode(map[string]string{"step": text}) }
	}
	log, stepf := newLogger(a.Stderr, cfg), func(format string, args ...any) {
		step(fmt.Sprintf(format, args...))
	}
	report, err := snapshot.Run(ctx, cfg, log, snapshot.Options{
		Prepare: func(ctx context.Context) error {
			return initialize.Prepare(ctx, cfg, log, stepf, acceptOwners)
		},
		Progress: stepf,
		RowProgress: func(p snapshot.RowProgress) {
			if asJSON {
				_ = json.NewEncoder(a.Stderr).Encode(p)
				return
			}
			step(p.String())
		},
		Hit: hit,
	})
	if asJSON {
		return errors.Join(err, a.printJSON(report))
	}
	if err == nil {
		a.printf(a.Stdout, "%v\n", report)
	}
	return err
}
