package maintenance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// wholeInstallations are those that OUTFLOW_TEST_PG_UPGRADE names, folders with all of PostgreSQL's programs,
// which the servers that the tests otherwise use need not have, and those of other majors that are installed
// whole; oldest first.
func wholeInstallations(t *testing.T) []pgserver.Installation {
	t.Helper()
	const name = "OUTFLOW_TEST_PG_UPGRADE"
	list := filepath.SplitList(os.Getenv(name))
	if len(list) == 0 {
		tier.Missing(t, "pg_upgrade", "pg_upgrade needs all programs of two majors: "+
			"%s=/usr/lib/postgresql/15/bin:/usr/lib/postgresql/17/bin", name)
	}
	all := make([]pgserver.Installation, len(list))
	for i, dir := range list {
		bin, err := filepath.EvalSymlinks(dir)
		harness.Must(t, err)
		out, err := exec.Command(filepath.Join(bin, "postgres"), "--version").Output()
		harness.Must(t, err)
		version := regexp.MustCompile(`(\d+)\.\d+`).FindStringSubmatch(string(out))
		if version == nil {
			t.Fatalf("%s: %q", bin, out)
		}
		major, err := strconv.Atoi(version[1])
		harness.Must(t, err)
		all[i] = pgserver.Installation{Major: major, Version: version[0], Bin: bin}
	}
	for _, i := range pgserver.Installations() {
		_, whole := i.Tool("pg_upgrade")
		if whole && !slices.ContainsFunc(all, func(o pgserver.Installation) bool {
			return o.Major == i.Major
		}) {
			all = append(all, i)
		}
	}
	slices.SortFunc(all, func(a, b pgserver.Installation) int { return a.Major - b.Major })
	return all
}

func data(s *pgserver.Server) string { return filepath.Join(s.Dir, "data") }

// as makes a command run as the owner of a server's folder, in that folder.
func as(t *testing.T, s *pgserver.Server, program string, args ...string) *exec.Cmd {
	t.Helper()
	info, err := os.Stat(data(s))
	harness.Must(t, err)
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Dir = s.Dir
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stat.Uid, Gid: stat.Gid}}
	}
	return cmd
}

// newer starts an empty server of another installation, with the defaults of its major.
func newer(t *testing.T, i pgserver.Installation, settings map[string]string) *pgserver.Server {
	t.Helper()
	s, err := pgserver.Start(t.Context(), pgserver.Options{Installation: i, Settings: settings})
	harness.Must(t, err)
	t.Cleanup(func() {
		if err := s.Remove(); err != nil {
			t.Errorf("remove the server: %v", err)
		}
	})
	return s
}

// pgUpgrade runs pg_upgrade from one stopped server to another, which is empty and stopped.
func pgUpgrade(t *testing.T, from, to *pgserver.Server, args ...string) (string, error) {
	t.Helper()
	out, err := as(t, to, filepath.Join(to.Installation.Bin, "pg_upgrade"), append([]string{
		"-b", from.Installation.Bin, "-B", to.Installation.Bin, "-d", data(from), "-D", data(to),
		"-p", strconv.Itoa(from.Port), "-P", strconv.Itoa(to.Port), "-s", to.Dir, "-U", "postgres",
	}, args...)...).CombinedOutput()
	return string(out), err
}

// TestPGUpgradeLosesNothing upgrades PostgreSQL to another major between two parts of the load, step by step
// as docs/upgrades.md says.
func TestPGUpgradeLosesNothing(t *testing.T) {
	all := wholeInstallations(t)
	for i := range len(all) - 1 {
		from, to := all[i], all[i+1]
		t.Run(fmt.Sprintf("%d to %d", from.Major, to.Major), func(t *testing.T) {
			t.Parallel()
			testPGUpgrade(t, from, to)
		})
	}
}

func testPGUpgrade(t *testing.T, from, to pgserver.Installation) {
	settings := map[string]string{"fsync": "off", "track_commit_timestamp": "on"}
	pg := newer(t, from, settings)
	if to.Major >= 18 { // whose initdb turns checksums on
		harness.Must(t, pg.Stop("fast"))
		out, err := as(t, pg, filepath.Join(from.Bin, "pg_checksums"), "--enable", "-D",
			data(pg)).CombinedOutput()
		if err != nil {
			t.Fatalf("pg_checksums: %v\n%s", err, out)
		}
		harness.Must(t, pg.Start(t.Context()))
	}
	url, err := pg.CreateDatabase(t.Context(), "app")
	harness.Must(t, err)
	const ops = 6000
	all := harness.RecordedOps(t, ops)
	ns := natstest.Process(t)
	o := harness.New(t, url, ns.URL(), "upgraded")
	o.Init()
	o.Start()
	harness.StartLoad(t, url, all[:ops/2], 8, 2000, 5).Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, ops/2)
	// The order is judged here: pg_upgrade leaves the commit timestamps behind.
	(&planned{t: t, Outflow: o, conn: harness.Connect(t, url), natsURL: ns.URL()}).complete()

	// 1. The writers are stopped. 2. Outflow is stopped, with something left to publish. 3. Drain.
	o.MustStop(t)
	harness.StartLoad(t, url, all[ops/2:ops/2+100], 1, 0, 6).Wait(t)
	next := newer(t, to, settings)
	if from.Major >= 17 { // slots are taken along, but only such as have nothing left
		harness.Must(t, pg.Stop("fast"))
		harness.Must(t, next.Stop("fast"))
		out, err := pgUpgrade(t, pg, next, "--check")
		if err == nil || !strings.Contains(out, "slot") {
			t.Errorf("pg_upgrade --check before the drain: %v\n%s", err, out)
		}
		harness.Must(t, pg.Start(t.Context()))
	}
	if r := o.Drain(); r.Sequence != ops/2+100 {
		t.Errorf("drained %d messages, want %d", r.Sequence, ops/2+100)
	}

	// 4. pg_upgrade. 5. The new server.
	harness.Must(t, pg.Stop("fast"))
	harness.Must(t, next.Stop("fast"))
	if out, err := pgUpgrade(t, pg, next, "--no-sync"); err != nil {
		t.Fatalf("pg_upgrade: %v\n%s", err, out)
	}
	harness.Must(t, next.Start(t.Context()))
	url = next.URL("app")
	o.Set("POSTGRES_URL=" + url)
	o.MustFailInGap("system_changed", "run")

	// Somebody did not wait and writes already.
	harness.StartLoad(t, url, all[ops/2+100:ops/2+400], 4, 0, 7).Wait(t)
	// 6. The new system is accepted. 7. Outflow runs, the writers write.
	mustAccept(o, "system_changed")
	o.Start()
	harness.StartLoad(t, url, all[ops/2+400:], 8, 2000, 8).Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, ops)
	conn := harness.Connect(t, url)
	o.MustBeComplete(conn, ns.URL())
	o.Kill()
	o.Start() // also after a crash
	harness.Insert(t, conn, "last", 1, "{}")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, ops+1)
	o.MustStop(t)
	v := o.MustBeComplete(conn, ns.URL())
	t.Log(v.String())
}

// mustAccept runs outflow repair, which must succeed.
func mustAccept(o *harness.Outflow, code string) {
	o.T.Helper()
	out := o.MustRun("repair", "--accept", code)
	o.T.Logf("outflow repair --accept %s:\n%s", code, out)
}
