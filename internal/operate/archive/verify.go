package archive

import (
	"context"
	"fmt"
	"math/rand/v2"

	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
)

// Listing is what there is of one stream. The JSON names are stable.
type Listing struct {
	Folder   string    `json:"folder"`
	Segments []Segment `json:"segments"`
}

// List reads the manifests of the stream, and of those that had its name before, oldest first. It needs no
// connection but the archive's.
func List(ctx context.Context, cfg config.Config) ([]Listing, error) {
	all := []Listing{}
	err := each(ctx, cfg, func(folder string, a *archive.Archive) error {
		l := Listing{Folder: folder, Segments: []Segment{}}
		for _, m := range a.Segments {
			l.Segments = append(l.Segments, segmentOf(a, m))
		}
		all = append(all, l)
		return nil
	})
	return all, err
}

func each(ctx context.Context, cfg config.Config, f func(folder string, a *archive.Archive) error) error {
	store, err := open(ctx, cfg, archive.OpenThere)
	if err != nil {
		return err
	}
	defer func() { _ = store.Close() }()
	folders, err := archive.Folders(ctx, store, cfg.Stream)
	if err != nil {
		return err
	}
	for _, folder := range folders {
		a, err := archive.Load(ctx, store, folder, nil)
		if err != nil {
			return err
		}
		if err := f(folder, a); err != nil {
			return err
		}
	}
	return nil
}

// Verified says what was read. The JSON names are stable.
type Verified struct {
	Segments int    `json:"segments"` // of which Read were read whole
	Read     int    `json:"read"`
	Messages uint64 `json:"messages"` // in those
	Bytes    int64  `json:"bytes"`    // in those
}

func (v Verified) String() string {
	return fmt.Sprintf("the chain of %s holds; %d read whole: %s, %d bytes",
		units.Of(v.Segments, "segment"), v.Read, units.Of(v.Messages, "message"), v.Bytes)
}

// Verify checks the chain of all manifests, and reads segments whole: all, or so many by chance and the
// newest if sample is above 0. The first one that is lost or damaged is the error, and so is that there is
// none: nothing was verified then.
func Verify(ctx context.Context, cfg config.Config, sample int) (v Verified, err error) {
	err = each(ctx, cfg, func(folder string, a *archive.Archive) error {
		chosen := a.Segments
		if n := len(chosen); sample > 0 && sample < n {
			chosen = []*archive.Manifest{a.Segments[n-1]}
			for _, i := range rand.Perm(n - 1)[:sample-1] {
				chosen = append(chosen, a.Segments[i])
			}
		}
		task := progress.Count(ctx, "reading archive "+folder, "segments", int64(len(chosen)))
		defer task.End()
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(archive.AtOnce())
		for _, m := range chosen {
			g.Go(func() error {
				defer crash.Guard()
				defer task.Add(1)
				return a.Verify(ctx, m, nil)
			})
			v.Messages += m.Count
			v.Bytes += m.Bytes
		}
		v.Segments += len(a.Segments)
		v.Read += len(chosen)
		return g.Wait()
	})
	if err == nil && v.Segments == 0 {
		err = empty(cfg)
	}
	return v, err
}
