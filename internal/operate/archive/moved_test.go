package archive

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TestRowsOfAMovedDatabaseArePutBack: a document was erased, the database was dumped and restored in another
// cluster, and the document was written again there. The WAL of the new cluster is shorter: all of its
// positions lie below the cut of the old one. Or it is longer, and none of the old ones does.
func TestRowsOfAMovedDatabaseArePutBack(t *testing.T) {
	t.Parallel()
	made := time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)
	earlier, later := made.Add(-time.Hour), made.Add(time.Hour)
	of := func(id string, lsn outbox.LSN, seq uint64) *archive.Message {
		h := outbox.Header{ID: id, Pos: outbox.Position{LSN: lsn}, Of: 1, Due: lsn, Thru: lsn}
		return &archive.Message{Seq: seq, Subject: "outbox.gone",
			Header: nats.Header{outbox.HeaderName: {h.String()}}, Data: []byte("{}")}
	}
	const cut = outbox.LSN(5 << 32)
	type one struct {
		m      *archive.Message
		erased bool
	}
	for _, c := range []struct {
		name    string
		system  string    // of the request; "": this server's
		stream  string    // likewise
		created time.Time // the stream's that was archived
		now     time.Time // of the one that there is
		all     []one
	}{
		{"by the old cluster, from this stream", "7000", "OUTBOX", made, made, []one{
			{of("1", cut-16, 90), true},
			{of("2", cut-8, 120), true}, // was on its way when the rows were deleted
			{of("3", cut/4096, 2000), false}}},
		{"by the old cluster, from a former stream", "7000", "OUTBOX", earlier, made, []one{
			{of("3", cut+16, 7), true}}},
		{"by the old cluster, and the stream came from a copy", "7000", "OUTBOX", later, later, []one{
			{of("1", cut-16, 90), true},
			{of("3", cut/4096, 2000), false}}},
		{"by this one", "", "OUTBOX", made, made, []one{
			{of("1", cut+16, 90), true}, // of the old one, whose WAL was longer
			{of("2", cut-8, 120), true},
			{of("3", cut-8, 121), true},
			{of("3", cut+16, 2000), false}}},
		{"by this one, and the stream came from a copy", "", "OUTBOX", later, later, []one{
			{of("1", cut+16, 90), true},
			{of("3", cut+16, 2000), false}}},
		{"by this one, and the clock was set back", "", "OUTBOX", earlier, earlier, []one{
			{of("1", cut+16, 90), true},
			{of("2", cut-8, 7), true},
			{of("3", cut+16, 8), false}}},
		{"of another stream, which is newer", "", "ANOTHER", earlier, time.Time{}, []one{
			{of("1", cut+16, 90), true},
			{of("2", cut-8, 7), true},
			{of("3", cut+16, 8), false}}},
		{"by this one, before the stream", "", "OUTBOX", earlier, made.Add(-time.Minute), []one{
			{of("3", cut+16, 8), true}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := outboxdb.New(t, pgtest.Server(t))
			db.Exec(outboxdb.PlainTable)
			ctx := outboxdb.Within(t)
			system := c.system
			if system == "" {
				system = db.Text("SELECT system_identifier::text FROM pg_control_system()")
			}
			l, err := erasure.Open(ctx, postgres.Target{URL: db.URL}, "outbox", db.Slot)
			must.Succeed(t, err)
			defer l.Close()
			r, err := l.Begin(ctx, "r", "gone", system, c.stream, made)
			must.Succeed(t, err)
			r.Cut, r.CutSeq = cut, 100
			must.Succeed(t, l.Save(ctx, r))
			must.Succeed(t, l.Note(ctx, r, []string{of("1", cut, 1).Header.Get(outbox.HeaderName),
				of("2", cut, 1).Header.Get(outbox.HeaderName)}))
			conn, err := pgx.Connect(ctx, db.URL)
			must.Succeed(t, err)
			defer postgres.Close(conn)
			table, err := catalog.ReadTable(ctx, conn, "outbox")
			must.Succeed(t, err)
			w := &rowWriter{layout: &wiring.Layout{Resolved: config.Resolved{ID: "id",
				Mapping: outboxdb.Mapping, Uses: map[string]config.Use{"doc_id": {Role: config.InDoc}}},
				Table: table}}
			w.carry, err = newCarrier(config.Config{Subject: "outbox.{doc_id}"}, w.layout)
			must.Succeed(t, err)
			w.carry.computed = false // these have no key
			must.Succeed(t, w.readErasures(ctx, conn, "OUTBOX", c.created, c.now))
			for _, m := range c.all {
				values, _, err := w.carry.row(m.m)
				must.Succeed(t, err)
				got, err := w.wasErased(ctx, m.m, values)
				must.Succeed(t, err)
				if got != m.erased {
					t.Errorf("message %d, %s: erased %v", m.m.Seq, m.m.Header.Get(outbox.HeaderName), got)
				}
			}
		})
	}
}
