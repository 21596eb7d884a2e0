//go:build unix && !linux

package process

import "syscall"

// There is no parent-death signal here: a child outlives a parent that is killed with kill -9.
func dieWithParent(*syscall.SysProcAttr, syscall.Signal) {}
