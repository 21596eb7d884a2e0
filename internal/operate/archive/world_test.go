package archive

import (
	"fmt"
	"log/slog"
	"reflect"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// world is a stream with a record that the test writes.
type world struct {
	t      *testing.T
	js     jetstream.JetStream
	s      jetstream.Stream
	store  *checkpoint.Store
	cfg    config.Config
	record uint64 // its revision
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldOn(t, natstest.Server(t))
}

func newWorldOn(t *testing.T, s *natsserver.Server) *world {
	t.Helper()
	w := &world{t: t}
	w.connect(s.URL(), "file://"+t.TempDir())
	w.makeStream(1)
	must.Succeed(t, w.store.EnsureBucket(t.Context(), 1, jetstream.FileStorage))
	return w
}

func (w *world) connect(url, archive string) {
	w.t.Helper()
	nc, js := natstest.Connect(w.t, url)
	w.store = checkpoint.NewStore(jsapi.New(nc, ""),
		checkpoint.StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	cfg, err := config.Load(config.Args{"nats.url": url, "stream": "OUTBOX", "slot": "outflow",
		"archive.url": archive}, nil)
	must.Succeed(w.t, err)
	w.js, w.cfg = js, cfg
}

func (w *world) makeStream(first uint64) {
	w.t.Helper()
	var err error
	w.s, err = w.js.CreateStream(w.t.Context(), jetstream.StreamConfig{
		Name: "OUTBOX", Subjects: []string{"outbox.>"}, FirstSeq: first, AllowDirect: true,
	})
	must.Succeed(w.t, err)
}

func (w *world) publish(n int) {
	w.t.Helper()
	w.publishBehind(0, n)
}

// publishBehind publishes messages, of which the first one says that the broker had lost those from a
// sequence on; 0: none.
func (w *world) publishBehind(lost uint64, n int) {
	w.t.Helper()
	for i := range n {
		info, err := w.s.Info(w.t.Context())
		must.Succeed(w.t, err)
		seq := max(info.State.LastSeq+1, info.State.FirstSeq)
		h := nats.Header{"By": {"anna"}, "a": {"1", "2"}}
		if i == 0 && lost > 0 {
			h.Set(outbox.HeaderLost, fmt.Sprint(lost))
		}
		_, err = w.js.PublishMsg(w.t.Context(), &nats.Msg{
			Subject: fmt.Sprintf("outbox.doc%d", seq%3), Header: h, Data: fmt.Appendf(nil, `{"n": %d}`, seq),
		})
		must.Succeed(w.t, err)
	}
}

// confirm says that all up to a sequence is confirmed, and what is behind it is in a newer checkpoint.
func (w *world) confirm(seq uint64) {
	w.t.Helper()
	at := func(seq uint64) checkpoint.StoredCheckpoint {
		return checkpoint.StoredCheckpoint{Checkpoint: relay.Checkpoint{
			Due: outbox.LSN(1000 + seq), Seq: seq, Settings: w.cfg.Reorder.Settings(),
			Timeline: 1}, Since: time.Now()}
	}
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	rec := &checkpoint.Record{
		Version: 2, Slot: "outflow", Database: "d", SystemID: "1", Stream: "OUTBOX", Created: info.Created,
		Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Key: "seq_key", Payload: "payload"},
		Publication: checkpoint.PublicationSeen{PublicationIdentity: relay.PublicationIdentity{
			OID: 16401, Xmin: 730,
			RelOID: 16402, RelXmin: 730}, Seen: 1},
		Checkpoints: []checkpoint.StoredCheckpoint{at(seq), at(seq + 5)},
	}
	w.record, err = w.store.Save(w.t.Context(), rec, w.record)
	must.Succeed(w.t, err)
}

func (w *world) run(o Options) (*Report, error) {
	w.t.Helper()
	return Run(w.t.Context(), w.cfg, slog.New(slog.DiscardHandler), o)
}

func (w *world) mustRun(o Options) *Report {
	w.t.Helper()
	r, err := w.run(o)
	must.Succeed(w.t, err)
	return r
}

func (w *world) archived() (seqs []uint64) {
	w.t.Helper()
	must.Succeed(w.t, each(w.t.Context(), w.cfg, func(_ string, a *archive.Archive) error {
		return a.Read(w.t.Context(), 1, func(m *archive.Message) error {
			seqs = append(seqs, m.Seq)
			return nil
		})
	}))
	return seqs
}

func (w *world) wantFault(err error, code string) {
	w.t.Helper()
	if f := outbox.FaultOf(err); f == nil || f.Code != code {
		w.t.Fatalf("got %v, want code %s", err, code)
	}
}

func (w *world) wantReach(want archive.Reach) {
	w.t.Helper()
	must.Succeed(w.t, each(w.t.Context(), w.cfg, func(_ string, a *archive.Archive) error {
		got := a.Reach(func(system string, timeline uint32, _ outbox.LSN) bool {
			return system == "1" && timeline == 1
		})
		if got != want {
			w.t.Errorf("%+v, want %+v", got, want)
		}
		return nil
	}))
}

// comesBack restores what was archived, and compares it with the stream.
func (w *world) comesBack() {
	w.t.Helper()
	_, err := Verify(w.t.Context(), w.cfg, 0)
	must.Succeed(w.t, err)
	_, err = w.restore(RestoreOptions{To: "PAST"})
	must.Succeed(w.t, err)
	if got, want := w.stored("PAST"), w.stored("OUTBOX"); !reflect.DeepEqual(got, want) {
		w.t.Errorf("%v\n%v", got, want)
	}
}
