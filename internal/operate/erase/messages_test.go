package erase

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
	"github.com/outflowhq/outflow/sink/stream"
)

// answering returns a connection to a JetStream that answers so.
func answering(t *testing.T, answer func(*nats.Msg) string) *sink.Conn {
	t.Helper()
	url := natstest.Server(t).URL()
	context := filepath.Join(t.TempDir(), "fake.json")
	settings := fmt.Sprintf(`{"url": %q, "jetstream_api_prefix": "fake"}`, url)
	must.Succeed(t, os.WriteFile(context, []byte(settings), 0o600))
	nc, err := nats.Connect(url)
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	_, err = nc.Subscribe("fake.>", func(m *nats.Msg) { // also whether there is a JetStream
		_ = m.Respond([]byte(answer(m)))
	})
	must.Succeed(t, err)
	must.Succeed(t, nc.Flush())
	conn, err := sink.Connect(t.Context(), sink.Config{Context: context, Table: "public.outbox",
		Stream: "OUTBOX"})
	must.Succeed(t, err)
	t.Cleanup(conn.Close)
	return conn
}

// TestAStreamIsListedWhileOthersAreDeleted, which moves it to the page that was read already.
func TestAStreamIsListedWhileOthersAreDeleted(t *testing.T) {
	t.Parallel()
	names, pages := []string{"A", "B", "C", "D", "E", "F", "G"}, 0
	conn := answering(t, func(m *nats.Msg) string {
		if strings.Contains(m.Subject, ".MSG.GET.") {
			return `{"error": {"code": 404, "err_code": 10037}}`
		}
		var ask struct{ Offset int }
		_ = json.Unmarshal(m.Data, &ask) // whether there is a JetStream is asked without
		var streams []string
		for _, name := range names[min(ask.Offset, len(names)):min(ask.Offset+3, len(names))] {
			streams = append(streams, fmt.Sprintf(`{"config": {"name": %q}}`, name))
		}
		total := len(names)
		if pages += strings.Count(m.Subject, ".LIST"); pages == 1 {
			names = names[1:]
		}
		return fmt.Sprintf(`{"total": %d, "streams": [%s]}`, total, strings.Join(streams, ", "))
	})
	c := &command{l: &backfill.Conns{Conns: &conns.Conns{NATS: conn}}}
	must.Succeed(t, c.listStreams(t.Context()))
	var got []string
	for _, s := range c.list {
		got = append(got, s.name)
	}
	if !slices.Equal(got, names) {
		t.Errorf("it lists %v, and there are %v", got, names)
	}
}

// TestAStreamThatNobodyAnswersForMayHaveCopies: an erasure that passed it over would say that it is finished.
func TestAStreamThatNobodyAnswersForMayHaveCopies(t *testing.T) {
	t.Parallel()
	for part, named := range map[string]string{
		``: "", `, "missing": ["MIRROR"]`: "MIRROR", `, "offline": {"MIRROR": "unsupported"}`: "MIRROR",
	} {
		conn := answering(t, func(*nats.Msg) string {
			return `{"total": 1, "streams": [{"config": {"name": "KV_b"}}]` + part + `}`
		})
		c := &command{l: &backfill.Conns{Conns: &conns.Conns{NATS: conn}}}
		switch err := c.listStreams(t.Context()); {
		case named == "":
			must.Succeed(t, err)
		case err == nil || !strings.Contains(err.Error(), named) || outbox.ClassOf(err) != outbox.Transient:
			t.Errorf("%s: %v", part, err)
		}
	}
}

