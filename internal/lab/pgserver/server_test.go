package pgserver

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("OUTFLOW_TEST_OWNER") != "" {
		own()
		return
	}
	goleak.VerifyTestMain(m)
}

// own is the process of TestServerEndsWithItsOwner: it starts a server, says where, and waits to be killed.
func own() {
	s, err := Start(context.Background(), Options{Settings: map[string]string{"fsync": "off"}})
	if err != nil {
		os.Stdout.WriteString("error " + err.Error() + "\n")
		return
	}
	os.Stdout.WriteString(strconv.Itoa(s.PID()) + " " + s.Dir + "\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func start(t *testing.T, o Options) *Server {
	t.Helper()
	if o.Installation.Bin == "" {
		found, err := Find(0)
		if err != nil {
			tier.Missing(t, "postgres", "%v", err)
		}
		o.Installation = found
	}
	o.Settings = map[string]string{"fsync": "off"}
	s, err := Start(t.Context(), o)
	must.Succeed(t, err)
	t.Cleanup(func() {
		if err := s.Remove(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(s.Dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the folder is still there: %v", err)
		}
	})
	return s
}

// query returns the one text value that sql gives.
func query(t *testing.T, url, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	must.Succeed(t, err)
	defer conn.Close(t.Context())
	var value string
	must.Succeed(t, conn.QueryRow(t.Context(), sql).Scan(&value))
	return value
}

func TestEachInstalledMajorStartsAndStops(t *testing.T) {
	all := Installations()
	if len(all) == 0 {
		_, err := Find(0)
		tier.Missing(t, "postgres", "%v", err)
	}
	for _, i := range all {
		t.Run(strconv.Itoa(i.Major), func(t *testing.T) {
			t.Parallel()
			s := start(t, Options{Installation: i})
			url, err := s.CreateDatabase(t.Context(), `odd "name`)
			must.Succeed(t, err)
			got := query(t, s.URL("postgres"), "SELECT current_setting('server_version_num')::int / 10000 "+
				"|| ' ' || current_setting('wal_level')")
			if want := strconv.Itoa(i.Major) + " logical"; got != want {
				t.Errorf("the server is %q, want %q", got, want)
			}
			if got := query(t, url, "SELECT current_database()"); got != `odd "name` {
				t.Errorf("connected to %q", got)
			}
		})
	}
}

// TestServersOfATemplateAreDifferent: several servers of each major begin at once, with no template there
// yet. One of them makes it, all are different systems, and what was cut short before is in nobody's way.
func TestServersOfATemplateAreDifferent(t *testing.T) {
	cache, err := os.MkdirTemp("", "outflow-cache-")
	must.Succeed(t, err)
	t.Cleanup(func() { os.RemoveAll(cache) })
	if err := os.Chmod(cache, 0o755); err != nil { // the servers may run as another user
		t.Fatal(err)
	}
	all := Installations()
	if !tier.Long() {
		all = all[:1]
	}
	t.Setenv("OUTFLOW_CACHE", cache)
	must.Succeed(t, os.MkdirAll(filepath.Join(cache, "initdb", ".making-1", "data"), 0o755))
	systems := make(chan string, 3*len(all))
	t.Run("start", func(t *testing.T) {
		for _, i := range all {
			for range 3 {
				t.Run(strconv.Itoa(i.Major), func(t *testing.T) {
					t.Parallel()
					s := start(t, Options{Installation: i, Trust: true})
					systems <- query(t, s.URL("postgres"),
						"SELECT system_identifier::text FROM pg_control_system()")
				})
			}
		}
	})
	close(systems)
	seen := map[string]bool{}
	for system := range systems {
		if seen[system] {
			t.Errorf("two servers are system %s", system)
		}
		seen[system] = true
	}
	if made, err := filepath.Glob(filepath.Join(cache, "initdb", "[0-9]*")); err != nil ||
		len(made) != len(all) {
		t.Errorf("templates %v, %v; want one for each of %v", made, err, all)
	}
}

func TestServerComesBackAtItsPort(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	port := s.Port
	query(t, s.URL("postgres"), "SELECT pg_create_logical_replication_slot('kept', 'pgoutput')::text")
	for _, end := range []struct {
		name string
		by   func() error
	}{
		{"smart", func() error { return s.Stop("smart") }},
		{"fast", func() error { return s.Stop("fast") }},
		{"immediate", func() error { return s.Stop("immediate") }},
		{"kill", s.Kill},
		{"kill with a client", func() error {
			conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
			if err != nil {
				return err
			}
			defer conn.Close(t.Context())
			return s.Kill()
		}},
	} {
		if err := end.by(); err != nil {
			t.Fatalf("%s: %v", end.name, err)
		}
		if s.PID() != 0 {
			t.Fatalf("%s: the server still runs", end.name)
		}
		if err := s.Start(t.Context()); err != nil {
			t.Fatalf("start after %s: %v", end.name, err)
		}
		if s.Port != port {
			t.Errorf("after %s the port is %d, was %d", end.name, s.Port, port)
		}
		if got := query(t, s.URL("postgres"),
			"SELECT slot_name::text FROM pg_replication_slots"); got != "kept" {
			t.Errorf("after %s the slot is %q", end.name, got)
		}
	}
}

// TestPasswordIsAskedFor: also of a server that was given none, by TCP and by the socket, for which one needs
// the folder besides.
func TestPasswordIsAskedFor(t *testing.T) {
	t.Parallel()
	for _, password := range []string{"", "p@ss/word"} {
		s := start(t, Options{Password: password})
		if got := query(t, s.URL("postgres"), "SELECT 'in'"); got != "in" {
			t.Errorf("got %q", got)
		}
		if info, err := os.Stat(s.Dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("the folder of the socket: %v, %v", info.Mode(), err)
		}
		for _, host := range []string{"127.0.0.1", s.Dir} {
			for _, secret := range []string{"", "wrong"} {
				cfg, err := pgx.ParseConfig(s.URL("postgres"))
				must.Succeed(t, err)
				cfg.Host, cfg.Password = host, secret
				if conn, err := pgx.ConnectConfig(t.Context(), cfg); err == nil {
					conn.Close(t.Context())
					t.Errorf("password %q is let in at %s", secret, host)
				}
			}
		}
	}
}

func TestStartSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	if _, err := Find(0); err != nil {
		tier.Missing(t, "postgres", "%v", err)
	}
	_, err := Start(t.Context(), Options{Settings: map[string]string{"wal_level": "sideways"}})
	if err == nil || !strings.Contains(err.Error(), "sideways") {
		t.Errorf("error %v, want the server's own words", err)
	}
	full := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(full, "mine"), nil, 0o600))
	if _, err := Start(t.Context(), Options{Dir: full}); err == nil ||
		!strings.Contains(err.Error(), "not empty") {
		t.Errorf("error %v for a folder in use", err)
	}
	if _, err := os.Stat(filepath.Join(full, "mine")); err != nil {
		t.Errorf("a folder in use was touched: %v", err)
	}
}

