package repair

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/outbox"
)

// rows is how many rows an installation of archived has.
const rows = 20

// archived makes an installation whose stream a repair has filled, and these messages of it are archived;
// what lies before them is an accepted gap.
func archived(t *testing.T, from, to uint64) (ctx context.Context, cfg config.Config, s jetstream.Stream,
	db *outboxdb.DB) {
	t.Helper()
	db = outboxdb.New(t, pgtest.Server(t))
	url := natstest.Server(t).URL()
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": url, "slot": db.Slot,
		"stream": "OUTBOX", "sink.durable_after": "0s", "archive.url": "file://" + t.TempDir()}, nil)
	must.Succeed(t, err)
	ctx = outboxdb.Within(t)
	must.Succeed(t, initialize.Run(ctx, cfg, quiet, func(string, ...any) {}, nil))
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'd', 'a', n, '{}' FROM generate_series(1, $1::int) n`, rows)
	report, err := Run(ctx, cfg, quiet, Options{Accept: "slot_missing"})
	if err != nil || report.Published != rows {
		t.Fatalf("%+v, %v", report, err)
	}
	nc, js := natstest.Connect(t, url)
	api := jsapi.New(nc, "")
	s, err = js.Stream(ctx, "OUTBOX")
	must.Succeed(t, err)
	store, err := archive.Open(ctx, cfg.Archive.URL)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, store.Close()) }()
	a, err := archive.Load(ctx, store, archive.FolderOf("OUTBOX", s.CachedInfo().Created), nil)
	must.Succeed(t, err)
	segment, err := a.NewSegment()
	must.Succeed(t, err)
	if from > 1 {
		segment.Gap(outbox.Sequences{{From: 1, To: from - 1}}, nil)
	}
	for seq := from; seq <= to; seq++ {
		m, err := api.Message(ctx, "OUTBOX", jsapi.MessageRequest{Seq: seq})
		must.Succeed(t, err)
		header, err := nats.DecodeHeadersMsg(m.Header)
		must.Succeed(t, err)
		must.Succeed(t, segment.Add(&archive.Message{Seq: m.Seq, Time: m.Time, Subject: m.Subject,
			Header: header, Data: m.Data}))
	}
	_, err = a.Append(ctx, segment, 0)
	must.Succeed(t, err)
	return ctx, cfg, s, db
}

// copies are the messages from one on, to be published again.
func copies(t *testing.T, ctx context.Context, s jetstream.Stream, from uint64) (all []*nats.Msg) {
	t.Helper()
	info, err := s.Info(ctx)
	must.Succeed(t, err)
	ingress := strings.TrimSuffix(info.Config.Subjects[0], ">")
	for seq := from; seq <= rows; seq++ {
		m, err := s.GetMsg(ctx, seq)
		must.Succeed(t, err)
		for name := range m.Header {
			if strings.HasPrefix(name, "Nats-") {
				m.Header.Del(name)
			}
		}
		all = append(all, &nats.Msg{Subject: ingress + m.Subject, Header: m.Header, Data: m.Data})
	}
	return all
}

var quiet = slog.New(slog.DiscardHandler)

// until is a writer that calls f once, with the first text that has what.
func until(what string, f func()) writer {
	var once sync.Once
	return func(b []byte) (int, error) {
		if strings.Contains(string(b), what) {
			once.Do(f)
		}
		return len(b), nil
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }
