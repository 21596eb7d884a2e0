package decoder

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
)

var update = flag.Bool("update", false, "keep what the servers that OUTFLOW_TEST_PG asks for send; golden "+
	"files are written where they are absent")

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// capture is what a server sent for a scenario.
type capture struct {
	Scenario string   `json:"scenario"`
	Binary   bool     `json:"binary"`
	TableOID uint32   `json:"table_oid"`
	Messages [][]byte `json:"messages"`
}

// captures are those of one server, as testdata keeps them.
type captures struct {
	Version  string    `json:"version"`
	Captures []capture `json:"captures"`
}

// TestRealServersSendTheScenarios plays the scenarios on real servers. With -update it keeps what they sent,
// for the tests that need no server.
func TestRealServersSendTheScenarios(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, s *pgserver.Server) {
		all := captures{Version: s.Installation.Version}
		for _, sc := range scenarios {
			if s.Installation.Major < sc.since {
				continue
			}
			t.Run(sc.name, func(t *testing.T) {
				conn := connect(t, pgtest.Database(t, s))
				play(t, conn, sc)
				for _, binary := range []bool{false, true} {
					c := capture{sc.name, binary, tableOf(t, conn), peek(t, conn, binary)}
					checkGolden(t, c)
					all.Captures = append(all.Captures, c)
				}
			})
		}
		if *update && !t.Failed() {
			all.write(t, fmt.Sprintf("testdata/postgres-%d.json.gz", s.Installation.Major))
		}
	})
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Close(t.Context()) })
	// As the replication session pins them.
	exec(t, conn, `SET DateStyle = ISO; SET IntervalStyle = postgres; SET TimeZone = UTC;
		SET bytea_output = hex;
		SET extra_float_digits = 3; SET client_encoding = UTF8`)
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	var err error
	if head, data, ok := strings.Cut(sql, "\n"); ok && strings.HasPrefix(sql, "COPY") {
		_, err = conn.PgConn().CopyFrom(t.Context(), strings.NewReader(data), head)
	} else {
		_, err = conn.PgConn().Exec(t.Context(), sql).ReadAll()
	}
	if err != nil {
		t.Fatalf("%.200s: %v", sql, err)
	}
}

// slotName makes slots unique: they belong to the whole server, and tests share it.
const slotName = "'capture_' || current_database()"

func play(t *testing.T, conn *pgx.Conn, sc scenario) {
	t.Helper()
	exec(t, conn, sc.setup)
	options := "publish_via_partition_root = true"
	if sc.publish != "" {
		options += ", " + sc.publish
	}
	exec(t, conn, "CREATE PUBLICATION capture FOR ALL TABLES WITH ("+options+")")
	exec(t, conn, "SELECT pg_create_logical_replication_slot("+slotName+", 'pgoutput')")
	exec(t, conn, "CREATE FUNCTION outbox_oid() RETURNS oid STABLE LANGUAGE sql AS $$ SELECT "+oidOf(t, conn)+
		"::oid $$")
	for _, step := range sc.steps {
		exec(t, conn, step)
	}
}

func oidOf(t *testing.T, conn *pgx.Conn) (oid string) {
	t.Helper()
	must.Succeed(t, conn.QueryRow(t.Context(), "SELECT 'outbox'::regclass::oid::text").Scan(&oid))
	return oid
}

// tableOf gives the OID that the outbox had when the slot was made; scenarios rename it.
func tableOf(t *testing.T, conn *pgx.Conn) (oid uint32) {
	t.Helper()
	must.Succeed(t, conn.QueryRow(t.Context(), "SELECT outbox_oid()").Scan(&oid))
	return oid
}

