package partition

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
)

// refresh reads the manifests that have come, of the archive of the stream that was made then: what was
// archived of an earlier stream of that name says nothing of this one. It looks each time whether what is
// known is still there: somebody may put an older copy in place of the archive.
func (c *command) refresh(ctx context.Context, made time.Time) (err error) {
	c.archive, err = c.known.Load(ctx, c.store, archive.FolderOf(c.cfg.Stream, made), nil)
	return err
}

// reach says how far the archive is.
func (c *command) reach(ctx context.Context, rd backfill.Readings) (r partition.Reach) {
	if err := c.refresh(ctx, rd.Stream.Created); err != nil {
		return partition.Reach{Err: err}
	}
	// A stream that was put back from a backup keeps the time at which it was made, and has others under the
	// sequences behind it: of those the archive says nothing.
	if err := c.archive.Agrees(ctx, c.l.NATS.API()); err != nil {
		return partition.Reach{Err: err}
	}
	valid := func(system string, timeline uint32, lsn outbox.LSN) bool {
		return system == rd.Server.SystemID && timeline == rd.Server.History.At(lsn)
	}
	a := c.archive.Reach(valid)
	r = partition.Reach{Last: a.Last, Complete: a.Complete, Whole: a.Whole}
	// Where nothing is published any more, checkpoints move on and no segment comes: what is archived is all
	// that there is below the confirmed one. An archive that ends behind that one is not of these messages,
	// or newer than what was read.
	rec := rd.Record
	if rec == nil || !rec.Created.Equal(rd.Stream.Created) || rec.Repairing != "" ||
		len(rec.Checkpoints) == 0 {
		return r
	}
	confirmed := rec.Checkpoints[0]
	if a.Last == confirmed.Seq && valid(rec.SystemID, confirmed.Timeline, confirmed.Start()) {
		r.Complete = max(r.Complete, confirmed.Start())
		if !c.archive.HasGaps() {
			r.Whole = r.Complete
		}
	}
	return r
}

// archived reads the ids of the archive's events, from the segments with messages that were stored within a
// period.
func (c *command) archived(ctx context.Context, made time.Time, in partition.Period,
	add func(id [16]byte) error) error {
	if err := c.refresh(ctx, made); err != nil {
		return err
	}
	var chosen []*archive.Manifest
	var messages int64
	for _, m := range c.archive.Segments {
		if !m.To.Before(in.Since) && (in.Until.IsZero() || !m.From.After(in.Until)) {
			chosen, messages = append(chosen, m), messages+int64(m.Count)
		}
	}
	task := progress.Count(ctx, "reading the event ids of the archive", "messages", messages)
	defer task.End()
	var mu sync.Mutex // of add
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(archive.AtOnce())
	for _, m := range chosen {
		g.Go(func() error {
			defer crash.Guard()
			return c.archive.EventHeaders(ctx, m, func(header string) error {
				task.Add(1)
				if outbox.HeaderID(header) == "" {
					return nil
				}
				sum := outbox.HeaderIDSum(header)
				mu.Lock()
				defer mu.Unlock()
				return add(sum)
			})
		})
	}
	return g.Wait()
}
