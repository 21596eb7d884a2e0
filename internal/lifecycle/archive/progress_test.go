package archive

import (
	"context"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/lab/must"
)

// slow is a store that answers when something is said.
type slow struct {
	Store
	said <-chan struct{}
}

func (s slow) List(ctx context.Context, folder, after string) ([]string, error) {
	select {
	case <-s.said:
		return s.Store.List(ctx, folder, after)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// until closes done when words are written to it.
type until struct {
	words string
	done  chan struct{}
	once  sync.Once
}

func (u *until) Write(p []byte) (int, error) {
	if strings.Contains(string(p), u.words) {
		u.once.Do(func() { close(u.done) })
	}
	return len(p), nil
}

// TestReadingTheManifestsIsNotSilent: there may be many, far away.
func TestReadingTheManifestsIsNotSilent(t *testing.T) {
	t.Parallel()
	store, err := Open(t.Context(), "file://"+t.TempDir())
	must.Succeed(t, err)
	defer store.Close() //nolint:errcheck // it was read only
	said := &until{words: "reading the manifests of the archive of stream S", done: make(chan struct{})}
	line := progress.New(progress.Config{Stdout: io.Discard, Stderr: said})
	line.Start("archive")
	defer line.Stop()
	ctx, cancel := context.WithTimeout(progress.With(t.Context(), line), time.Minute)
	defer cancel()
	if _, err := Load(ctx, slow{store, said.done}, FolderOf("S", made), nil); err != nil {
		t.Errorf("nothing was said: %v", err)
	}
}
