package repair

import (
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// tables makes table and publication by hand, as a restored dump does.
func (g *gapSetup) tables(conn *pgx.Conn) {
	sql := g.MustRun("init", "--print", "--postgres.url", conn.Config().ConnString())
	harness.Exec(g.T, conn, sql)
}

// reconnect connects again, after the server was away.
func (g *gapSetup) reconnect() { g.conn = harness.Connect(g.T, g.url) }

// database is the name of the outbox's.
func (g *gapSetup) database() string { return pgx.Identifier{g.conn.Config().Database}.Sanitize() }

// restored puts the data folder back as it was before n rows were published, and writes as many rows to it
// then.
func (g *gapSetup) restored(published, rows int) {
	harness.Must(g.T, g.pg.Stop("fast"))
	backup := filepath.Join(g.pg.Dir, "backup")
	harness.Must(g.T, g.pg.Backup(backup))
	harness.Must(g.T, g.pg.Start(g.T.Context()))
	g.reconnect()
	g.Start()
	g.write(published)
	harness.AwaitMessages(g.T, g.js, g.Stream, 21+published)
	g.MustStop(g.T)
	harness.Must(g.T, g.pg.Stop("fast"))
	harness.Must(g.T, g.pg.Restore(backup))
	harness.Must(g.T, g.pg.Start(g.T.Context()))
	g.reconnect()
	if rows > 0 {
		g.write(rows)
	}
}

// ownServer makes the server the test's own.
var ownServer = []string{"log_checkpoints=off"}

// Another server, another database, or an older one, behind the same address.
var serverGaps = []serverGapCase{
	{name: "another cluster at the same address", settings: ownServer, code: "system_changed",
		init: true, damage: func(g *gapSetup) {
			other := pgtest.Own(g.T, 0)
			url, err := other.CreateDatabase(g.T.Context(), g.conn.Config().Database)
			harness.Must(g.T, err)
			conn := harness.Connect(g.T, url)
			g.tables(conn)
			harness.Exec(g.T, conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", g.Slot)
			for _, s := range []interface{ Stop(string) error }{g.pg, other} {
				harness.Must(g.T, s.Stop("fast"))
			}
			backup := filepath.Join(other.Dir, "backup")
			harness.Must(g.T, other.Backup(backup))
			harness.Must(g.T, g.pg.Restore(backup))
			harness.Must(g.T, g.pg.Start(g.T.Context()))
		}},
	{name: "database made anew under the same name", settings: ownServer, code: "slot_missing", whole: true,
		init: true, damage: func(g *gapSetup) {
			name := g.database()
			harness.Must(g.T, g.conn.Close(g.T.Context()))
			admin := harness.Connect(g.T, g.pg.URL("postgres"))
			harness.Exec(g.T, admin, "DROP DATABASE "+name)
			harness.Exec(g.T, admin, "CREATE DATABASE "+name)
			g.reconnect()
			g.tables(g.conn)
		}},
	{name: "another database renamed to the name", settings: ownServer, code: "slot_database", whole: true,
		damage: func(g *gapSetup) {
			name := g.database()
			harness.Must(g.T, g.conn.Close(g.T.Context()))
			admin := harness.Connect(g.T, g.pg.URL("postgres"))
			harness.Exec(g.T, admin, "ALTER DATABASE "+name+" RENAME TO aside")
			harness.Exec(g.T, admin, "CREATE DATABASE "+name)
			g.reconnect()
			g.tables(g.conn)
		}},
	{name: "restored from an older backup", settings: ownServer, code: "server_behind", init: true,
		damage: func(g *gapSetup) { g.restored(200, 0) }},
	{name: "restored from an older backup and written to", settings: ownServer, code: "divergence",
		damage: func(g *gapSetup) { g.restored(20, 60) }},
}

// TestAnEmptyDatabaseIsNotTakenForANewOne: the server that answers has the database, but not the table.
// Neither run nor init takes it for a new installation.
func TestAnEmptyDatabaseIsNotTakenForANewOne(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	g := startGap(t, &serverGapCase{settings: ownServer})
	g.MustStop(t)
	name := g.database()
	harness.Must(t, g.conn.Close(t.Context()))
	admin := harness.Connect(t, g.pg.URL("postgres"))
	harness.Exec(t, admin, "DROP DATABASE "+name)
	harness.Exec(t, admin, "CREATE DATABASE "+name)
	g.sum = g.digest()
	g.MustFail(3, []string{"run"}, "outbox", "outflow init")
	g.MustFailInGap("slot_missing", "init")
	if slots := harness.Value[int](t, admin, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1",
		g.Slot); slots != 0 || g.digest() != g.sum {
		t.Error("init began anew")
	}
}
