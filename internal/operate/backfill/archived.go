package backfill

import (
	"context"
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
)

// Archived says which messages the archive has of the newest stream of that name that was archived, for
// whoever is about to fill an empty one from the table; "" if there are none. It is opened with archive.Open,
// or with archive.OpenThere where there may have been a stream.
func Archived(ctx context.Context, cfg config.Config,
	open func(ctx context.Context, at string) (archive.Store, error)) (string, error) {
	if cfg.Archive.URL == "" {
		return "", nil
	}
	store, err := open(ctx, cfg.Archive.URL)
	if err != nil {
		return "", err
	}
	defer func() { _ = store.Close() }()
	folders, err := archive.Folders(ctx, store, cfg.Stream)
	for _, folder := range slices.Backward(folders) {
		a, err := archive.Load(ctx, store, folder, nil)
		if err != nil {
			return "", err
		}
		if len(a.Segments) > 0 {
			return fmt.Sprintf("the archive has messages of a stream %s up to sequence %d (%s)", cfg.Stream,
				a.Next()-1, folder), nil
		}
	}
	return "", err
}
