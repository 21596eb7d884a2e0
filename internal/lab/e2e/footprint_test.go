package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// footprint watches what a process takes up, until it is stopped.
type footprint struct {
	t     *testing.T
	pid   int
	stop  chan struct{}
	group sync.WaitGroup

	mu    sync.Mutex
	peak  int64 // greatest resident set, bytes
	spill int64 // greatest size of all open scratch files on disk, bytes
	named string
}

// watch begins to watch the process that runs now.
func (o *outflow) watch(t *testing.T) *footprint {
	t.Helper()
	f := &footprint{t: t, pid: o.child.PID(), stop: make(chan struct{})}
	if _, ok := process.Peak(f.pid); !ok {
		tier.Missing(t, "linux", "needs /proc to see what a process takes up")
	}
	f.group.Go(func() {
		const interval = 10 * time.Millisecond
		for ticker := time.NewTicker(interval); ; {
			f.look()
			select {
			case <-f.stop:
				ticker.Stop()
				return
			case <-ticker.C:
			}
		}
	})
	t.Cleanup(func() { f.peaks() })
	return f
}

// look reads the kernel's own high-water mark, and what the scratch files hold: they have no name, so they are found by the process
// that has them open.
func (f *footprint) look() {
	peak, ok := process.Peak(f.pid)
	if !ok {
		return // it has ended
	}
	var spill int64
	dir := fmt.Sprintf("/proc/%d/fd", f.pid)
	files, _ := os.ReadDir(dir)
	named := ""
	for _, entry := range files {
		path := filepath.Join(dir, entry.Name())
		target, err := os.Readlink(path)
		if err != nil || !strings.HasSuffix(target, " (deleted)") {
			if strings.Contains(target, "outflow-") {
				named = target
			}
			continue
		}
		var st syscall.Stat_t
		if syscall.Stat(path, &st) == nil && st.Nlink == 0 {
			spill += st.Blocks * 512
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.peak, f.spill = max(f.peak, peak), max(f.spill, spill)
	if named != "" {
		f.named = named
	}
}

// spilled returns the greatest size of the scratch files so far.
func (f *footprint) spilled() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.spill
}

// peaks ends the watch and returns what was seen.
func (f *footprint) peaks() (memory, spill int64) {
	f.look()
	f.mu.Lock()
	select {
	case <-f.stop:
	default:
		close(f.stop)
	}
	f.mu.Unlock()
	f.group.Wait()
	return f.peak, f.spill
}
