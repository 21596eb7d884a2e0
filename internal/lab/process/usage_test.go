//go:build unix

package process

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/tier"
)

func TestTheStatLineOfAProcessIsParsed(t *testing.T) {
	t.Parallel()
	line := "42 (a b) c) S 7 42 42 0 -1 4194560 9 8 7 6 150 50 3000 1000 20 0 5 0 1 2 3"
	used, waited, parent, ok := parseStat([]byte(line))
	if !ok || used != 2*time.Second || waited != 40*time.Second || parent != 7 {
		t.Errorf("%v, %v, %v, %v", used, waited, parent, ok)
	}
	for _, bad := range []string{"", "42 (a) S 7", strings.Replace(line, " 150 ", " x ", 1)} {
		if _, _, _, ok := parseStat([]byte(bad)); ok {
			t.Errorf("%q is read", bad)
		}
	}
}

func TestThePeakOfAProcessIsParsed(t *testing.T) {
	t.Parallel()
	if n, ok := parsePeak([]byte("Name:\tx\nVmPeak:\t 900 kB\nVmHWM:\t   12345 kB\nVmRSS:\t 1 kB\n")); !ok ||
		n != 12345<<10 {
		t.Errorf("%d, %v", n, ok)
	}
	if _, ok := parsePeak([]byte("Name:\tx\n")); ok {
		t.Error("a peak out of nothing")
	}
}

func TestAProcessIsMeasuredWithItsChildren(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		tier.Missing(t, "linux", "there is no /proc")
	}
	if _, _, parent, ok := CPU(os.Getpid()); !ok || parent != os.Getppid() {
		t.Errorf("our parent is %d, %v", parent, ok)
	}
	if n, ok := Peak(os.Getpid()); !ok || n < 1<<20 {
		t.Errorf("our peak is %d, %v", n, ok)
	}
	if _, ok := TreeCPU(os.Getpid()); !ok {
		t.Error("our tree has no CPU time")
	}
}
