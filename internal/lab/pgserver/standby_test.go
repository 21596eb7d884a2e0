package pgserver

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// awaited polls until sql gives want.
func awaited(t *testing.T, url, sql, want string) {
	t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for {
		got := query(t, url, sql)
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %q, want %q", sql, got, want)
		}
		time.Sleep(pollInterval)
	}
}

func standbyOf(t *testing.T, s *Server) *Server {
	t.Helper()
	standby, err := s.Standby(t.Context(), "standby", nil)
	must.Succeed(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(tail(standby.Log()))
		}
		if err := standby.Remove(); err != nil {
			t.Error(err)
		}
	})
	return standby
}

func TestAStandbyFollowsAndIsPromoted(t *testing.T) {
	all := Installations()
	for n, i := range all {
		if n > 0 && n < len(all)-1 {
			continue // the oldest is made in another way, the newest synchronises slots
		}
		t.Run(strconv.Itoa(i.Major), func(t *testing.T) {
			t.Parallel()
			s := start(t, Options{Installation: i})
			ctx := t.Context()
			exec := func(sql string) {
				t.Helper()
				must.Succeed(t, s.exec(ctx, sql))
			}
			exec("CREATE TABLE t AS SELECT 1 AS n")
			standby := standbyOf(t, s)
			exec("INSERT INTO t VALUES (2)")
			const count = "SELECT count(*)::text FROM t"
			awaited(t, standby.URL("postgres"), count, "2")
			must.Succeed(t, standby.Detach(ctx))
			awaited(t, s.URL("postgres"), "SELECT count(*)::text FROM pg_stat_replication", "0")
			exec("INSERT INTO t VALUES (3)")
			must.Succeed(t, standby.Promote(ctx))
			if got := query(t, standby.URL("postgres"), count); got != "2" {
				t.Errorf("%s rows after a promotion without the last commit", got)
			}
			if err := standby.exec(ctx, "INSERT INTO t VALUES (4)"); err != nil {
				t.Error(err)
			}
			if a, b := query(t, s.URL("postgres"), "SELECT system_identifier::text FROM pg_control_system()"),
				query(t, standby.URL("postgres"),
					"SELECT system_identifier::text FROM pg_control_system()"); a != b {
				t.Errorf("system identifiers %s and %s", a, b)
			}
		})
	}
}

func TestABackupIsRestoredAsItWas(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	backup := filepath.Join(s.Dir, "backup")
	if err := s.Backup(backup); err == nil {
		t.Error("a server that runs was copied")
	}
	for n := range 2 {
		must.Succeed(t, s.exec(t.Context(), fmt.Sprintf("CREATE TABLE t%d ()", n)))
		must.Succeed(t, s.Stop("fast"))
		if n == 0 {
			must.Succeed(t, s.Backup(backup))
		} else if err := s.Restore(backup); err != nil {
			t.Fatal(err)
		}
		must.Succeed(t, s.Start(t.Context()))
	}
	if got := query(t, s.URL("postgres"),
		"SELECT string_agg(relname, ' ') FROM pg_class WHERE relname LIKE 't_'"); got != "t0" {
		t.Errorf("tables after the restore: %s", got)
	}
}

func TestACopyWithHolesHasTheSameBytes(t *testing.T) {
	t.Parallel()
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	n := len(zeros)
	want := map[string][]byte{
		"empty": {}, "short": []byte("a"), "a hole": zeros[:n-1],
		"begins with one":   append(zeros[:n:n], 'b'),
		"ends with one":     append([]byte("a"), zeros[:]...),
		"one in the middle": slices.Concat([]byte("a"), zeros[:], zeros[:], []byte("b"), zeros[:9]),
	}
	for name, content := range want {
		must.Succeed(t, os.WriteFile(filepath.Join(from, name), content, 0o600))
	}
	must.Succeed(t, copyTree(from, to, nil, func(string) bool { return false }))
	for name, content := range want {
		if got, err := os.ReadFile(filepath.Join(to, name)); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: %d bytes for %d, %v", name, len(got), len(content), err)
		}
	}
}
