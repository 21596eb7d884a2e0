package pgtest

import (
	"fmt"
	"os"
	"syscall"
	"time"
)

// printCPU prints the CPU time of this process and of those that it has waited for, with theirs: servers and
// programs. The report of a test run shows it beside the time of the package: where it is far less than that
// of all cores, the tests wait.
func printCPU() {
	var all time.Duration
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var used syscall.Rusage
		if syscall.Getrusage(who, &used) != nil {
			return
		}
		all += time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	fmt.Fprintf(os.Stderr, "cpu: %.1f s\n", all.Seconds())
}
