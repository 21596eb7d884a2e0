package doctor

import "golang.org/x/sys/unix"

// space is what a folder's file system has left, and whether that is in memory.
func space(dir string) (free uint64, memory bool) {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil {
		return 0, false
	}
	return s.Bavail * uint64(s.Bsize), s.Type == unix.TMPFS_MAGIC || s.Type == unix.RAMFS_MAGIC
}
