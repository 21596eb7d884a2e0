//go:build !linux

package doctor

import "golang.org/x/sys/unix"

// space is what a folder's file system has left. Whether it is in memory is not known here.
func space(dir string) (free uint64, memory bool) {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil {
		return 0, false
	}
	return uint64(s.Bavail) * uint64(s.Bsize), false
}
