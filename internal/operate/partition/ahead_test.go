package partition

import (
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	lifecycle "github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

const partitioned = `CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), doc_id text NOT NULL,
	actor_id text NOT NULL, counter bigint NOT NULL, payload jsonb NOT NULL,
	created_at timestamptz NOT NULL DEFAULT now(),
	PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at)`

// TestPartitionsAreMadeWhileNATSIsAway: the services go on writing.
func TestPartitionsAreMadeWhileNATSIsAway(t *testing.T) {
	t.Parallel()
	db := outboxdb.New(t, pgtest.Server(t))
	db.Exec(partitioned)
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": "nats://127.0.0.1:1",
		"slot": db.Slot, "table": "public.outbox"}, nil)
	must.Succeed(t, err)
	cfg.Retain.PostgresURL = outboxdb.New(t, pgtest.Server(t)).URL // that has no outbox, or another one
	_, err = Run(outboxdb.Within(t), cfg, slog.New(slog.DiscardHandler), Options{Apply: true})
	outboxdb.WantFault(t, err, outbox.Fatal, "retain_url")
	cfg.Retain.PostgresURL = db.URL + "&application_name=owner"
	rep, err := Run(outboxdb.Within(t), cfg, slog.New(slog.DiscardHandler), Options{Apply: true})
	outboxdb.WantFault(t, err, outbox.Transient, "nats_connect")
	if rep == nil || len(rep.Steps) < 4 || rep.Steps[0].Action != lifecycle.Create {
		t.Errorf("it did %+v", rep)
	}
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', 1, '{}')")
}

// TestPlanSaysThatApplyIsRefused: the role does not own the outbox.
func TestPlanSaysThatApplyIsRefused(t *testing.T) {
	t.Parallel()
	for method, sql := range map[string]string{config.RetainPartition: partitioned,
		config.RetainDelete: outboxdb.PlainTable} {
		ctx, quiet := outboxdb.Within(t), slog.New(slog.DiscardHandler)
		db := outboxdb.New(t, pgtest.Server(t))
		db.Exec(sql)
		cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": natstest.Server(t).URL(),
			"slot": db.Slot, "stream": "OUTBOX", "table": "public.outbox", "columns.seq_key": "",
			"retain.table.method": method}, nil)
		must.Succeed(t, err)
		must.Succeed(t, initialize.Run(ctx, cfg, quiet, func(string, ...any) {}, nil))
		noted := func() bool {
			rep, err := Run(ctx, cfg, quiet, Options{})
			must.Succeed(t, err)
			return strings.Contains(strings.Join(rep.Notes, "\n"), "no_right")
		}
		if noted() {
			t.Errorf("%s: the owner is refused", method)
		}
		cfg.Retain.PostgresURL = db.URL + "&role=pg_monitor"
		_, err = Run(ctx, cfg, quiet, Options{Apply: true})
		outboxdb.WantFault(t, err, outbox.Fatal, "no_right")
		if !noted() {
			t.Errorf("%s: apply is refused, and plan does not say so", method)
		}
	}
}

// TestTheStreamsOfOthersAreKnown, by their records, as each knows its own. Those of streams that slots had
// before are there, too: one that outflow uninstall has left, and one of which nobody has removed anything.
func TestTheStreamsOfOthersAreKnown(t *testing.T) {
	t.Parallel()
	ctx, quiet := outboxdb.Within(t), slog.New(slog.DiscardHandler)
	db, nats := outboxdb.New(t, pgtest.Server(t)), natstest.Server(t).URL()
	db.Exec(partitioned)
	slots, all := []string{db.Slot, db.Slot + "_2"}, []*command{}
	t.Cleanup(func() { db.Exec("SELECT pg_drop_replication_slot($1)", slots[1]) })
	for n := range 4 { // both are set up first
		i := n % 2
		cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": nats, "slot": slots[i],
			"stream": "OUTBOX_" + strconv.Itoa(i), "subject": "s" + strconv.Itoa(i) + ".{doc_id}",
			"publication": slots[i], "table": "public.outbox", "columns.seq_key": ""}, nil)
		must.Succeed(t, err)
		if n < 2 {
			must.Succeed(t, initialize.Run(ctx, cfg, quiet, func(string, ...any) {}, nil))
			continue
		}
		l, err := backfill.Open(ctx, cfg, quiet)
		must.Succeed(t, err)
		defer l.Close()
		rd, err := l.Read(ctx)
		must.Succeed(t, err)
		former := *rd.Record
		former.Stream, former.Created = "Z", former.Created.Add(-time.Hour)
		if i == 1 {
			former.Creating, former.Base, former.Checkpoints = true, 1, nil
		}
		store := checkpoint.NewStore(l.NATS.API(), checkpoint.StoreConfig{Stream: "Z", Slot: slots[i]})
		must.Succeed(t, store.EnsureBucket(ctx, 1, jetstream.MemoryStorage))
		_, err = store.Save(ctx, &former, 0)
		must.Succeed(t, err)
		all = append(all, &command{cfg: cfg, l: l})
	}
	var known [2]lifecycle.Outside
	for i, c := range all {
		o, err := c.outside(ctx)
		must.Succeed(t, err)
		known[i] = o
	}
	for i, o := range known {
		if was, of := o.Streams[slots[1-i]], known[1-i].Stream.Created; !was.Equal(of) || len(o.Streams) > 1 {
			t.Errorf("slot %s knows streams of %v, the other one's is of %v", slots[i], o.Streams, of)
		}
	}
}
