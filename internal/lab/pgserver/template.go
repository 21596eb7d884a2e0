//go:build unix

package pgserver

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// initdb costs a second of computing, and makes the same files each time but for the system identifier. A
// server that asks for no password begins with a copy of what initdb made once, which lies in the cache, by
// version and program.

// fromTemplate makes the data folder from the template, which it makes first if it isn't there.
func (s *Server) fromTemplate(ctx context.Context) error {
	kept := caches()
	if len(kept) == 0 {
		return errors.New("there is no cache")
	}
	program := crc32.ChecksumIEEE([]byte(s.Installation.Bin))
	template := filepath.Join(kept[0], "initdb", fmt.Sprintf("%s-%08x", s.Installation.Version, program))
	if _, err := os.Stat(template); err != nil {
		if err := s.makeTemplate(ctx, template); err != nil {
			return err
		}
	}
	err := copyTree(template, s.data(), s.runAs, func(string) bool { return false })
	if err == nil {
		err = identify(s.data(), rand.Uint64()>>1) // bigint in SQL
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(s.data()))
	}
	return nil
}

// makeTemplate makes it beside its place, and puts it there whole: others may be making it, and none may see
// a half of one.
func (s *Server) makeTemplate(ctx context.Context, template string) error {
	parent := filepath.Dir(template)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	if s.runAs != nil {
		if err := s.runAs.mayEnter(parent); err != nil {
			return err
		}
	}
	work, err := os.MkdirTemp(parent, ".making-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if s.runAs != nil {
		if err := os.Chown(work, s.runAs.uid, s.runAs.gid); err != nil {
			return err
		}
	}
	made := filepath.Join(work, "data")
	// It is synced, unlike a server's own: a machine may lose its power before the files are on its disk.
	out, err := s.command(ctx, "initdb", "-D", made, "-U", "postgres", "-E", "UTF8", "--no-locale", "--auth",
		"trust").CombinedOutput()
	if err != nil {
		return fmt.Errorf("initdb of %v: %w\n%s", s.Installation, s.explain(err), tail(string(out)))
	}
	if err := os.Rename(made, template); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

// identify gives a cluster that has never run a system identifier of its own: in the control file, which ends
// with a checksum of what is before it, and in the first WAL page. Copies with one identifier would pass for
// the same server.
func identify(data string, id uint64) error {
	control := filepath.Join(data, "global", "pg_control")
	content, err := os.ReadFile(control)
	if err != nil {
		return err
	}
	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	end := 8
	for end+4 <= len(content) && binary.NativeEndian.Uint32(content[end:]) != crc32.Checksum(content[:end],
		castagnoli) {
		end += 4
	}
	if end+4 > len(content) {
		return fmt.Errorf("%s has no checksum", control)
	}
	old := binary.NativeEndian.Uint64(content)
	binary.NativeEndian.PutUint64(content, id)
	binary.NativeEndian.PutUint32(content[end:], crc32.Checksum(content[:end], castagnoli))
	if err := os.WriteFile(control, content, 0o600); err != nil {
		return err
	}
	wal, err := os.OpenFile(filepath.Join(data, "pg_wal", "000000010000000000000001"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer wal.Close()
	const at = 24 // behind the short header of the page
	var field [8]byte
	if _, err := wal.ReadAt(field[:], at); err != nil {
		return err
	}
	if found := binary.NativeEndian.Uint64(field[:]); found != old {
		return fmt.Errorf("%s is of system %d, the control file of %d", wal.Name(), found, old)
	}
	binary.NativeEndian.PutUint64(field[:], id)
	_, err = wal.WriteAt(field[:], at)
	return err
}
