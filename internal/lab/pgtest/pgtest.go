// Package pgtest gives tests real PostgreSQL servers: shared ones, started when the first test asks and
// removed after the last, and servers of a test's own to crash. OUTFLOW_TEST_PG says which: "all" for every
// major that Outflow supports, a list of majors such as "15" or "14,18", or nothing for the one that
// OUTFLOW_PG_BIN names, else the newest that is installed. A package that uses it has a TestMain that calls
// Main or wraps its tests in Tests.
package pgtest

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// fsync=off: a crash of PostgreSQL loses nothing that the operating system has, and no test pulls the plug.
// Little shared memory: a server that maps 128 MB takes more than twice as long to start and to make a
// database. The lock tables, which are for each connection, still hold as many locks as those of a server
// with the defaults.
var settings = map[string]string{"fsync": "off", "shared_buffers": "8MB", "wal_buffers": "4MB",
	"max_locks_per_transaction": "20", "max_pred_locks_per_transaction": "10"}

// shared holds a *lazyServer for each major that was asked for.
var shared sync.Map

type lazyServer struct {
	once sync.Once
	s    *pgserver.Server // nil: it did not start
	err  error
}

var installed = sync.OnceValue(pgserver.Installations)

// Main runs the tests, removes the shared servers and ends the process.
func Main(m *testing.M) { os.Exit(Tests(m).Run()) }

// Tests wraps m so that Run removes the shared servers at the end, for
// goleak.VerifyTestMain(pgtest.Tests(m)).
func Tests(m interface{ Run() int }) interface{ Run() int } { return tests{m} }

type tests struct{ m interface{ Run() int } }

func (t tests) Run() int {
	sweep()
	defer printCPU()
	defer removeShared()
	return t.m.Run()
}

func removeShared() {
	var all sync.WaitGroup
	for _, l := range shared.Range {
		all.Go(func() {
			if s := l.(*lazyServer).s; s != nil {
				closeIdle(s)
				if err := s.Remove(); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}
		})
	}
	all.Wait()
	shared.Clear()
}

// Each runs test as a subtest for each major that OUTFLOW_TEST_PG asks for, on the shared server of that
// major. A major that is not installed is a skipped subtest that says so.
func Each(t *testing.T, test func(t *testing.T, s *pgserver.Server)) {
	t.Helper()
	for _, major := range Majors(t) {
		t.Run("postgres-"+strconv.Itoa(major), func(t *testing.T) { test(t, serverOf(t, major)) })
	}
}

// Majors returns the majors that OUTFLOW_TEST_PG asks for, installed or not. It skips the test if PostgreSQL
// is not here at all.
func Majors(t testing.TB) []int {
	t.Helper()
	asked := os.Getenv("OUTFLOW_TEST_PG")
	if asked == "" {
		return []int{best(t).Major}
	}
	var majors []int
	for _, word := range strings.FieldsFunc(asked, func(r rune) bool { return r == ',' || r == ' ' }) {
		if word == "all" {
			for major := pgserver.Oldest; major <= pgserver.Newest; major++ {
				majors = append(majors, major)
			}
			continue
		}
		major, err := strconv.Atoi(word)
		if err != nil {
			t.Fatalf("OUTFLOW_TEST_PG=%q: want all, or majors such as 15 or 14,18", asked)
		}
		majors = append(majors, major)
	}
	slices.Sort(majors)
	return slices.Compact(majors)
}

// Server returns the shared server of the default major: the best one installed among those that
// OUTFLOW_TEST_PG asks for.
func Server(t testing.TB) *pgserver.Server {
	t.Helper()
	return serverOf(t, defaultMajor(t))
}

func defaultMajor(t testing.TB) int {
	t.Helper()
	wanted := best(t).Major
	if majors := Majors(t); !slices.Contains(majors, wanted) {
		return majors[len(majors)-1]
	}
	return wanted
}

// Own starts a server for this test alone, to be stopped, killed and started as it likes, and removes it at
// the end. Major 0 is the default one. Each setting is a line of postgresql.conf such as
// "wal_sender_timeout=4s".
func Own(t testing.TB, major int, settings ...string) *pgserver.Server {
	t.Helper()
	if major == 0 {
		major = defaultMajor(t)
	}
	own := map[string]string{}
	for _, setting := range settings {
		name, value, ok := strings.Cut(setting, "=")
		if !ok {
			t.Fatalf("setting %q: want name=value", setting)
		}
		own[strings.TrimSpace(name)] = strings.TrimSpace(value)
	}
	s, err := start(installation(t, major), own)
	must.Succeed(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("end of the log of %v:\n%s", s.Installation, lastLines(s.Log(), 40))
		}
		if err := s.Remove(); err != nil {
			t.Errorf("remove the server: %v", err)
		}
	})
	return s
}

func serverOf(t testing.TB, major int) *pgserver.Server {
	t.Helper()
	i := installation(t, major)
	entry, _ := shared.LoadOrStore(major, &lazyServer{})
	l := entry.(*lazyServer)
	l.once.Do(func() {
		if l.s, l.err = start(i, nil); l.s != nil {
			idle.Store(l.s, make(chan *pgx.Conn, mostIdle))
		}
	})
	if l.err != nil {
		t.Fatal(l.err)
	}
	return l.s
}

func start(i pgserver.Installation, own map[string]string) (*pgserver.Server, error) {
	all := maps.Clone(settings)
	maps.Copy(all, own)
	s, err := pgserver.Start(context.Background(), pgserver.Options{Installation: i, Settings: all,
		Trust: true})
	fmt.Fprintln(os.Stderr, "postgres:", i.Version) // the report of a test run lists the versions
	return s, err
}

func installation(t testing.TB, major int) pgserver.Installation {
	t.Helper()
	i, err := pgserver.FindIn(installed(), major)
	if err != nil {
		tier.Missing(t, "pg"+strconv.Itoa(major), "%v (or fetch it for the tests alone: scripts/postgres %d)",
			err, major)
	}
	return i
}

// best is the newest server that is here, unless OUTFLOW_PG_BIN names one: a connection costs the PostgreSQL
// 18 of scripts/postgres a quarter less CPU than Debian's 15.
func best(t testing.TB) pgserver.Installation {
	t.Helper()
	all := installed()
	i, err := pgserver.FindIn(all, 0)
	if err != nil {
		tier.Missing(t, "postgres", "%v", err)
	}
	if os.Getenv("OUTFLOW_PG_BIN") == "" {
		i = all[len(all)-1]
	}
	return i
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
