package pgserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// settings of every server of ours, unless Options say otherwise.
var settings = map[string]string{
	"wal_level":             "logical",
	"max_replication_slots": "200",
	"max_wal_senders":       "200",
	"max_connections":       "200",
	"listen_addresses":      "127.0.0.1",
	"log_line_prefix":       "%m [%p] %a ",
	// in the data folder, which goes with the server: a killed one leaves others where they are
	"dynamic_shared_memory_type": "mmap",
}

func (s *Server) data() string    { return filepath.Join(s.Dir, "data") }
func (s *Server) logPath() string { return filepath.Join(s.Dir, "log") }

// makeDir makes the server's folder, owned by the user as whom it runs.
func (s *Server) makeDir() error {
	if s.Dir == "" {
		dir, err := os.MkdirTemp("", fmt.Sprintf("outflow-pg-%d-", os.Getpid()))
		if err != nil {
			return err
		}
		s.Dir = dir
	}
	dir, err := filepath.Abs(s.Dir)
	if err != nil {
		return err
	}
	s.Dir = dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if there, err := os.ReadDir(dir); err != nil || len(there) > 0 {
		return cmp.Or(err, fmt.Errorf("the folder for a PostgreSQL server, %s, is not empty", dir))
	}
	if s.runAs == nil {
		return nil
	}
	if err := s.runAs.mayEnter(filepath.Dir(dir)); err != nil {
		return err
	}
	return os.Chown(dir, s.runAs.uid, s.runAs.gid)
}

// initdb makes the database cluster.
func (s *Server) initdb(ctx context.Context, own map[string]string) error {
	args := []string{"-D", s.data(), "-U", "postgres", "-E", "UTF8", "--no-locale", "--no-sync"}
	if s.password == "" {
		if s.fromTemplate(ctx) == nil {
			return s.configure(own)
		}
		args = append(args, "--auth", "trust") // a cache that can't be written to costs time only
	} else {
		file := filepath.Join(s.Dir, "password")
		if err := s.write(file, s.password+"\n"); err != nil {
			return err
		}
		defer os.Remove(file)
		args = append(args, "--auth", "scram-sha-256", "--pwfile", file)
	}
	if out, err := s.command(ctx, "initdb", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("initdb of %v: %w\n%s", s.Installation, s.explain(err), tail(string(out)))
	}
	return s.configure(own)
}

func (s *Server) configure(own map[string]string) error {
	all := maps.Clone(settings)
	// The path of a socket may have about 100 bytes; TCP is there in any case.
	all["unix_socket_directories"] = ""
	if len(s.Dir) < 80 {
		all["unix_socket_directories"] = s.Dir
	}
	maps.Copy(all, own)
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&b, "%s = '%s'\n", name, strings.ReplaceAll(all[name], "'", "''"))
	}
	path := filepath.Join(s.data(), "postgresql.conf")
	conf, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return s.write(path, string(conf)+b.String())
}

func (s *Server) write(path, content string) error {
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		return err
	}
	if s.runAs == nil {
		return nil
	}
	return os.Chown(path, s.runAs.uid, s.runAs.gid)
}

// command prepares a program of the installation, as the right user and without what this process's
// environment says about other servers.
func (s *Server) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(s.Installation.Bin, name), args...)
	cmd.Dir = s.Dir
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "PG") && !strings.HasPrefix(kv, "LC_") && !strings.HasPrefix(kv, "LANG") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	// With LD_BIND_NOW symbols are looked up once, by the postmaster: each backend, a fork of it, would do so
	// again for those that only backends use.
	cmd.Env = append(cmd.Env, "LC_ALL=C", "TZ=UTC", "LD_BIND_NOW=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.runAs.credential()}
	return cmd
}

// explain adds what a bare "permission denied" doesn't tell.
func (s *Server) explain(err error) error {
	if s.runAs != nil && errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w (the server runs as user %s, who must be able to read %s)", err, s.runAs.name,
			s.Installation.Bin)
	}
	return err
}
