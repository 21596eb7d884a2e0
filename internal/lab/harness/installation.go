package harness

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// The tests of claim C6 watch the resident set and the scratch files of the built binary from outside.
// OUTFLOW_TEST_LONG=1 gives the sizes that the documentation has figures for; the default is a small form of
// each.

// Sized returns the long or the small size.
func Sized(long, small int) int {
	if tier.Long() {
		return long
	}
	return small
}

// Part returns the cases that a run takes: all in long runs, else each n-th from the first one on.
func Part[T any](n int, cases []T) (part []T) {
	if tier.Long() {
		return cases
	}
	for i := 0; i < len(cases); i += n {
		part = append(part, cases[i])
	}
	return part
}

const MiB = 1 << 20

// Installation is an installation with its database and the JetStream that it publishes to.
type Installation struct {
	*Outflow
	Conn *pgx.Conn
	JS   jetstream.JetStream
	URL  string
}

// EnvInt reads a size of a test from the environment, for longer runs.
func EnvInt(t *testing.T, name string, def int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return def
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s=%s: %v", name, text, err)
	}
	return n
}

// Publication is its publication's name.
func (o *Outflow) Publication() string { return o.Slot }

// WriteFile writes a file for this test alone.
func WriteFile(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	Must(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// smoke: only the tests that are not slow run, because a plain go test ./... has to end within Go's limit of
// ten minutes.
var smoke bool

// SkipIfShort marks a test that short runs and a plain go test ./... leave out.
func SkipIfShort(t *testing.T) {
	t.Helper()
	if testing.Short() || smoke {
		t.Skip("slow: OUTFLOW_TEST_E2E=1, -run or scripts/test runs it")
	}
}

var slots atomic.Int64

// SlotName returns a name that no other test uses: slots belong to a whole server, which tests share.
func SlotName(prefix string) string { return fmt.Sprintf("%s_%d", prefix, slots.Add(1)) }

// Install makes a database on a shared server and an installation on it with a stream of its own. Nothing is
// initialised yet.
func Install(t *testing.T, pg *pgserver.Server, natsURL, slot string, settings ...string) (o *Outflow,
	conn *pgx.Conn, url string) {
	t.Helper()
	url = pgtest.Database(t, pg)
	slot = SlotName(slot)
	o = New(t, url, natsURL, slot, settings...)
	o.UseStream(strings.ToUpper(slot))
	return o, Connect(t, url), url
}

// NewInstallation is Install with a connection to JetStream.
func NewInstallation(t *testing.T, pg *pgserver.Server, natsURL, slot string,
	settings ...string) *Installation {
	t.Helper()
	f := &Installation{JS: JetStream(t, natsURL)}
	f.Outflow, f.Conn, f.URL = Install(t, pg, natsURL, slot, settings...)
	return f
}

// RenameDatabase gives its database another name, until the test ends. Nobody else may be connected to it.
func (f *Installation) RenameDatabase(t *testing.T, pg *pgserver.Server) {
	t.Helper()
	name := f.Conn.Config().Database
	now := name + "_moved"
	Must(t, f.Conn.Close(t.Context()))
	admin := Connect(t, pg.URL("postgres"))
	Exec(t, admin, "ALTER DATABASE "+name+" RENAME TO "+now)
	t.Cleanup(func() { // before that of the connection
		_, err := admin.Exec(context.Background(), "ALTER DATABASE "+now+" RENAME TO "+name)
		Must(t, err)
	})
	f.URL = strings.Replace(f.URL, "/"+name, "/"+now, 1)
	f.Set("POSTGRES_URL=" + f.URL)
	f.Conn = Connect(t, f.URL)
}

// UseStream gives it a stream of that name.
func (o *Outflow) UseStream(stream string) {
	o.Stream = stream
	o.Set("STREAM=" + stream)
}
