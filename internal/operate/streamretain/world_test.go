package streamretain

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	operatearchive "github.com/outflowhq/outflow/internal/operate/archive"
	"github.com/outflowhq/outflow/internal/operate/consumeradmin"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// world is a stream with a record that the test writes, and a database of consumers.
type world struct {
	t      *testing.T
	nc     *nats.Conn
	js     jetstream.JetStream
	s      jetstream.Stream
	store  *checkpoint.Store
	cfg    config.Config
	o      Options
	in     []postgres.Target // the databases of consumers
	record uint64            // its revision
	gap    *relay.Settings
	base   uint64
	repair string
	epoch  uint64 // above 0: clusters share the stream, and this is 1, its owner
}

func newWorld(t *testing.T, url string, replicas int) *world {
	t.Helper()
	nc, js := natstest.Connect(t, url)
	w := &world{t: t, nc: nc, js: js}
	var err error
	w.s, err = w.js.CreateStream(t.Context(), streamConfig(replicas))
	must.Succeed(t, err)
	w.store = checkpoint.NewStore(jsapi.New(nc, ""),
		checkpoint.StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	must.Succeed(t, w.store.EnsureBucket(t.Context(), replicas, jetstream.FileStorage))
	w.cfg, err = config.Load(config.Args{"nats.url": url, "stream": "OUTBOX", "slot": "outflow",
		"retain.stream.messages": "1"}, nil)
	must.Succeed(t, err)
	return w
}

func streamConfig(replicas int) jetstream.StreamConfig {
	return jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}, AllowDirect: true,
		Replicas: replicas}
}

// publish publishes messages of n documents in turn. Each is a window of its own.
func (w *world) publish(n int) {
	w.t.Helper()
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	for seq := info.State.LastSeq + 1; seq <= info.State.LastSeq+uint64(n); seq++ {
		at := outbox.LSN(seq * 16)
		h := outbox.Header{Pos: outbox.Position{LSN: at}, Of: 1, Due: at, Thru: at, Timeline: 1,
			Counter: outbox.Counter{First: int64(seq), Span: 1}}
		if w.gap != nil {
			h.Sort = outbox.ByGap
		}
		_, err := w.js.PublishMsg(w.t.Context(), &nats.Msg{Subject: fmt.Sprintf("outbox.d%d", seq%5),
			Header: nats.Header{outbox.HeaderName: {h.String()}}, Data: fmt.Appendf(nil, `{"n": %d}`, seq)})
		must.Succeed(w.t, err)
	}
}

// confirm writes a record whose confirmed checkpoint is at a sequence.
func (w *world) confirm(seq uint64) {
	w.t.Helper()
	at := func(seq uint64) checkpoint.StoredCheckpoint {
		p := relay.Checkpoint{Due: outbox.LSN(seq * 16), Seq: seq, Settings: w.cfg.Reorder.Settings(),
			Timeline: 1}
		if w.gap != nil {
			p.Settings, p.Remembered = *w.gap, w.gap.Gap.Memory
		}
		return checkpoint.StoredCheckpoint{Checkpoint: p, Since: time.Now()}
	}
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	control := ""
	if w.epoch > 0 {
		control = "public.outflow_control"
	}
	w.record, err = w.store.Save(w.t.Context(), &checkpoint.Record{
		Version: 2, Slot: "outflow", Database: "d", SystemID: "1", Stream: "OUTBOX", Created: info.Created,
		Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Actor: "a", Counter: "c",
			Key: "seq_key", Payload: "payload", Control: control},
		Publication: checkpoint.PublicationSeen{PublicationIdentity: relay.PublicationIdentity{
			OID: 16401, Xmin: 730, RelOID: 16402, RelXmin: 730}, Seen: 1},
		Checkpoints: []checkpoint.StoredCheckpoint{at(seq), at(seq + 5)}, Base: w.base, Repairing: w.repair,
		Epoch: w.epoch, Owner: int(min(w.epoch, 1)),
	}, w.record)
	must.Succeed(w.t, err)
}

// database makes a database of consumers, and returns its URL.
func (w *world) database() string {
	w.t.Helper()
	url := pgtest.Database(w.t, pgtest.Server(w.t))
	w.in = append(w.in, postgres.Target{URL: url, Setting: "--database"})
	return url
}

