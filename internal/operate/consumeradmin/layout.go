package consumeradmin

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
)

// maxPartitions is that of consumer.Config.Partitions.
const maxPartitions = 4096

// Repartition says how the layout of a consumer is to change.
type Repartition struct {
	Name       string
	Partitions int    // 0: as many as there are
	Keying     string // "": as it is
	Cancel     bool   // what is under way is not to happen
	DryRun     bool   // only Confirm is called
	NoWait     bool   // do not wait until the consumer's instances have done it

	// Confirm is called with the plan unless the change is under way already; nothing is changed if it
	// returns an error.
	Confirm func(p *LayoutPlan) error
}

// LayoutPlan is a change of the layout, as it is now. The JSON names are stable.
type LayoutPlan struct {
	Name       string   `json:"name"`
	State      string   `json:"state"` // planned, asked, done, canceled
	Partitions int      `json:"partitions"`
	Keying     string   `json:"keying"`
	Wanted     Change   `json:"wanted"`
	Marks      int      `json:"marks"`   // partitions that have to reach the barrier
	Running    []string `json:"running"` // the instances that do it
}

// The states of a change.
const (
	layoutPlanned  = "planned"
	layoutAsked    = "asked"
	layoutDone     = "done"
	layoutCanceled = "canceled"
)

// Lines is the plan in words.
func (p *LayoutPlan) Lines() []string {
	if p.State == layoutCanceled {
		return []string{fmt.Sprintf("consumer %s keeps %s (%s)", p.Name,
			units.Of(p.Partitions, "partition"), p.Keying)}
	}
	lines := []string{fmt.Sprintf("consumer %s gets %s instead of %d", p.Name,
		units.Of(p.Wanted.Partitions, "partition"), p.Partitions)}
	if p.Wanted.Keying != p.Keying {
		lines = append(lines, fmt.Sprintf("keying   %s instead of %s", p.Wanted.Keying, p.Keying))
	}
	lines = append(lines, fmt.Sprintf("barrier  sequence %d: nothing beyond it is done before all of %d "+
		"partitions are there; %d are", p.Wanted.Barrier, p.Marks, p.Wanted.Reached))
	if len(p.Running) == 0 {
		return append(lines, "runs     no instance: it is done when one runs again")
	}
	return append(lines, "runs     "+strings.Join(p.Running, ", "))
}

// Outcome is how the change stands, in words.
func (p *LayoutPlan) Outcome() string {
	switch p.State {
	case layoutDone:
		return fmt.Sprintf("done: consumer %s has %s", p.Name, units.Of(p.Wanted.Partitions, "partition"))
	case layoutCanceled:
		return fmt.Sprintf("done: the change is taken back, consumer %s keeps %s", p.Name,
			units.Of(p.Partitions, "partition"))
	case layoutPlanned:
		return "nothing was changed (--dry-run)"
	}
	return fmt.Sprintf("asked: %d of %s reached the barrier. The consumer does it while it runs; "+
		"`outflow consumer list` shows how far it is", p.Wanted.Reached, units.Of(p.Marks, "partition"))
}

// Repartition asks for another layout. The consumer's instances do it: nothing is done beyond the barrier
// until all partitions are there, and the new ones begin at it. It returns how that stands.
func (a *Admin) Repartition(ctx context.Context, r Repartition) (*LayoutPlan, error) {
	if r.Partitions < 0 || r.Partitions > maxPartitions {
		return nil, usage("consumer_layout", fmt.Sprintf("--partitions %d", r.Partitions),
			fmt.Sprintf("Write 1 to %d", maxPartitions))
	}
	if r.Cancel == (r.Partitions > 0 || r.Keying != "") {
		return nil, usage("consumer_layout", "it is not clear what is to change",
			"Write --partitions N or --keying NAME, or --cancel alone")
	}
	if _, err := a.stream(ctx); err != nil {
		return nil, err
	}
	_, kind, err := a.find(ctx, r.Name)
	if err != nil {
		return nil, err
	}
	if kind != InPostgres {
		return nil, fatal("consumer_layout", fmt.Sprintf("consumer %s does not share its partitions (marks: "+
			"%s)", r.Name, kind), "With marks in JetStream, stop it and start it with another "+
			"Config.Partitions")
	}
	s, err := a.inDatabase(ctx, a.DB, r.Name, free)
	if err != nil {
		return nil, err
	}
	if r.Cancel {
		return a.cancelLayout(ctx, r, s)
	}
	p, err := r.plan(s)
	if err != nil {
		return nil, err
	}
	if p.State == layoutDone {
		return p, nil
	}
	if s.change == nil {
		if err := r.Confirm(p); err != nil || r.DryRun {
			return p, err
		}
		if p, err = a.askLayout(ctx, r); err != nil || p.State == layoutDone {
			return p, err
		}
	}
	p.State = layoutAsked
	if r.DryRun || r.NoWait || len(p.Running) == 0 {
		return p, nil
	}
	return p, a.awaitLayout(ctx, p)
}