// peek gives the messages that a session would receive, without consuming them.
func peek(t *testing.T, conn *pgx.Conn, binary bool) (msgs [][]byte) {
	t.Helper()
	rows, err := conn.Query(t.Context(), "SELECT data FROM pg_logical_slot_peek_binary_changes("+slotName+`, NULL, NULL,
		'proto_version', '1', 'publication_names', 'capture', 'messages', 'true', 'binary', $1)`, fmt.Sprint(binary))
	must.Succeed(t, err)
	msgs, err = pgx.CollectRows(rows, pgx.RowTo[[]byte])
	must.Succeed(t, err)
	return msgs
}

func scenarioOf(t testing.TB, name string) scenario {
	t.Helper()
	for _, sc := range scenarios {
		if sc.name == name {
			return sc
		}
	}
	t.Fatalf("no scenario %q", name)
	return scenario{}
}

// config is the configuration with which a capture is read.
func (c capture) config(t testing.TB) Config {
	cfg := scenarioOf(t, c.Scenario).config
	cfg.TableOID = c.TableOID
	return cfg
}

// checkGolden compares a capture's events and inputs with what they are on every server and in either form.
func checkGolden(t *testing.T, c capture) {
	t.Helper()
	results, err := decodeAll(c.config(t), c.Messages...)
	must.Succeed(t, err)
	if scenarioOf(t, c.Scenario).events == "" {
		return
	}
	got := transcript(results)
	path := filepath.Join("testdata", scenarioOf(t, c.Scenario).events+".golden")
	want, err := os.ReadFile(path)
	if *update && errors.Is(err, os.ErrNotExist) {
		want, err = got, os.WriteFile(path, got, 0o644)
	}
	must.Succeed(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("%s, binary %v: not as in %s:\n%s", c.Scenario, c.Binary, path, firstDifference(got, want))
	}
}

func firstDifference(got, want []byte) string {
	g, w := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
	for i := range g {
		if i >= len(w) || g[i] != w[i] {
			return fmt.Sprintf("line %d\ngot  %s\nwant %s", i+1, g[i],
				strings.Join(w[min(i, len(w)):min(i+1, len(w))], ""))
		}
	}
	return fmt.Sprintf("%d lines are missing", len(w)-len(g))
}

// transcript prints what a session brought, without what differs from run to run. Transactions without an
// input are left out: PostgreSQL 14 sends them, later ones do not.
func transcript(results []Result) []byte {
	var b bytes.Buffer
	for _, r := range results {
		switch {
		case r.Malformed != nil:
			fmt.Fprintf(&b, "malformed: %v\n", r.Malformed)
		case r.Kind == Event:
			e := r.Event
			fmt.Fprintf(&b, "%d doc=%q actor=%q key=%q id=%q extra=%q null=%b bad=%q\n  %q\n",
				e.Pos.Index, e.Doc, e.Actor, e.Key, e.ID, e.Extra, e.Null, e.Bad, e.Payload)
		case r.Commit.Kind == relay.Events:
			fmt.Fprintf(&b, "commit of %d events\n\n", r.Commit.Events)
		case r.Commit.Kind == relay.Heartbeat:
			b.WriteString("tick\n\n")
		case r.Commit.Kind == relay.SettingsChange:
			fmt.Fprintf(&b, "settings %v\n\n", r.Commit.Settings)
		}
	}
	return b.Bytes()
}

func (c captures) write(t *testing.T, path string) {
	t.Helper()
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	must.Succeed(t, err)
	if err := errors.Join(json.NewEncoder(w).Encode(c), w.Close(),
		os.WriteFile(path, b.Bytes(), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// load reads the captures of all servers.
func load(t testing.TB) (all []captures) {
	t.Helper()
	paths, err := filepath.Glob("testdata/postgres-*.json.gz")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no captures in testdata: %v", err)
	}
	for _, path := range paths {
		f, err := os.Open(path)
		must.Succeed(t, err)
		r, err := gzip.NewReader(f)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		var c captures
		if err := errors.Join(json.NewDecoder(r).Decode(&c), f.Close()); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		all = append(all, c)
	}
	return all
}
