package pgserver

import (
	"fmt"
	"path/filepath"
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
