package pipeline

import (
	"context"
	"errors"
	"fmt"

	"github.com/outflowhq/outflow/checkpoint"
)

// Elsewhere is the record of a home whose stream clusters share, for another one of them: in the coordinates
// of the WAL that is read there. It has what Own knows of these, so it is written with it. Load comes before
// Save; neither is called while the other is under way.
type Elsewhere struct {
	Home Store // the home's record
	Own  Store // what this cluster keeps for itself; see [checkpoint.Record.WithoutStream]

	own      *checkpoint.Record // as it was loaded, or saved, last
	revision uint64             // its
	stopped  string             // what the home's says
}

// Load reads both.
func (e *Elsewhere) Load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	home, revision, err := e.Home.Load(ctx)
	if err != nil || home == nil {
		return nil, revision, err
	}
	own, ownRevision, err := e.Own.Load(ctx)
	if err != nil {
		return nil, revision, err
	}
	if own == nil {
		return nil, revision, errors.New("this cluster has no record of the home's rows")
	}
	going := *own
	going.Stopped = ""
	rec, err := going.Elsewhere(home)
	if err != nil {
		return nil, revision, err
	}
	if own.Stopped != "" {
		rec.Stopped = own.Stopped
	}
	e.own, e.revision, e.stopped = own, ownRevision, home.Stopped
	return rec, revision, nil
}

// Save writes what this cluster keeps first: without it the home's record could not be read here.
func (e *Elsewhere) Save(ctx context.Context, rec *checkpoint.Record, revision uint64) (uint64, error) {
	own, home := rec.WithoutStream(), rec.AtHome()
	own.Stopped, home.Stopped = e.own.Stopped, e.stopped
	switch rec.Stopped {
	case own.Stopped, home.Stopped:
	case checkpoint.CodeHome, checkpoint.CodePublication: // what came here: others may go on
		own.Stopped = rec.Stopped
	default:
		home.Stopped = rec.Stopped
	}
	ownRevision, err := e.Own.Save(ctx, own, e.revision)
	if err != nil {
		return 0, fmt.Errorf("what is kept of the home: %w", err)
	}
	e.own, e.revision = own, ownRevision
	return e.Home.Save(ctx, home, revision)
}

// SaveGaps stores them beside the home's record.
func (e *Elsewhere) SaveGaps(ctx context.Context, doc []byte) error { return e.Home.SaveGaps(ctx, doc) }
