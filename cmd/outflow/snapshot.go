package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/failpoint"
	"github.com/outflowhq/outflow/internal/operate/snapshot"
)

// initSnapshot is outflow init --snapshot. Steps and progress go to standard error, as it may take long and the report is what is kept.
func (a *app) initSnapshot(ctx context.Context, cfg config.Config, asJSON bool, acceptOwners []string) error {
	faults, err := failpoint.FromEnviron(a.environ)
	if err != nil {
		return err
	}
	step := func(text string) { fmt.Fprintln(a.stderr, text) }
	if asJSON {
		lines := json.NewEncoder(a.stderr)
		step = func(text string) { _ = lines.Encode(map[string]string{"step": text}) }
	}
	report, err := snapshot.Run(ctx, cfg, newLogger(a.stderr, cfg.Log), snapshot.Options{
		Step: func(format string, args ...any) { step(fmt.Sprintf(format, args...)) },
		Progress: func(p snapshot.Progress) {
			if asJSON {
				_ = json.NewEncoder(a.stderr).Encode(p)
				return
			}
			step(p.String())
		},
		Hit: faults.Hit, AcceptOwners: acceptOwners,
	})
	if asJSON {
		e := json.NewEncoder(a.stdout)
		e.SetIndent("", "  ")
		return errors.Join(err, e.Encode(report))
	}
	if err == nil {
		fmt.Fprintln(a.stdout, report)
	}
	return err
}
