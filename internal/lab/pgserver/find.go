package pgserver

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// Oldest and Newest are the PostgreSQL majors that Outflow is made for, both inclusive.
const (
	Oldest = 14
	Newest = 18
)

// Installation is a PostgreSQL server on this machine.
type Installation struct {
	Major   int    // e.g. 17
	Version string // as the server prints it, e.g. "17.10"
	Bin     string // the folder with postgres and initdb

	wished bool // named by OUTFLOW_PG_BIN
	tools  int  // client programs beside the server
	minor  int
}

// Tool returns the path of another program of the installation, such as psql; ok is false if it isn't there.
func (i Installation) Tool(name string) (path string, ok bool) {
	path = filepath.Join(i.Bin, name)
	return path, executable(path)
}

func (i Installation) String() string { return "PostgreSQL " + i.Version + " in " + i.Bin }

// Installations returns the servers of the majors Oldest to Newest that are on this machine, oldest first,
// one for each major: the one that OUTFLOW_PG_BIN names, else the newest minor.
func Installations() []Installation {
	best := map[int]Installation{}
	for _, bin := range candidates() {
		found, err := inspect(bin.dir)
		if err != nil || found.Major < Oldest || found.Major > Newest {
			continue
		}
		found.wished = bin.wished
		if old, ok := best[found.Major]; !ok || better(found, old) {
			best[found.Major] = found
		}
	}
	all := make([]Installation, 0, len(best))
	for _, i := range best {
		all = append(all, i)
	}
	slices.SortFunc(all, func(a, b Installation) int { return cmp.Compare(a.Major, b.Major) })
	return all
}

func better(a, b Installation) bool {
	if a.wished != b.wished {
		return a.wished
	}
	if a.minor != b.minor {
		return a.minor > b.minor
	}
	return a.tools > b.tools
}

// Find returns the installation of a major. For 0 it returns the one that OUTFLOW_PG_BIN names, else the one
// with the most client programs, else the newest. The error is one sentence that says how to install
// PostgreSQL here.
func Find(major int) (Installation, error) { return FindIn(Installations(), major) }

// FindIn is Find among what Installations has found: that starts each server for its version.
func FindIn(all []Installation, major int) (Installation, error) {
	if major != 0 {
		for _, i := range all {
			if i.Major == major {
				return i, nil
			}
		}
		return Installation{}, fmt.Errorf("no PostgreSQL %d found on this machine; install it with: %s",
			major, installCommand(major))
	}
	if len(all) == 0 {
		return Installation{},
			fmt.Errorf("no PostgreSQL %d to %d found on this machine; install one with: %s",
				Oldest, Newest, installCommand(0))
	}
	return slices.MaxFunc(all, func(a, b Installation) int {
		if a.wished != b.wished {
			if a.wished {
				return 1
			}
			return -1
		}
		return cmp.Or(cmp.Compare(a.tools, b.tools), cmp.Compare(a.Major, b.Major))
	}), nil
}

func installCommand(major int) string {
	version := "" // the system's own choice
	if major != 0 {
		version = strconv.Itoa(major)
	}
	_, dnf := exec.LookPath("dnf")
	_, apk := exec.LookPath("apk")
	switch {
	case runtime.GOOS == "darwin":
		return "brew install postgresql@" + cmp.Or(version, "17")
	case dnf == nil:
		return "sudo dnf install postgresql" + version + "-server"
	case apk == nil:
		return "sudo apk add postgresql" + version
	case version != "":
		return "sudo apt-get install postgresql-" + version
	}
	return "sudo apt-get install postgresql"
}

type candidate struct {
	dir    string
	wished bool
}

// candidates lists the folders where a server may be, each once, without looking whether one is there.
func candidates() []candidate {
	var all []candidate
	add := func(wished bool, dirs ...string) {
		for _, dir := range dirs {
			real, err := filepath.EvalSymlinks(dir)
			if err != nil || slices.ContainsFunc(all, func(c candidate) bool { return c.dir == real }) {
				continue
			}
			all = append(all, candidate{real, wished})
		}
	}
	glob := func(patterns ...string) {
		for _, pattern := range patterns {
			dirs, _ := filepath.Glob(pattern) // the only error is a bad pattern
			add(false, dirs...)
		}
	}
	add(true, filepath.SplitList(os.Getenv("OUTFLOW_PG_BIN"))...)
	if path, err := exec.LookPath("postgres"); err == nil {
		// A link such as /usr/local/bin/postgres says nothing about where initdb is.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			add(false, filepath.Dir(real))
		}
	}
	glob("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin",
		"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
		"/Applications/Postgres.app/Contents/Versions/*/bin")
	for _, cache := range caches() {
		dirs, _ := filepath.Glob(filepath.Join(cache, "postgres", "*"))
		for _, dir := range dirs {
			if whole(dir) {
				add(false, filepath.Join(dir, "bin"))
			}
		}
	}
	return all
}

// whole reports whether all of a fetched server is there: one that was cut short is none. scripts/lib.sh asks
// the same.
func whole(dir string) bool {
	has := func(patterns ...string) bool {
		for _, pattern := range patterns {
			files, _ := filepath.Glob(filepath.Join(dir, pattern))
			for _, file := range files {
				if info, err := os.Stat(file); err == nil && info.Size() > 0 {
					return true
				}
			}
		}
		return false
	}
	return has("lib/pgoutput.*", "lib/*/pgoutput.*") && has("share/postgres.bki", "share/*/postgres.bki")
}

// caches lists where scripts/postgres puts what it fetches. For root that is not root's own cache, because
// other users, as whom the servers run then, may not enter root's home.
func caches() []string {
	var dirs []string
	if dir := os.Getenv("OUTFLOW_CACHE"); dir != "" {
		dirs = append(dirs, dir)
	}
	if os.Geteuid() == 0 {
		return append(dirs, "/var/cache/outflow")
	}
	if dir, err := os.UserCacheDir(); err == nil {
		dirs = append(dirs, filepath.Join(dir, "outflow"))
	}
	return dirs
}

// inspect looks at what is installed in bin.
func inspect(bin string) (Installation, error) {
	for _, name := range []string{"initdb", "postgres"} {
		if !executable(filepath.Join(bin, name)) {
			return Installation{}, fmt.Errorf("no %s in %s", name, bin)
		}
	}
	out, err := exec.Command(filepath.Join(bin, "postgres"), "--version").Output()
	if err != nil {
		return Installation{}, fmt.Errorf("%s/postgres --version: %w", bin, err)
	}
	major, minor, version, err := parseVersion(string(out))
	if err != nil {
		return Installation{}, err
	}
	i := Installation{Major: major, Version: version, Bin: bin, minor: minor}
	for _, name := range []string{"psql", "pgbench", "pg_ctl", "pg_dump", "pg_basebackup", "pg_recvlogical",
		"pg_waldump"} {
		if _, ok := i.Tool(name); ok {
			i.tools++
		}
	}
	return i, nil
}

// parseVersion reads what postgres --version prints, e.g. "postgres (PostgreSQL) 15.14 (Debian
// 15.14-0+deb12u1)".
func parseVersion(s string) (major, minor int, version string, err error) {
	_, rest, _ := strings.Cut(s, "(PostgreSQL) ")
	version, _, _ = strings.Cut(strings.TrimSpace(rest), " ")
	left, right, _ := strings.Cut(version, ".")
	if major, err = strconv.Atoi(left); err != nil { // also a beta such as 19beta1: not a release
		return 0, 0, "", fmt.Errorf("can't read a version in %q", strings.TrimSpace(s))
	}
	minor, _ = strconv.Atoi(right)
	return major, minor, version, nil
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}
