//go:build !darwin && !linux

package archive

import "os"

func hold(*os.File) {}

// isHeld says so of each file: nobody can tell here, and none is removed.
func isHeld(*os.File) bool { return true }
