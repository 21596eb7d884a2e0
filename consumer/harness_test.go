package consumer

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// publisher is a stream's content to be: each event has a window of its own unless a test says otherwise.
type publisher struct {
	lsn outbox.LSN
	n   int
}

// event makes the next message of a document.
func (s *publisher) event(document string) *stream.Message {
	s.lsn += 16
	s.n++
	h := outbox.Header{
		Pos: outbox.Position{LSN: s.lsn}, Of: 1, Due: s.lsn, Thru: s.lsn, Timeline: 1,
		ID: fmt.Sprintf("id-%d", s.n), Key: fmt.Sprintf("%08d", s.n),
	}
	return message(document, &h)
}

func message(document string, h *outbox.Header) *stream.Message {
	return &stream.Message{
		Subject: "outbox." + string(outbox.AppendToken(nil, document)),
		Header:  nats.Header{outbox.HeaderName: {h.String()}}, Data: []byte(h.ID), Time: time.Now(),
	}
}

// events makes n messages of documents d0, d1, ... in turn.
func (s *publisher) events(n, documents int) []*stream.Message {
	var all []*stream.Message
	for i := range n {
		all = append(all, s.event(fmt.Sprintf("d%d", i%documents)))
	}
	return all
}

// memoryStream is a stream in memory that can be damaged. Its messages are those of the filter ">".
type memoryStream struct {
	mu      sync.Mutex
	created time.Time
	first   uint64
	last    uint64
	held    map[uint64]*stream.Message
	lost    uint64 // the first that was lost at the end, which the next one says
	left    uint64 // up to here a loss left sequences out
	erased  outbox.Sequences
	reader  *memoryReader
	opened  int
	changed chan struct{}
	steal   int // so many messages are handed to somebody else
}

func newMemoryStream() *memoryStream {
	return &memoryStream{created: time.Now().UTC(), first: 1, held: map[uint64]*stream.Message{},
		changed: make(chan struct{})}
}

func (s *memoryStream) publish(all ...*stream.Message) *memoryStream {
	s.change(func() {
		for _, m := range all {
			s.last++
			c := *m
			c.Sequence = s.last
			if s.lost > 0 {
				c.Header = maps.Clone(m.Header)
				c.Header.Set(outbox.HeaderLost, fmt.Sprint(s.lost))
				s.lost = 0
			}
			s.held[s.last] = &c
		}
	})
	return s
}

// change changes the stream and rouses its reader.
func (s *memoryStream) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.first = s.last + 1
	for seq := range s.held {
		s.first = min(s.first, seq)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// lose removes messages; back says whether the last sequence goes back with them. If it does not, or goes
// back to where an earlier loss left sequences out, the next message says that those are lost, as Outflow
// does: it looks for the newest message that can be read.
func (s *memoryStream) lose(from uint64, back bool) {
	s.change(func() {
		maps.DeleteFunc(s.held, func(seq uint64, _ *stream.Message) bool { return seq >= from })
		if back {
			s.last = from - 1
		} else {
			s.left = s.last
		}
		s.lost = 0
		for seq := s.last; seq >= s.first && s.held[seq] == nil; seq-- {
			s.lost = seq
		}
	})
}

func (s *memoryStream) remove(seqs ...uint64) {
	s.change(func() {
		for _, seq := range seqs {
			delete(s.held, seq)
		}
	})
}

// erase removes messages and says so.
func (s *memoryStream) erase(seqs ...uint64) {
	s.mu.Lock()
	for _, seq := range seqs {
		s.erased = s.erased.With(outbox.SequenceRange{From: seq, To: seq})
	}
	s.mu.Unlock()
	s.remove(seqs...)
}

// removeTo removes what retention would: the oldest messages.
func (s *memoryStream) removeTo(seq int64) {
	s.change(func() {
		maps.DeleteFunc(s.held, func(at uint64, _ *stream.Message) bool {
			return at <= uint64(seq)
		})
	})
}

func (s *memoryStream) State(context.Context) (stream.State, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return stream.State{Created: s.created, First: s.first, Last: s.last, Erased: s.erased}, nil
}

func (s *memoryStream) Get(_ context.Context, seq uint64) (*stream.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[seq], nil
}

func (s *memoryStream) Next(_ context.Context, seq uint64) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ; seq <= s.last; seq++ {
		if s.held[seq] != nil {
			return seq, nil
		}
	}
	return 0, nil
}