func TestServerEndsWithItsOwner(t *testing.T) {
	if runtime.GOOS != "linux" {
		tier.Missing(t, "linux", "there is no parent-death signal here")
	}
	t.Parallel()
	if _, err := Find(0); err != nil {
		tier.Missing(t, "postgres", "%v", err)
	}
	owner := exec.Command(os.Args[0])
	owner.Env = append(os.Environ(), "OUTFLOW_TEST_OWNER=1")
	owner.Stderr = os.Stderr
	in, err := owner.StdinPipe()
	must.Succeed(t, err)
	defer in.Close()
	out, err := owner.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, owner.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	must.Succeed(t, err)
	first, dir, _ := strings.Cut(strings.TrimSpace(line), " ")
	pid, err := strconv.Atoi(first)
	if err != nil {
		t.Fatal(line)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("the server does not run: %v", err)
	}
	_ = owner.Process.Kill()
	_ = owner.Wait()
	deadline := time.After(3 * time.Minute)
	for alive(pid) {
		select {
		case <-deadline:
			_ = syscall.Kill(pid, syscall.SIGQUIT)
			t.Fatal("the server outlived its owner by 30 s")
		case <-time.After(pollInterval):
		}
	}
}

// alive tells whether the process exists and is more than a zombie that nobody waits for.
func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// A paused server answers nobody, on old connections as on new ones, and goes on as if nothing had been.
func TestAPausedServerAnswersNobody(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	must.Succeed(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	must.Succeed(t, s.Pause())
	answered := make(chan error, 1)
	go func() {
		_, err := conn.Exec(t.Context(), "SELECT 1")
		answered <- err
	}()
	out, err := exec.Command("ps", "-A", "-o", "ppid=,stat=").Output()
	must.Succeed(t, err)
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == strconv.Itoa(s.PID()) && f[1][0] != 'T' &&
			f[1][0] != 'Z' {
			t.Errorf("a process of the server is in state %s", f[1])
		}
	}
	select {
	case err := <-answered:
		t.Errorf("it answered: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	must.Succeed(t, s.Resume())
	if err := <-answered; err != nil {
		t.Error(err)
	}
	if err := s.Resume(); err != nil {
		t.Errorf("twice: %v", err)
	}
	must.Succeed(t, s.Kill())
	if s.Pause() == nil || s.Resume() == nil {
		t.Error("a server that does not run is paused")
	}
}
