package catalog

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

var (
	within    = outboxdb.Within
	wantFault = outboxdb.WantFault
)

// database is a database of its own with the configuration of an outbox in it.
type database struct {
	*outboxdb.DB
	cfg SetupConfig
}

func newDatabase(t testing.TB, srv *pgserver.Server) *database {
	t.Helper()
	db := outboxdb.New(t, srv)
	return &database{db, SetupConfig{
		Config:  Config{URL: db.URL, Slot: db.Slot, Publication: "outflow", Table: "public.outbox"},
		Mapping: outboxdb.Mapping, ID: "id", Columns: outboxdb.Needed,
	}}
}

// ready is a database with table, publication and slot.
func ready(t testing.TB, srv *pgserver.Server) *database {
	t.Helper()
	d := newDatabase(t, srv)
	s := d.setup()
	defer s.Close()
	ctx := within(t)
	must.Succeed(t, s.CheckServer(ctx))
	if made, err := s.EnsureTable(ctx); err != nil || !made {
		t.Fatal(made, err)
	}
	if made, _, err := s.EnsurePublication(ctx); err != nil || !made {
		t.Fatal(made, err)
	}
	if lsn, err := s.CreateSlot(ctx); err != nil || lsn == 0 {
		t.Fatal(lsn, err)
	}
	return d
}

func (d *database) setup() *Setup {
	d.T.Helper()
	s, err := OpenSetup(within(d.T), d.cfg)
	must.Succeed(d.T, err)
	return s
}
