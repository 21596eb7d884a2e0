package cli

import (
	"context"
	"errors"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/internal/operate/snapshot"
)

// initSnapshot is outflow init --snapshot. Steps go to standard error, as progress does: the report is what
// is kept.
func (a *App) initSnapshot(ctx context.Context, cfg config.Config, asJSON bool, acceptOwners []string) error {
	hit := func(string) {}
	if a.faults != nil {
		hit = a.faults.Hit
	}
	if asJSON {
		a.progressAsJSON()
	}
	log := newLogger(a.Stderr, cfg)
	report, err := snapshot.Run(ctx, cfg, log, snapshot.Options{
		Prepare: func(ctx context.Context, fits snapshot.Fits) error {
			return initialize.Prepare(ctx, cfg, log, a.line.Step, acceptOwners, fits)
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
