package e2e

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// tables makes table and publication by hand, as a restored dump does.
func (g *gapped) tables(conn *pgx.Conn) {
	sql, errOut, code := g.exec("init", "--print", "--postgres.url", conn.Config().ConnString())
	if code != 0 {
		g.t.Fatalf("outflow init --print: exit code %d\n%s", code, errOut)
	}
	mustExec(g.t, conn, sql)
}

// reconnect connects again, after the server was away.
func (g *gapped) reconnect() { g.conn = db(g.t, g.url) }

// database is the name of the outbox's.
func (g *gapped) database() string { return pgx.Identifier{g.conn.Config().Database}.Sanitize() }

// restored puts the data folder back as it was before n rows were published, and writes as many rows to it then.
func (g *gapped) restored(published, rows int) {
	must(g.t, g.pg.Stop("fast"))
	backup := filepath.Join(g.pg.Dir, "backup")
	must(g.t, g.pg.Backup(backup))
	must(g.t, g.pg.Start(g.t.Context()))
	g.reconnect()
	g.start()
	g.write(published)
	awaitMessages(g.t, g.js, g.stream, 21+published)
	if code := g.term(); code != 0 {
		g.t.Fatalf("stop: exit code %d", code)
	}
	g.log.Reset()
	must(g.t, g.pg.Stop("fast"))
	must(g.t, g.pg.Restore(backup))
	must(g.t, g.pg.Start(g.t.Context()))
	g.reconnect()
	if rows > 0 {
		g.write(rows)
	}
}

// ownServer makes the server the test's own.
var ownServer = []string{"log_checkpoints=off"}

// Another server, another database, or an older one, behind the same address.
var serverGaps = []gapCase{
	{name: "another cluster at the same address", settings: ownServer, code: "system_changed", says: []string{"system identifier", "another database cluster"},
		init: true, smash: func(g *gapped) {
			other := pgtest.Own(g.t, 0)
			url, err := other.CreateDatabase(g.t.Context(), g.conn.Config().Database)
			must(g.t, err)
			conn := db(g.t, url)
			g.tables(conn)
			mustExec(g.t, conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", g.slot)
			for _, s := range []interface{ Stop(string) error }{g.pg, other} {
				must(g.t, s.Stop("fast"))
			}
			backup := filepath.Join(other.Dir, "backup")
			must(g.t, other.Backup(backup))
			must(g.t, g.pg.Restore(backup))
			must(g.t, g.pg.Start(g.t.Context()))
		}},
	{name: "database made anew under the same name", settings: ownServer, code: "slot_missing", says: []string{"does not exist"}, whole: true, init: true,
		smash: func(g *gapped) {
			name := g.database()
			must(g.t, g.conn.Close(g.t.Context()))
			admin := db(g.t, g.pg.URL("postgres"))
			mustExec(g.t, admin, "DROP DATABASE "+name)
			mustExec(g.t, admin, "CREATE DATABASE "+name)
			g.reconnect()
			g.tables(g.conn)
		}},
	{name: "another database renamed to the name", settings: ownServer, code: "slot_database", says: []string{"belongs to database"}, whole: true,
		smash: func(g *gapped) {
			name := g.database()
			must(g.t, g.conn.Close(g.t.Context()))
			admin := db(g.t, g.pg.URL("postgres"))
			mustExec(g.t, admin, "ALTER DATABASE "+name+" RENAME TO aside")
			mustExec(g.t, admin, "CREATE DATABASE "+name)
			g.reconnect()
			g.tables(g.conn)
		}},
	{name: "restored from an older backup", settings: ownServer, code: "server_behind", says: []string{"restored from an older copy"}, init: true,
		smash: func(g *gapped) { g.restored(200, 0) }},
	{name: "restored from an older backup and written to", settings: ownServer, code: "divergence", says: []string{"was not made from this WAL"},
		smash: func(g *gapped) { g.restored(20, 60) }},
}

// TestEmptyDatabase: the server that answers has the database, but not the table. Neither run nor init takes it for a new installation.
func TestEmptyDatabase(t *testing.T) {
	slow(t)
	t.Parallel()
	g := startGap(t, &gapCase{settings: ownServer})
	if code := g.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	name := g.database()
	must(t, g.conn.Close(t.Context()))
	admin := db(t, g.pg.URL("postgres"))
	mustExec(t, admin, "DROP DATABASE "+name)
	mustExec(t, admin, "CREATE DATABASE "+name)
	g.sum = g.digest()
	g.fails(3, []string{"run"}, "outbox", "outflow init")
	g.fails(4, []string{"init"}, "replication slot "+g.slot+" does not exist", "LSN range")
	if strings.Contains(g.log.String(), "slot "+g.slot+" at") || g.digest() != g.sum {
		t.Error("init began anew")
	}
}