// more reports whether the newest reader has not read everything.
func (s *memoryStream) more() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for seq := range s.held {
		if seq > s.reader.at {
			return true
		}
	}
	return false
}

func (s *memoryStream) Open(_ context.Context, after uint64) (stream.Reader, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened++
	s.reader = &memoryReader{s: s, at: after}
	return s.reader, nil
}

type memoryReader struct {
	s  *memoryStream
	at uint64
}

func (r *memoryReader) Read(ctx context.Context) (*stream.Message, error) {
	for {
		r.s.mu.Lock()
		for seq := r.at + 1; seq <= r.s.last; seq++ {
			m := r.s.held[seq]
			if m == nil {
				continue
			}
			r.at = seq
			if r.s.steal > 0 {
				r.s.steal--
				r.s.mu.Unlock()
				return nil, errors.New("a delivery is missing")
			}
			r.s.mu.Unlock()
			return m, nil
		}
		changed := r.s.changed
		r.s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (r *memoryReader) Check(context.Context) (uint64, error) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return r.at, nil
}

func (r *memoryReader) Buffered() int { return 0 }

func (r *memoryReader) Close() {}

// harness is a database with effects that depend on the order and the number of events: for each document a
// hash over the ids.
type harness struct {
	t    *testing.T
	url  string
	mine *pgxpool.Pool // of the test
	pool *pgxpool.Pool // of the consumers
	log  *slog.Logger

	newest *running
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	return newHarnessIn(t, pgtest.Database(t, pgtest.Server(t)))
}

func newHarnessIn(t *testing.T, url string) *harness {
	t.Helper()
	w := &harness{t: t, url: url,
		log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))}
	w.mine, w.pool = w.connect("test"), w.connect("consumer")
	w.exec(Tables(""))
	w.exec(`CREATE TABLE effect (document text PRIMARY KEY, n int NOT NULL, hash text NOT NULL)`)
	return w
}