// TestAnErasureReadsAllThatTheLeaderHas: a consumer may be on a replica that was away, and has less for a
// moment.
func TestAnErasureReadsAllThatTheLeaderHas(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves out what needs three servers")
	}
	t.Parallel()
	cluster := natstest.Cluster(t, 3)
	open := func(url string) (*sink.Conn, jetstream.JetStream) {
		conn, err := sink.Connect(t.Context(), sink.Config{URL: url, Table: "public.outbox",
			Stream: "OUTBOX"})
		must.Succeed(t, err)
		js, err := conn.API().JetStream()
		must.Succeed(t, err)
		return conn, js
	}
	first, js := open(cluster.URLs())
	defer first.Close()
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"o"},
		Replicas: 3})
	must.Succeed(t, err)
	leader, err := cluster.WaitLeader("OUTBOX", 3*time.Minute)
	must.Succeed(t, err)
	conn, js := open(cluster.URL(leader))
	defer conn.Close()
	m := &nats.Msg{Subject: "o", Header: nats.Header{outbox.HeaderName: {"v=1"}}, Data: make([]byte, 64<<10)}
	lags, last := (leader+1)%3, uint64(0)
	for range 3 {
		cluster.Stop(lags)
		for range 300 {
			await.Until(t, "it is published", func() error { // who leads may change
				ack, err := js.PublishMsg(t.Context(), m)
				if err == nil {
					last = ack.Sequence
				}
				return err
			})
		}
		must.Succeed(t, cluster.Start(lags))
		c := &command{log: slog.New(slog.DiscardHandler), stays: map[string][]uint64{},
			untold: map[string]uint64{}, rec: &erasure.Record{},
			l: &backfill.Conns{Conns: &conns.Conns{NATS: conn}}}
		for range 5 {
			read := uint64(0)
			_, err := c.find(t.Context(), "OUTBOX", last, asItIs, func(_ nats.Header, seq uint64,
				_ time.Time) (bool, bool) {
				read = seq
				return false, false
			})
			if err == nil && read != last {
				t.Fatalf("it was read up to %d of %d", read, last)
			}
		}
		must.Succeed(t, cluster.WaitReady(3*time.Minute))
	}
}

// TestWhatGapModeRemembersAmongCutsIsNotErased: a cut is no message that it remembers, and no record knows
// all of them. Without one of these messages no start goes on.
func TestWhatGapModeRemembersAmongCutsIsNotErased(t *testing.T) {
	t.Parallel()
	conn, js := connected(t)
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX",
		Subjects: []string{"outbox.>", outbox.CutSubject}})
	must.Succeed(t, err)
	const cuts, newest = 3, 100
	cut := outbox.Cut{LSN: 55, SystemID: 1, Timeline: 1, Epoch: 2, Owner: 2}
	for n := range newest {
		m := &nats.Msg{Subject: "outbox.d", Header: nats.Header{outbox.HeaderName: {"v=1"}}}
		if n >= 55 && n < 55+cuts {
			m = &nats.Msg{Subject: outbox.CutSubject, Header: nats.Header{outbox.HeaderCut: {cut.String()}}}
		}
		_, err := js.PublishMsg(t.Context(), m)
		must.Succeed(t, err)
	}
	c := &command{l: &backfill.Conns{Conns: &conns.Conns{NATS: conn}}, stream: stream.New(conn.API(),
		"OUTBOX", slog.New(slog.DiscardHandler))}
	c.cfg, err = config.Load(config.Args{"stream": "OUTBOX", "slot": "outflow"}, nil)
	must.Succeed(t, err)
	c.cfg.Cluster.Mode, c.cfg.Cluster.ID = config.ModeShared, 1
	store := checkpoint.NewStore(conn.API(), checkpoint.StoreConfig{Stream: "OUTBOX", Slot: "outflow",
		Cluster: 1})
	must.Succeed(t, store.EnsureBucket(t.Context(), 1, jetstream.FileStorage))
	_, err = store.Save(t.Context(), &checkpoint.Record{
		Version: 2, Slot: "outflow", Database: "d", SystemID: "1", Stream: "OUTBOX",
		Created: s.CachedInfo().Created, Owner: 1, Epoch: 3,
		Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Actor: "a", Counter: "c",
			Key: "seq_key", Payload: "payload", Control: "public.outflow_control"},
		Publication: checkpoint.PublicationSeen{PublicationIdentity: relay.PublicationIdentity{
			OID: 16401, Xmin: 730, RelOID: 16402, RelXmin: 730}, Seen: 1},
		Checkpoints: []checkpoint.StoredCheckpoint{{Since: time.Now(), Checkpoint: relay.Checkpoint{
			Due: 70, Seq: 70, Timeline: 1, Remembered: 20, Settings: relay.Settings{Sort: outbox.ByGap,
				MaxEvents: relay.DefaultMaxEvents, MaxBytes: relay.DefaultMaxBytes,
				Gap: relay.Gap{Bound: relay.DefaultBound, Cold: relay.DefaultCold, Memory: 20,
					First: relay.DefaultFirst}}}}},
	}, 0)
	must.Succeed(t, err)
	bound, err := c.mayGo(t.Context())
	must.Succeed(t, err)
	if want := uint64(70 - 20 - cuts); bound.Clause != "memory" || bound.UpTo != want {
		t.Errorf("%v; want up to %d", bound, want)
	}
}
