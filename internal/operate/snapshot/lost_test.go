package snapshot

import (
	"context"
	"log/slog"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

var quiet = slog.New(slog.DiscardHandler)

// servers are a table and a JetStream in which nothing is set up yet.
func servers(t *testing.T) (*outboxdb.DB, config.Config, jetstream.JetStream) {
	t.Helper()
	db, url := outboxdb.New(t, pgtest.Server(t)), natstest.Server(t).URL()
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": url, "slot": db.Slot,
		"stream": "OUTBOX", "sink.durable_after": "0s"}, nil)
	must.Succeed(t, err)
	_, js := natstest.Connect(t, url)
	return db, cfg, js
}

// TestAHoleThatOnlyAMessageExplainsIsNotRemoved: the broker loses the end of the stream, and later the
// revision of the record that knew it.
func TestAHoleThatOnlyAMessageExplainsIsNotRemoved(t *testing.T) {
	t.Parallel()
	db, cfg, js := servers(t)
	const rows = 5
	insert := func() {
		for n := range rows {
			db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', $1, '{}')", n)
		}
	}
	take := func(killedAt string, prepared func()) (*Report, error) {
		ctx, kill := context.WithCancel(outboxdb.Within(t))
		defer kill()
		return Run(ctx, cfg, quiet, Options{
			Prepare: func(ctx context.Context, fits Fits) error {
				err := initialize.Prepare(ctx, cfg, quiet, func(string, ...any) {}, nil, fits)
				prepared()
				return err
			},
			Hit: func(point string) {
				if point == killedAt {
					kill()
				}
			},
		})
	}
	if _, err := take("snapshot.published", insert); err == nil {
		t.Fatal("it was not killed")
	}
	ctx := outboxdb.Within(t)
	s, err := js.Stream(ctx, "OUTBOX")
	must.Succeed(t, err)
	must.Succeed(t, s.DeleteMsg(ctx, rows))
	if _, err := take("snapshot.published", func() {}); err == nil {
		t.Fatal("it was not killed")
	}
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rec, revision, err := l.Store.Load(ctx)
	must.Succeed(t, err)
	if len(rec.Holes) != 1 {
		t.Errorf("%+v", rec.Holes)
	}
	older := *rec
	older.Holes = nil
	revision, err = l.Store.Save(ctx, &older, revision)
	must.Succeed(t, err)
	// Of a server that was put back the ids that the stream has may be those of other rows.
	older.Publication.Seen += 1 << 30
	revision, err = l.Store.Save(ctx, &older, revision)
	must.Succeed(t, err)
	_, err = take("", func() {})
	outboxdb.WantFault(t, err, outbox.Fatal, "snapshot_server")
	older.Publication.Seen -= 1 << 30
	_, err = l.Store.Save(ctx, &older, revision)
	must.Succeed(t, err)
	report, err := take("", func() {})
	if err != nil || report.Already != rows || report.Published != 0 {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestASnapshotOfMoreThanTheStreamKeepsIsRefused: it would say that it has published all rows, and the stream
// would not have the first of them.
func TestASnapshotOfMoreThanTheStreamKeepsIsRefused(t *testing.T) {
	t.Parallel()
	db, cfg, js := servers(t)
	ctx := outboxdb.Within(t)
	take := func(most int) (*Report, error) {
		return Run(ctx, cfg, quiet, Options{Prepare: func(ctx context.Context, fits Fits) error {
			err := initialize.Prepare(ctx, cfg, quiet, func(string, ...any) {}, nil, fits)
			must.Succeed(t, err)
			s, err := js.Stream(ctx, "OUTBOX")
			must.Succeed(t, err)
			with := s.CachedInfo().Config
			with.MaxMsgs = int64(most)
			_, err = js.UpdateStream(ctx, with)
			db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
				SELECT 'd', 'a', n, '{}' FROM generate_series(1, 3) n WHERE NOT EXISTS (TABLE outbox)`)
			return err
		}})
	}
	_, err := take(2)
	outboxdb.WantFault(t, err, outbox.Fatal, "stream_limits")
	if report, err := take(3); err != nil || report.Published != 3 {
		t.Errorf("%+v, %v", report, err)
	}
}