func (w *harness) connect(name string) *pgxpool.Pool {
	w.t.Helper()
	cfg, err := pgxpool.ParseConfig(w.url)
	if err != nil {
		w.t.Fatal(err)
	}
	cfg.MaxConns = 8
	cfg.ConnConfig.RuntimeParams["application_name"] = name
	pool, err := pgxpool.NewWithConfig(w.t.Context(), cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(pool.Close)
	return pool
}

func (w *harness) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.mine.Exec(w.t.Context(), sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

// expire lets all leases end.
func (w *harness) expire() {
	w.t.Helper()
	w.exec(`UPDATE outflow_member SET expires = now() - interval '1 second'`)
}

// handler has the effect of an event.
func handler(ctx context.Context, tx pgx.Tx, e *Event) error {
	_, err := tx.Exec(ctx,
		`INSERT INTO effect VALUES ($1, 1, md5($2)) ON CONFLICT (document) DO UPDATE
			SET n = effect.n + 1, hash = md5(effect.hash || $2)`, e.Document, e.ID)
	return err
}

// config is that of a consumer which reads src.
func (w *harness) config(src stream.Source) Config {
	return Config{
		Name: "orders", Stream: "OUTBOX", hooks: stream.Hooks{Source: src}, Log: w.log, Lease: time.Second,
		Timeout: 10 * time.Second, StopTimeout: 5 * time.Second, ParkAfter: 1, ParkLimit: -1,
		Backoff: Backoff{First: time.Millisecond, Max: 2 * time.Millisecond},
	}
}

func (w *harness) consumer(cfg Config) *Consumer {
	w.t.Helper()
	c, err := New(nil, Postgres(w.pool), cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	c.cfg.confirm, c.cfg.interval = time.Millisecond, 50*time.Millisecond
	return c
}

// running is a consumer that runs.
type running struct {
	t     *testing.T
	stop  context.CancelFunc
	ended chan struct{}
	err   error // once ended
}

func (w *harness) start(c *Consumer, h Handler) *running {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{t: w.t, stop: cancel, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.err = c.Run(ctx, h)
	}()
	w.t.Cleanup(func() {
		cancel()
		<-r.ended
	})
	w.newest = r
	return r
}

// ends waits for the end of Run.
func (r *running) ends() error {
	r.t.Helper()
	if !await.True(func() bool {
		select {
		case <-r.ended:
			return true
		default:
			return false
		}
	}) {
		r.t.Fatal("Run does not end")
	}
	return r.err
}

// stopped stops it cleanly.
func (r *running) stopped() {
	r.t.Helper()
	r.stop()
	if err := r.ends(); err != nil {
		r.t.Fatalf("Run: %v", err)
	}
}

// want is what effects must be of messages that are each had once, in this order.
func want(all []*stream.Message) map[string]string {
	effects := map[string]string{}
	counts := map[string]int{}
	for _, m := range all {
		h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
		if err != nil {
			panic(err)
		}
		document, _ := outbox.ParseToken(strings.TrimPrefix(m.Subject, "outbox."))
		_, hash, _ := strings.Cut(effects[document], " ")
		sum := md5.Sum([]byte(hash + h.ID))
		counts[document]++
		effects[document] = fmt.Sprint(counts[document]) + " " + hex.EncodeToString(sum[:])
	}
	return effects
}

func (w *harness) effects() map[string]string {
	w.t.Helper()
	rows, err := w.mine.Query(w.t.Context(), `SELECT document, n || ' ' || hash FROM effect`)
	if err != nil {
		w.t.Fatal(err)
	}
	got := map[string]string{}
	var document, effect string
	if _, err := pgx.ForEachRow(rows, []any{&document, &effect}, func() error {
		got[document] = effect
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
	return got
}

// await waits until the effects are exactly those of the messages.
func (w *harness) await(all []*stream.Message) {
	w.t.Helper()
	wanted := want(all)
	await.Until(w.t, "effects", func() error {
		if got := w.effects(); !maps.Equal(got, wanted) {
			return fmt.Errorf("%v, want %v", got, wanted)
		}
		return nil
	}, func() error {
		select {
		case <-w.newest.ended:
			return fmt.Errorf("Run ended: %v", w.newest.err)
		default:
			return nil
		}
	})
}

// exactly checks the effects now.
func (w *harness) exactly(all []*stream.Message) {
	w.t.Helper()
	if got, wanted := w.effects(), want(all); !maps.Equal(got, wanted) {
		w.t.Errorf("effects\n%v\nwant\n%v", got, wanted)
	}
}

func (w *harness) offsets() []int64 {
	w.t.Helper()
	rows, err := w.mine.Query(w.t.Context(),
		`SELECT seq FROM outflow_mark WHERE source = 'live' ORDER BY partition`)
	if err != nil {
		w.t.Fatal(err)
	}
	seqs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		w.t.Fatal(err)
	}
	return seqs
}

// awaitOffsets waits until all offsets are at seq.
func (w *harness) awaitOffsets(seq int64) {
	w.t.Helper()
	var got []int64
	if !await.True(func() bool {
		got = w.offsets()
		return len(got) > 0 && slices.Min(got) == seq && slices.Max(got) == seq
	}) {
		w.t.Fatalf("marks %v, want all at %d", got, seq)
	}
}

// realStream makes a stream on a server.
func realStream(t *testing.T, config jetstream.StreamConfig) (jetstream.JetStream, *nats.Conn) {
	t.Helper()
	s := natstest.Server(t)
	nc, err := nats.Connect(s.URL(), nats.Timeout(time.Minute), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	config.Name = "OUTBOX"
	if config.Subjects == nil {
		config.Subjects = []string{"outbox.>", "other.>"}
	}
	if _, err := js.CreateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	return js, nc
}

func publish(t *testing.T, js jetstream.JetStream, all ...*stream.Message) {
	t.Helper()
	for _, m := range all {
		if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: m.Subject, Header: m.Header,
			Data: m.Data}); err != nil {
			t.Fatal(err)
		}
	}
}
