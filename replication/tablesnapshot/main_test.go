package tablesnapshot

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/replication/catalog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

var (
	within     = outboxdb.Within
	eventually = outboxdb.Eventually
	wantFault  = outboxdb.WantFault
)

// database is a database of its own with the configuration of an outbox in it.
type database struct {
	*outboxdb.DB
	cfg catalog.Config
}

func newDatabase(t testing.TB, srv *pgserver.Server) *database {
	t.Helper()
	db := outboxdb.New(t, srv)
	return &database{db, catalog.Config{URL: db.URL, Publication: "outflow", Table: "public.outbox"}}
}

// ready is a database with table and publication as documented.
func ready(t testing.TB, srv *pgserver.Server) *database {
	t.Helper()
	d := newDatabase(t, srv)
	statements, err := catalog.Statements(catalog.SetupConfig{Config: d.cfg, Mapping: outboxdb.Mapping,
		ID: "id"})
	must.Succeed(t, err)
	for _, sql := range statements[:2] { // a slot is not needed
		d.Exec(sql)
	}
	return d
}
