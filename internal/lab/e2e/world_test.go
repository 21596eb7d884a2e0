package e2e

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// smoke: only the tests that are not slow run, because a plain go test ./... has to end within Go's limit of ten minutes.
var smoke bool

// slow marks a test that short runs and a plain go test ./... leave out.
func slow(t *testing.T) {
	t.Helper()
	if testing.Short() || smoke {
		t.Skip("slow: OUTFLOW_TEST_E2E=1, -run or scripts/test runs it")
	}
}

var slots atomic.Int64

// slotName returns a name that no other test uses: slots belong to a whole server, which tests share.
func slotName(prefix string) string { return fmt.Sprintf("%s_%d", prefix, slots.Add(1)) }

// installation makes a database on a shared server and an installation on it with a stream of its own. Nothing is initialised yet.
func installation(t *testing.T, pg *pgserver.Server, natsURL, slot string, settings ...string) (o *outflow, conn *pgx.Conn, url string) {
	t.Helper()
	url = pgtest.Database(t, pg)
	slot = slotName(slot)
	o = newOutflow(t, url, natsURL, slot, settings...)
	o.named(strings.ToUpper(slot))
	return o, db(t, url), url
}

// named gives it a stream of that name.
func (o *outflow) named(stream string) {
	o.stream = stream
	o.set("STREAM=" + stream)
}

// sample makes it use one of the documented configuration files.
func (o *outflow) sample(t *testing.T, name, stream string) {
	t.Helper()
	file, err := filepath.Abs(filepath.Join("..", "..", "..", "docs", "samples", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	o.set("CONFIG=" + file)
	o.stream = stream
}

// fails runs a command that must end with an exit code and say certain things on standard error.
func (o *outflow) fails(code int, args []string, says ...string) {
	o.t.Helper()
	wanted := func(stderr string) bool {
		return (code == 1 || code == 3) && !slices.ContainsFunc(says, func(s string) bool { return !strings.Contains(stderr, s) })
	}
	out, errOut, got := o.execUntil(wanted, args...)
	if got != code {
		o.t.Errorf("outflow %v: exit code %d, want %d\n%s%s", args, got, code, out, errOut)
	}
	o.mustSay(fmt.Sprintf("outflow %v", args), errOut, says...)
}

// ends waits for the end of outflow run, which must have an exit code and say certain things last.
func (o *outflow) ends(code int, says ...string) {
	o.t.Helper()
	if got := o.wait(); got != code {
		o.t.Errorf("outflow run: exit code %d, want %d", got, code)
	}
	lines := strings.Split(strings.TrimSpace(o.log.String()), "\n")
	o.mustSay("outflow run", lines[len(lines)-1], says...)
}

func (o *outflow) mustSay(who, text string, says ...string) {
	o.t.Helper()
	for _, s := range says {
		if !strings.Contains(text, s) {
			o.t.Errorf("%s does not say %q:\n%s", who, s, text)
		}
	}
}

// row inserts a row of the default shape, with another key each time.
func row(t *testing.T, conn *pgx.Conn, doc string, counter int, payload string) {
	t.Helper()
	mustExec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, 'anna', $2, $3)", doc, counter, payload)
}

// subjects returns the subjects of messages.
func subjects(all []*oracle.Message) []string {
	out := make([]string, len(all))
	for i, m := range all {
		out[i] = m.Subject
	}
	return out
}

// mustBeComplete compares stream and table.
func (o *outflow) mustBeComplete(conn *pgx.Conn, natsURL string) oracle.Verdict {
	o.t.Helper()
	v, err := oracle.Compare(o.t.Context(), conn, "outbox", js(o.t, natsURL), o.stream, 0)
	if err != nil {
		o.t.Fatal(err)
	}
	if !v.OK() {
		o.t.Errorf("stream and table differ: %s", v.String())
	}
	return v
}