// plan is what the change would be.
func (r *Repartition) plan(s *state) (*LayoutPlan, error) {
	p := &LayoutPlan{Name: r.Name, State: layoutPlanned, Partitions: s.partitions, Keying: s.keying,
		Marks: len(s.offsets), Running: append([]string{}, s.alive()...)}
	p.Wanted = *s.changeTo(cmp.Or(r.Partitions, s.partitions), cmp.Or(r.Keying, s.keying),
		s.furthest())
	if s.change != nil {
		if s.change.Partitions != p.Wanted.Partitions || s.change.Keying != p.Wanted.Keying {
			return nil, fatal("consumer_layout", fmt.Sprintf("consumer %s is on its way to another layout, "+
				"%d "+
				"partitions (%s)", r.Name, s.change.Partitions, s.change.Keying),
				"Let it come there, or take that back first: --cancel")
		}
		p.Wanted = *s.change
		return p, nil
	}
	if p.Wanted.Partitions == p.Partitions && p.Wanted.Keying == p.Keying {
		p.State = layoutDone // such as by a command that was killed
		return p, nil
	}
	if len(s.offsets) == 0 {
		return nil, fatal("consumer_layout", fmt.Sprintf("consumer %s has read nothing yet", r.Name),
			"Start it with the Config.Partitions that it is to have")
	}
	return p, nil
}

// askLayout writes the change into the consumer's row.
func (a *Admin) askLayout(ctx context.Context, r Repartition) (p *LayoutPlan, err error) {
	d := a.database()
	err = d.change(ctx, r.Name, func(tx pgx.Tx) error {
		now, err := a.inDatabase(ctx, tx, r.Name, claims)
		if err != nil {
			return err
		}
		if p, err = r.plan(now); err != nil || p.State == layoutDone || now.change != nil {
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE `+d.table("outflow_consumer")+` SET wanted_keying = $2,
			wanted_partitions = $3, barrier = $4 WHERE name = $1`, r.Name, p.Wanted.Keying,
			p.Wanted.Partitions, int64(p.Wanted.Barrier))
		if err != nil {
			return d.failed("ask consumer "+r.Name+" for another layout", err)
		}
		return nil
	})
	return p, err
}

// cancelLayout takes a change back. Up to the barrier, and behind it, everything goes on in the old layout.
func (a *Admin) cancelLayout(ctx context.Context, r Repartition, s *state) (*LayoutPlan, error) {
	p := &LayoutPlan{Name: r.Name, State: layoutCanceled, Partitions: s.partitions, Keying: s.keying,
		Marks: len(s.offsets), Running: append([]string{}, s.alive()...)}
	if s.change == nil {
		return nil, fatal("consumer_layout", fmt.Sprintf("consumer %s is not on its way to another layout: "+
			"it has %s (%s)", r.Name, units.Of(s.partitions, "partition"), s.keying),
			"There is nothing to take back")
	}
	p.Wanted = *s.change
	if err := r.Confirm(p); err != nil {
		return p, err
	}
	if r.DryRun {
		p.State = layoutPlanned
		return p, nil
	}
	d := a.database()
	return p, d.change(ctx, r.Name, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE `+d.table("outflow_consumer")+` SET wanted_keying = NULL,
			wanted_partitions = NULL, barrier = NULL WHERE name = $1 AND barrier IS NOT NULL`, r.Name)
		if err != nil {
			return d.failed("take back the layout of consumer "+r.Name, err)
		}
		if tag.RowsAffected() == 0 {
			return fatal("consumer_layout", fmt.Sprintf("consumer %s has come to its new layout meanwhile",
				r.Name), "There is nothing to take back")
		}
		return nil
	})
}

// lookEvery is how often a change that is waited for is looked at.
const lookEvery = 200 * time.Millisecond

// awaitLayout waits until the instances have changed the layout. Whoever ends the wait leaves the change to
// them.
func (a *Admin) awaitLayout(ctx context.Context, p *LayoutPlan) error {
	task := progress.Count(ctx, "waiting for consumer "+p.Name, "partitions at the barrier",
		int64(p.Marks))
	defer task.End()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		s, err := a.inDatabase(ctx, a.DB, p.Name, free)
		if err != nil {
			return err
		}
		switch p.Running = append([]string{}, s.alive()...); {
		case s.change == nil && s.partitions == p.Wanted.Partitions && s.keying == p.Wanted.Keying:
			p.State, p.Wanted.Reached = layoutDone, p.Marks
			return nil
		case s.change == nil:
			return fatal("consumer_layout", fmt.Sprintf("the change of consumer %s was taken back: it has "+
				"%d "+
				"partitions (%s)", p.Name, s.partitions, s.keying), "Run it again if that was a mistake")
		case len(p.Running) == 0:
			return nil
		}
		p.Wanted = *s.change
		task.Set(int64(s.change.Reached))
		select {
		case <-ctx.Done():
			return fmt.Errorf("the change goes on without this command: %w", context.Cause(ctx))
		case <-look.C:
		}
	}
}
