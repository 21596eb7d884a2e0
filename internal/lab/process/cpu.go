//go:build unix

package process

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// tick is the unit of times in /proc: USER_HZ, which is 100 on every machine that Go runs on.
const tick = 10 * time.Millisecond

// CPU returns what a process has used, and what its children had that it has waited for. ok is false where
// there is no /proc, or no such process.
func CPU(pid int) (used, waited time.Duration, parent int, ok bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, 0, false
	}
	return parseStat(stat)
}

// parseStat reads a line of /proc/PID/stat.
func parseStat(stat []byte) (used, waited time.Duration, parent int, ok bool) {
	at := bytes.LastIndexByte(stat, ')') // the name before it may hold anything
	fields := bytes.Fields(stat[at+1:])
	if at < 0 || len(fields) < 15 {
		return 0, 0, 0, false
	}
	number := func(i int) time.Duration { // i as in proc(5), where the name is field 2
		n, err := strconv.ParseInt(string(fields[i-3]), 10, 64)
		ok = ok && err == nil
		return time.Duration(n)
	}
	ok = true
	parent = int(number(4))
	used = (number(14) + number(15)) * tick
	waited = (number(16) + number(17)) * tick
	return used, waited, parent, ok
}

// TreeCPU returns what a process and its children have used, those that have ended too. It is meant for a
// PostgreSQL server, whose processes are all children of one.
func TreeCPU(root int) (total time.Duration, ok bool) {
	for range 100 {
		used, waited, _, ok := CPU(root)
		if !ok {
			return 0, false
		}
		children := childrenCPU(root)
		// A child that ended meanwhile would be counted twice, or not at all.
		if _, after, _, ok := CPU(root); ok && after == waited {
			return used + waited + children, true
		}
	}
	return 0, false
}

// childrenCPU returns what the children of a process have used that it has not waited for yet.
func childrenCPU(root int) (total time.Duration) {
	all, _ := filepath.Glob("/proc/[0-9]*") // the only error is a bad pattern
	for _, dir := range all {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		if used, waited, parent, ok := CPU(pid); ok && parent == root {
			total += used + waited
		}
	}
	return total
}
