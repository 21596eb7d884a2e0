//go:build unix

package pgserver

import (
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// identity is the user as whom servers run when this process is root.
type identity struct {
	name     string
	uid, gid int
}

// unprivileged returns nil when this process is not root and can run servers itself.
func unprivileged() (*identity, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(u.Uid)
		gid, gidErr := strconv.Atoi(u.Gid)
		if uidErr == nil && gidErr == nil && uid > 0 {
			return &identity{name, uid, gid}, nil
		}
	}
	return nil, fmt.Errorf("PostgreSQL does not run as root, and there is neither a user postgres nor a " +
		"user nobody here")
}

func (i *identity) credential() *syscall.Credential {
	if i == nil {
		return nil
	}
	return &syscall.Credential{Uid: uint32(i.uid), Gid: uint32(i.gid)}
}

// mayEnter returns an error if the user can't reach what is in dir.
func (i *identity) mayEnter(dir string) error {
	for at := dir; ; at = filepath.Dir(at) {
		info, err := os.Stat(at)
		if err != nil {
			return err
		}
		owner, _ := info.Sys().(*syscall.Stat_t)
		bit := os.FileMode(0o001)
		switch {
		case owner != nil && int(owner.Uid) == i.uid:
			bit = 0o100
		case owner != nil && int(owner.Gid) == i.gid:
			bit = 0o010
		}
		if info.Mode()&bit == 0 {
			return fmt.Errorf("user %s, as whom PostgreSQL must run because this process is root, may not "+
				"enter %s", i.name, at)
		}
		if at == filepath.Dir(at) {
			return nil
		}
	}
}
