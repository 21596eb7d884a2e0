package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/freeport"
)

// Standby makes a hot standby of a server that runs, from a copy of its folder, and starts it. It follows the
// server through a physical slot of that name, which is made here, with hot_standby_feedback; from PostgreSQL
// 17 on it also synchronises the failover slots. Settings come on top of the server's. The caller removes it.
func (s *Server) Standby(ctx context.Context, name string, settings map[string]string) (*Server, error) {
	standby := &Server{Installation: s.Installation, password: s.password, runAs: s.runAs}
	err := standby.makeDir()
	if err != nil {
		return nil, err
	}
	if err = s.copyRunning(ctx, name, standby); err == nil {
		err = standby.follow(ctx, s, name, settings)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a standby of %v: %w", s.Installation, err), standby.Remove())
	}
	return standby, nil
}

// copyRunning copies the data folder between the start and the end of a backup. The slot keeps the WAL that
// the copy needs.
func (s *Server) copyRunning(ctx context.Context, slot string, to *Server) (err error) {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // ends a backup that was not ended
	begin, end := "pg_backup_start('standby', true)", "pg_backup_stop(false)"
	if s.Installation.Major < 15 {
		begin, end = "pg_start_backup('standby', true, false)", "pg_stop_backup(false, false)"
	}
	for _, sql := range []string{"SELECT pg_create_physical_replication_slot('" + slot + "', true)",
		"SELECT " + begin} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	if err := copyTree(s.data(), to.data(), to.runAs, ofThisServer); err != nil {
		return err
	}
	var label string
	if err := conn.QueryRow(ctx, "SELECT labelfile FROM "+end).Scan(&label); err != nil {
		return err
	}
	return to.write(filepath.Join(to.data(), "backup_label"), label)
}

// ofThisServer tells what of a data folder is not part of a backup: what belongs to the process that runs,
// slots, and the WAL, which comes from the primary.
func ofThisServer(path string) bool {
	switch dir, name := filepath.Split(path); strings.TrimSuffix(dir, "/") {
	case "":
		return strings.HasPrefix(name, "postmaster.")
	case "pg_wal", "pg_replslot", "pg_dynshmem", "pg_notify", "pg_serial", "pg_snapshots", "pg_stat_tmp",
		"pg_subtrans":
		return name != "archive_status" && name != "summaries"
	}
	return false
}

func (s *Server) follow(ctx context.Context, primary *Server, slot string, own map[string]string) error {
	all := map[string]string{
		"primary_conninfo": fmt.Sprintf("host=127.0.0.1 port=%d user=postgres password='%s' "+
			"dbname=postgres application_name=%s", primary.Port, primary.password, slot),
		"primary_slot_name":    slot,
		"hot_standby_feedback": "on",
	}
	if s.Installation.Major >= 17 {
		all["sync_replication_slots"] = "on"
	}
	for name, value := range own {
		all[name] = value
	}
	if err := s.configure(all); err != nil {
		return err
	}
	if err := s.write(filepath.Join(s.data(), "standby.signal"), ""); err != nil {
		return err
	}
	for try := 1; ; try++ {
		var err error
		if s.Port, err = freeport.Port(); err != nil {
			return err
		}
		if err = s.Start(ctx); !errors.Is(err, errPortTaken) || try == portTries {
			return err
		}
	}
}

// Detach lets a standby receive no more WAL.
func (s *Server) Detach(ctx context.Context) error {
	for _, sql := range []string{"ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()"} {
		if err := s.exec(ctx, sql); err != nil {
			return fmt.Errorf("detach the standby: %w", err)
		}
	}
	return nil
}

// Promote makes a standby a primary, and returns when it is one.
func (s *Server) Promote(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return fmt.Errorf("promote: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // it was only asked something
	var done bool
	if err := conn.QueryRow(ctx, "SELECT pg_promote(true, 60)").Scan(&done); err != nil {
		return fmt.Errorf("promote: %w", err)
	}
	if !done {
		return errors.New("promote: the standby is not a primary after a minute")
	}
	return nil
}

// Backup copies the data folder of a server that does not run to a folder that does not exist yet.
func (s *Server) Backup(to string) error {
	if s.PID() != 0 {
		return errors.New("backup: the server runs")
	}
	return copyTree(s.data(), to, s.runAs, func(string) bool { return false })
}

// Restore puts a backup, of this server or of another one of the same major, in the place of the data folder
// of a server that does not run. The settings stay this server's.
func (s *Server) Restore(from string) error {
	if s.PID() != 0 {
		return errors.New("restore: the server runs")
	}
	conf := filepath.Join(s.data(), "postgresql.conf")
	settings, err := os.ReadFile(conf)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(s.data()); err != nil {
		return err
	}
	if err := copyTree(from, s.data(), s.runAs, func(string) bool { return false }); err != nil {
		return err
	}
	return s.write(conf, string(settings))
}

// copyTree copies a data folder, for a user. Files that are gone when they are reached were temporary; skip
// leaves out more.
func copyTree(from, to string, owner *identity, skip func(path string) bool) error {
	block := make([]byte, len(zeros))
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path != from {
			return nil
		}
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if skip(relative) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		target := filepath.Join(to, relative)
		switch {
		case d.IsDir():
			err = os.Mkdir(target, 0o700)
		case d.Type().IsRegular():
			if err = copySparse(path, target, block); errors.Is(err, fs.ErrNotExist) {
				return nil
			}
		default:
			return fmt.Errorf("%s is neither a file nor a folder", path)
		}
		if err == nil && owner != nil {
			err = os.Chown(target, owner.uid, owner.gid)
		}
		return err
	})
}

var zeros [64 << 10]byte

// copySparse copies a file, by blocks of that size, and leaves holes where a block has zeros only: that is
// most of a WAL segment of a new server, which has 16 MB.
func copySparse(from, to string, block []byte) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	var size int64
	for {
		n, err := io.ReadFull(in, block)
		if n > 0 && !bytes.Equal(block[:n], zeros[:n]) {
			if _, err := out.WriteAt(block[:n], size); err != nil {
				return errors.Join(err, out.Close())
			}
		}
		size += int64(n)
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return errors.Join(out.Truncate(size), out.Close()) // it may end with a hole
		case err != nil:
			return errors.Join(err, out.Close())
		}
	}
}
