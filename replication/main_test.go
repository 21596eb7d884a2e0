package replication

import (
	"encoding/binary"
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
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
	cfg catalog.SetupConfig
}

func newDatabase(t testing.TB, srv *pgserver.Server) *database {
	t.Helper()
	db := outboxdb.New(t, srv)
	return &database{db, catalog.SetupConfig{
		Config:  catalog.Config{URL: db.URL, Slot: db.Slot, Publication: "outflow", Table: "public.outbox"},
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

func (d *database) setup() *catalog.Setup {
	d.T.Helper()
	s, err := catalog.OpenSetup(within(d.T), d.cfg)
	must.Succeed(d.T, err)
	return s
}

// config is that of a session.
func (d *database) config() Config { return Config{Config: d.cfg.Config} }

func (d *database) open() *Session {
	d.T.Helper()
	s, err := Open(within(d.T), d.config())
	must.Succeed(d.T, err)
	d.T.Cleanup(s.Close)
	return s
}

func (d *database) start(from outbox.LSN) *Session {
	d.T.Helper()
	s := d.open()
	must.Succeed(d.T, s.Start(within(d.T), from, false))
	return s
}

// seen counts what came through a stream, by pgoutput's message types, until enough says stop.
type seen struct {
	kinds   map[byte]int
	commits []outbox.LSN // header LSNs of the Commit messages: where their records end
	starts  []outbox.LSN // where they start
	inserts []string     // the Insert messages
}

func read(t testing.TB, s *Session, enough func(*seen) bool) *seen {
	t.Helper()
	got, ended := readUntil(t, s, enough)
	if ended {
		t.Fatalf("the stream ended: %v; until then %v", s.Err(), got.kinds)
	}
	return got
}

// readUntil is read where the stream may end before there is enough.
func readUntil(t testing.TB, s *Session, enough func(*seen) bool) (got *seen, ended bool) {
	t.Helper()
	got = &seen{kinds: map[byte]int{}}
	ctx := within(t)
	for !enough(got) {
		select {
		case b, ok := <-s.Batches():
			if !ok {
				return got, true
			}
			for _, m := range b.Messages {
				got.add(m)
			}
			b.Release()
		case <-ctx.Done():
			t.Fatalf("not enough came: %v", got.kinds)
		}
	}
	return got, false
}

func (s *seen) add(m Message) {
	if m.Keepalive {
		s.kinds['k']++
		return
	}
	s.kinds[m.Data[0]]++
	switch m.Data[0] {
	case 'C':
		s.commits = append(s.commits, m.WALEnd)
		s.starts = append(s.starts, outbox.LSN(binary.BigEndian.Uint64(m.Data[2:])))
	case 'I':
		s.inserts = append(s.inserts, string(m.Data))
	}
}

func inserts(n int) func(*seen) bool {
	return func(s *seen) bool { return s.kinds['I'] >= n && s.kinds['C'] > 0 && s.kinds['B'] == s.kinds['C'] }
}