// stored makes a consumer of two partitions with offsets in a schema.
func (w *world) stored(url, schema, name string, offsets ...int) {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), url)
	must.Succeed(w.t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	_, err = conn.Exec(w.t.Context(), "CREATE SCHEMA IF NOT EXISTS "+schema+"; SET search_path = "+schema+";"+
		consumer.Tables(""))
	must.Succeed(w.t, err)
	_, err = conn.Exec(w.t.Context(), `INSERT INTO outflow_consumer (name, stream, filters, keying, partitions,
		epoch) VALUES ($1, 'OUTBOX', '{>}', 'outbox.{doc_id}', $2, 1) ON CONFLICT DO NOTHING`, name, len(offsets))
	must.Succeed(w.t, err)
	for p, seq := range offsets {
		_, err = conn.Exec(w.t.Context(), `INSERT INTO outflow_mark (name, source, partition, owner, epoch, seq,
				due, n, lsn, i, holed) VALUES ($1, 'live', $2, NULL, 1, $3, '0/10', 0,
				('0/' || to_hex($3::bigint * 16))::pg_lsn, 0, false)
			ON CONFLICT (name, source, partition) DO UPDATE SET seq = EXCLUDED.seq, lsn = EXCLUDED.lsn`, name, p, seq)
		must.Succeed(w.t, err)
	}
}

func (w *world) run(apply bool) (*Report, error) {
	w.t.Helper()
	o := w.o
	o.Apply = apply
	o.Readers = func(ctx context.Context, api *jsapi.Client) ([]streamretain.Reader, error) {
		return consumeradmin.Readers(ctx, api, "OUTBOX", w.in)
	}
	return Run(w.t.Context(), w.cfg, slog.New(slog.DiscardHandler), o)
}

// goes runs plan and apply, which must agree that all up to a sequence goes, and that what holds the rest
// says all of the words.
func (w *world) goes(to uint64, words ...string) *Report {
	w.t.Helper()
	first := w.first()
	plan, err := w.run(false)
	must.Succeed(w.t, err)
	if now := w.first(); now != first {
		w.t.Fatalf("after a plan the stream begins at %d", now)
	}
	did, err := w.run(true)
	must.Succeed(w.t, err)
	text := strings.Join(did.Lines(), "\n")
	if to < first {
		if plan.GoesTo != 0 || did.GoesTo != 0 || w.first() != first {
			w.t.Errorf("%d and %d went:\n%s", plan.GoesTo, did.GoesTo, text)
		}
	} else if plan.GoesTo != to || did.GoesTo != to || w.first() != to+1 || plan.Gone != did.Gone ||
		did.Gone > to-first+1 {
		w.t.Errorf("to %d, %d of %d messages went, want %d, and the stream begins at %d:\n%s", did.GoesTo,
			did.Gone, plan.Gone, to, w.first(), text)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			w.t.Errorf("it does not say %q:\n%s", word, text)
		}
	}
	return did
}

func (w *world) first() uint64 {
	w.t.Helper()
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	return info.State.FirstSeq
}

func (w *world) wantFault(err error, code string) {
	w.t.Helper()
	if f := outbox.FaultOf(err); f == nil || f.Code != code {
		w.t.Fatalf("got %v, want code %s", err, code)
	}
}

// archived archives everything that is confirmed.
func (w *world) archived() {
	w.t.Helper()
	_, err := operatearchive.Run(w.t.Context(), w.cfg, slog.New(slog.DiscardHandler),
		operatearchive.Options{Now: true})
	must.Succeed(w.t, err)
}

// durable makes a durable consumer that begins at the stream's first message.
func (w *world) durable(name, filter string) jetstream.Consumer {
	w.t.Helper()
	c, err := w.s.CreateConsumer(w.t.Context(), jetstream.ConsumerConfig{Durable: name, FilterSubject: filter,
		AckPolicy: jetstream.AckExplicitPolicy})
	must.Succeed(w.t, err)
	return c
}

// acknowledge reads and acknowledges so many messages.
func (w *world) acknowledge(c jetstream.Consumer, n int) {
	w.t.Helper()
	for range n {
		m, err := c.Next(jetstream.FetchMaxWait(time.Minute))
		must.Succeed(w.t, err)
		must.Succeed(w.t, m.DoubleAck(w.t.Context()))
	}
}

// older is what the search by age finds.
func (w *world) older(than time.Time) (uint64, error) {
	w.t.Helper()
	sc, err := wiring.Broker(w.cfg, slog.New(slog.DiscardHandler))
	must.Succeed(w.t, err)
	conn, err := wiring.Connect(w.t.Context(), w.cfg, sc)
	must.Succeed(w.t, err)
	defer conn.Close()
	c := &command{cfg: w.cfg, conn: conn}
	s, err := c.stream(w.t.Context())
	must.Succeed(w.t, err)
	return c.olderThan(w.t.Context(), s, s.Now.Sub(than))
}
