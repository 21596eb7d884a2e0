package harness

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

// Footprint watches what a process takes up, until it is stopped.
type Footprint struct {
	t     *testing.T
	pid   int
	stop  chan struct{}
	group sync.WaitGroup

	Mu    sync.Mutex
	peak  int64 // greatest resident set, bytes
	Spill int64 // greatest size of all open scratch files on disk, bytes
	Named string
}

// Watch begins to watch the process that runs now.
func (o *Outflow) Watch(t *testing.T) *Footprint {
	t.Helper()
	if os.Getenv("OUTFLOW_TEST_RACED") != "" { // scripts/test --long sets it
		t.Skip("with the race detector a program takes several times as much memory")
	}
	f := &Footprint{t: t, pid: o.Process.PID(), stop: make(chan struct{})}
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
	t.Cleanup(func() { f.Peaks() })
	return f
}

// look reads the kernel's own high-water mark, and what the scratch files hold: they have no name, so they
// are found by the process that has them open.
func (f *Footprint) look() {
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
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.peak, f.Spill = max(f.peak, peak), max(f.Spill, spill)
	if named != "" {
		f.Named = named
	}
}

// Peaks ends the watch and returns what was seen.
func (f *Footprint) Peaks() (memory, spill int64) {
	f.look()
	f.Mu.Lock()
	select {
	case <-f.stop:
	default:
		close(f.stop)
	}
	f.Mu.Unlock()
	f.group.Wait()
	return f.peak, f.Spill
}
