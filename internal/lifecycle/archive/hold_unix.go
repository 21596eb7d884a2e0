//go:build darwin || linux

package archive

import (
	"errors"
	"os"
	"syscall"
)

// hold locks a file until it is closed, or its process ends. Where the file system has no locks it does not.
func hold(file *os.File) { _ = lock(file, syscall.LOCK_EX) }

// isHeld reports whether somebody else may hold a file. If not, nobody can until it is closed.
func isHeld(file *os.File) bool { return lock(file, syscall.LOCK_EX|syscall.LOCK_NB) != nil }

func lock(file *os.File, how int) error {
	for {
		if err := syscall.Flock(int(file.Fd()), how); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
