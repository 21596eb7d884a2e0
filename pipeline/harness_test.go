package pipeline

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// harness is what outlives a session: PostgreSQL, the broker, and the processes. Everything in it lives in
// one synctest bubble, so its clock is the bubble's and waiting takes no time.
type harness struct {
	t  *testing.T
	mu sync.Mutex

	held bool // the test holds mu, and gives it away only where it waits

	pg      *postgres
	other   *postgres // of another cluster, to which the home's rows are replicated; nil: there is none
	js      *jetstream
	durable time.Duration
	first   relay.Settings
	decoder decoder.Config
	// of all processes, and of the undisturbed one; 0: the product's
	maxPublishedAhead int
	epoch             int          // grows when the broker dies
	left              []relay.Left // what others publish

	ups     []*postgresConn
	all     []*brokerConn
	started []start // of replication
	stops   int     // in order
	procs   []*process
	wrote   int   // events by write
	broken  error // what the harness itself found wrong

	loses time.Duration // what is younger the broker may lose: durable_after, less what clocks may be off

	noise  *noise // nil: no steps are counted
	begun  time.Time
	steps  int
	plan   []planned // what is to go wrong, by step
	traced []step    // what happened
}

// start is a start of replication.
type start struct {
	at     time.Time
	from   outbox.LSN
	binary bool
}

var defaults = relay.Settings{Horizon: 20 * time.Millisecond, Sort: outbox.BySeqKey, MaxEvents: 1000,
	MaxBytes: 1 << 20}

func newHarness(t *testing.T, seed uint64, first relay.Settings, durable time.Duration) *harness {
	return newHarnessOf(t, seed, first, durable, decoderConfig)
}

// newHarnessOf is newHarness for another set-up.
func newHarnessOf(t *testing.T, seed uint64, first relay.Settings, durable time.Duration,
	cfg decoder.Config) *harness {
	w := &harness{t: t, first: first, durable: durable, loses: durable, begun: time.Now(), decoder: cfg}
	w.pg, w.js = newPostgres(w, seed), newJetstream(w, seed)
	mapping, place := cfg.Mapping, relay.Checkpoint{Due: w.pg.end, Settings: first, Timeline: timeline}
	w.pg.control = mapping.Control != ""
	if mapping.Away() {
		w.pg.identity.Subscription = originName
		place.Due, place.Read = 1, w.pg.end
	}
	rec := &checkpoint.Record{
		Slot: "outflow", Database: "app", SystemID: systemID, Mapping: mapping, Stream: "OUTBOX",
		Created:     w.js.created,
		Publication: checkpoint.PublicationSeen{PublicationIdentity: w.pg.identity, Seen: w.pg.end},
		Checkpoints: []checkpoint.StoredCheckpoint{{
			Checkpoint: place, Since: time.Now().UTC(),
		}},
	}
	doc, err := rec.Encode()
	must.Succeed(t, err)
	if _, err := w.js.land(doc, rec, 0); err != nil {
		t.Fatal(err)
	}
	w.js.revisions[0].at = time.Now().Add(-time.Hour)
	return w
}

// with runs f under the harness's lock, which a directed test holds except where it waits.
func (w *harness) with(f func()) {
	if w.held {
		f()
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// postgresConns are the live connections to PostgreSQL, brokerConns those to the broker.
func (w *harness) postgresConns() []*postgresConn {
	var live []*postgresConn
	for _, u := range w.ups {
		if !u.dead {
			live = append(live, u)
		}
	}
	return live
}

func (w *harness) brokerConns() []*brokerConn {
	var live []*brokerConn
	for _, l := range w.all {
		if !l.dead {
			live = append(live, l)
		}
	}
	return live
}

// checkConfirmed holds a confirmation to its promise: whatever the broker may lose at this moment, a
// checkpoint is left at or above it.
func (w *harness) checkConfirmed(pg *postgres, lsn outbox.LSN) {
	if pg == w.other {
		w.checkKept(lsn)
		return
	}
	firm := uint64(w.js.firm())
	oldest := 0
	for i, r := range w.js.revisions {
		if time.Since(r.at) >= w.loses {
			oldest = i
		}
	}
	for i := range w.js.revisions[oldest:] {
		r := &w.js.revisions[oldest+i]
		rec, err := r.record()
		if err != nil {
			w.broken = err
			return
		}
		safe := false
		for _, p := range rec.Checkpoints {
			safe = safe || pg.from(p.Checkpoint) >= lsn && p.Seq <= firm
		}
		if !safe {
			w.broken = errors.Join(w.broken, fmt.Errorf("%v was confirmed; if revision %d of the record "+
				"and %d messages are left, no checkpoint is at or above it",
				lsn, r.number, firm))
		}
	}
}

// record is the newest revision of the record.
func (w *harness) record() *checkpoint.Record {
	rec, err := checkpoint.Decode(w.js.revisions[len(w.js.revisions)-1].doc)
	must.Succeed(w.t, err)
	return rec
}

// stream is what consumers see, without what was lost.
func (w *harness) stream() (out []line) {
	w.with(func() {
		for _, m := range w.js.messages {
			if m != nil && m.cut == nil {
				out = append(out, m.line)
			}
		}
	})
	return out
}

// unexplained returns an error if messages are missing within the stream and the one behind them does not say
// that they were lost.
func (w *harness) unexplained() (err error) {
	w.with(func() {
		read := 0 // the sequence of the newest message
		for q, m := range w.js.messages {
			if m == nil || q < w.js.removed {
				continue
			}
			if read > 0 && read < q && (m.lost == 0 || m.lost > uint64(read+1)) {
				err = errors.Join(err, fmt.Errorf("messages %d to %d are missing; the next says that %d "+
					"is the first of them", read+1, q, m.lost))
			}
			read = q + 1
		}
	})
	return err
}

// events is the number of events in the WAL.
func (w *harness) events() int {
	n := 0
	for _, x := range w.pg.wal {
		n += len(x.rows)
	}
	return n
}

// compare holds the stream against that of an undisturbed process over the same WAL.
func (w *harness) compare() error {
	var wal []*transaction
	w.with(func() { wal = slices.Clone(w.pg.wal) })
	want, err := replay(wal, w.first, w.maxPublishedAhead, w.decoder)
	if err != nil {
		return err
	}
	all := len(want)
	want = slices.DeleteFunc(want, func(l line) bool {
		return slices.ContainsFunc(w.left, func(left relay.Left) bool { return left.Covers(&l.header) })
	})
	got := w.stream()
	for i := range max(len(got), len(want)) {
		switch {
		case i >= len(got):
			return fmt.Errorf("the stream has %d messages; the next of %d is\n%s", len(got), len(want),
				want[i])
		case i >= len(want):
			return fmt.Errorf("the stream has %d messages more than the %d of an undisturbed run; the "+
				"first is\n%s", len(got)-len(want), len(want), got[i])
		case got[i] != want[i]:
			return fmt.Errorf("message %d of the stream is\n%s\nthat of an undisturbed run\n%s", i+1, got[i],
				want[i])
		}
	}
	if n := w.events(); n != all {
		return fmt.Errorf("%d messages of %d events", all, n)
	}
	return errors.Join(w.broken, w.unexplained())
}

// process is a running pipeline.
type process struct {
	w       *harness
	pg      *postgres // that it reads
	p       *Pipeline
	cancel  context.CancelFunc
	ended   chan struct{}
	err     error
	dead    bool
	opens   []time.Time // of sessions
	reopens []time.Time // of the broker's side of sessions
	ups     []*postgresConn
	nats    []*brokerConn
	latest  *publisher // of its session
	writer  Writer
	reg     *prometheus.Registry
	skew    time.Duration // of its host's clock

	noise    *noise
	lag      time.Duration // its questions take up to so much longer, for one session
	stopping bool          // told to stop
}

// options are what differs between processes.
type options struct {
	settings     relay.Settings
	noHeartbeats bool
	binary       bool
	stop         time.Duration
	limit        time.Duration // of the run; 0: none
	scratch      reorder.Scratch
	registry     *prometheus.Registry
	open         func(*Conns) // changes what was opened
	inForce      func(relay.Settings)
	log          io.Writer
	hold         bool
	retry        chan struct{}
	failed       func(*outbox.Fault, time.Time)
	cluster      int // cluster.id; 0: it shares the stream with nobody
	islands      *claim.Config
	maximumDelay time.Duration
}

// run starts a process.
func (w *harness) run(o options) *process {
	if o.settings == (relay.Settings{}) {
		o.settings = w.first
	}
	if o.stop == 0 {
		o.stop = 10 * time.Second
	}
	if o.scratch == nil {
		o.scratch = memory{}
	}
	pr := &process{w: w, pg: w.pg, ended: make(chan struct{}), reg: o.registry}
	if o.cluster > 1 {
		pr.pg = w.other
	}
	w.procs = append(w.procs, pr)
	pr.writer = &writer{pr}
	ctx, cancel := context.WithCancel(context.Background())
	if o.limit > 0 {
		ctx, cancel = context.WithTimeout(context.Background(), o.limit)
	}
	pr.cancel = cancel
	cfg := Config{
		Open:     func(ctx context.Context) (*Conns, error) { return pr.open(ctx, o) },
		Settings: o.settings, Heartbeats: !o.noHeartbeats, Scratch: o.scratch, StopTimeout: o.stop,
		InForce: o.inForce, Hold: o.hold, Retry: o.retry, Failed: o.failed, Islands: o.islands,
		MaximumDelay: o.maximumDelay,
	}
	if o.log != nil {
		cfg.Logger = slog.New(slog.NewTextHandler(o.log, nil))
	}
	if o.registry != nil {
		cfg.Registerer = o.registry
	} else {
		cfg.Registerer = nowhere{}
	}
	pr.p = New(cfg)
	pr.p.maxPublishedAhead = w.maxPublishedAhead
	if pr.noise = w.noise.another(); pr.noise != nil {
		own := pr.noise.another()
		pr.p.jitter = func(n time.Duration) time.Duration { return time.Duration(own.Int64N(int64(n))) }
	}
	go func() {
		defer close(pr.ended)
		pr.err = pr.p.Run(ctx)
	}()
	return pr
}

func (pr *process) open(ctx context.Context, o options) (*Conns, error) {
	w := pr.w
	w.mu.Lock()
	d := pr.noise.about(time.Millisecond)
	w.mu.Unlock()
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	pr.opens = append(pr.opens, time.Now())
	if pr.dead || time.Now().Before(pr.pg.down) || time.Now().Before(w.js.down) {
		return nil, errDown
	}
	u := &postgresConn{pg: pr.pg, noise: pr.noise.another(), batches: make(chan *relay.Batch, 2),
		gone: make(chan struct{})}
	u.lag = pr.lag
	l := pr.connect()
	w.ups, pr.ups = append(w.ups, u), append(pr.ups, u)
	w.step("opened", uint64(len(pr.opens)))
	conns := &Conns{
		Reopen: pr.reopen,
		Source: u, JetStream: l, Store: l, Writer: pr.writer, Decoder: w.decoder, Binary: o.binary,
		Checkpoint: checkpoint.Config{
			Slot: "outflow", Stream: "OUTBOX", Publication: "outflow", Table: mapping.Table,
			Mapping: w.decoder.Mapping, DurableAfter: w.durable, Cluster: o.cluster,
		},
	}
	if o.cluster > 1 {
		pr.elsewhere(conns)
	}
	if w.decoder.Mapping.Away() {
		conns.Writer = nil
	}
	if o.open != nil {
		o.open(conns)
	}
	return conns, nil
}

// connect opens a connection to the broker. The lock is held.
func (pr *process) connect() *brokerConn {
	w := pr.w
	l := &brokerConn{js: w.js, of: pr, noise: pr.noise.another(), lost: make(chan struct{}),
		gone: make(chan struct{}), skew: func() time.Duration { return pr.skew }}
	l.off = l.noise.about(0)
	l.lag, pr.lag = pr.lag, 0
	w.all, pr.nats = append(w.all, l), append(pr.nats, l)
	return l
}

// reopen opens the broker's side of a session again.
func (pr *process) reopen(ctx context.Context) (JetStream, Store, error) {
	w := pr.w
	w.mu.Lock()
	d := pr.noise.about(time.Millisecond)
	w.mu.Unlock()
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	pr.reopens = append(pr.reopens, time.Now())
	if pr.dead || time.Now().Before(w.js.down) {
		return nil, nil, errDown
	}
	l := pr.connect()
	w.step("opened again", uint64(len(pr.reopens)))
	return l, l, nil
}

// kill ends the process at once: nothing that it does from now on has an effect. What it had sent may still
// arrive.
func (pr *process) kill() {
	pr.w.with(pr.dies)
	pr.w.away(func() { <-pr.ended })
}

// dies is kill without waiting for what is left of it. The lock is held.
func (pr *process) dies() {
	pr.dead = true
	for _, u := range pr.ups {
		u.cut(pr.pg.rnd.IntN(3) > 0)
	}
	for _, l := range pr.nats {
		l.cut(pr.w.js.rnd.IntN(3) == 0)
	}
	pr.cancel()
}

// stop ends the process in order.
func (pr *process) stop() error {
	pr.w.with(func() { pr.stopping = true })
	pr.cancel()
	pr.w.away(func() { <-pr.ended })
	return pr.err
}

func (pr *process) postgres() *postgresConn { return pr.ups[len(pr.ups)-1] }
func (pr *process) broker() *brokerConn     { return pr.nats[len(pr.nats)-1] }

func (pr *process) over() bool {
	select {
	case <-pr.ended:
		return true
	default:
		return false
	}
}

// inBubble runs a test in a synctest bubble with a harness, and stops what it started.
func inBubble(t *testing.T, first relay.Settings, durable time.Duration, f func(t *testing.T, w *harness)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newHarness(t, 1, first, durable)
		w.held = true
		w.mu.Lock()
		defer w.mu.Unlock()
		f(t, w)
		w.killAll()
		w.sleep(time.Minute) // what is still on its way arrives
		if w.broken != nil {
			t.Error(w.broken)
		}
	})
}

// killAll kills the processes that still run.
func (w *harness) killAll() {
	for _, pr := range w.procs {
		if !pr.over() {
			pr.kill()
		}
	}
}

// until waits for a condition, and fails the test when it does not come within limit.
func (w *harness) until(limit time.Duration, what string, cond func() bool) {
	w.t.Helper()
	begun := time.Now()
	for {
		ok := cond()
		switch {
		case ok:
			return
		case time.Since(begun) > limit:
			for _, pr := range w.procs {
				w.t.Logf("%+v; %v", pr.p.Status(), pr.err)
				pr.kill()
			}
			w.t.Fatalf("not within %v: %s", limit, what)
		}
		w.sleep(100 * time.Microsecond)
	}
}

// sleep lets time pass in a directed test.
func (w *harness) sleep(d time.Duration) { w.away(func() { time.Sleep(d) }) }

// away runs f, which waits, without the harness's lock.
func (w *harness) away(f func()) {
	if w.held {
		w.mu.Unlock()
		defer w.mu.Lock()
	}
	f()
}

// running starts a process and waits until its session is proved.
func (w *harness) running(o options) *process {
	w.t.Helper()
	pr := w.run(o)
	w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
	return pr
}

// insert commits one transaction with one event.
func (w *harness) insert(doc, key string) (x *transaction) {
	w.with(func() { x = w.pg.commit([]row{{doc, "a", key, `{"at":"` + key + `"}`}}) })
	return x
}

// write commits n transactions of one event each.
func (w *harness) write(n int) {
	for range n {
		w.wrote++
		w.insert("friendsforever", fmt.Sprintf("a:%06d", w.wrote))
	}
}

// published waits until all events of the WAL are in the stream.
func (w *harness) published() {
	w.t.Helper()
	w.until(time.Minute, "published", func() bool { return len(w.js.messages) >= w.events() })
}

// same fails the test if the stream is not that of an undisturbed run.
func (w *harness) wantSameStream() {
	w.t.Helper()
	if err := w.compare(); err != nil {
		w.t.Error(err)
	}
}

// ends waits until the process has ended by itself, and returns its fault.
func (pr *process) ends(limit time.Duration) *outbox.Fault {
	pr.w.t.Helper()
	pr.w.until(limit, "the pipeline ends", pr.over)
	return outbox.FaultOf(pr.err)
}

// eachCheckpoint goes through the checkpoints of all revisions of the record.
func (w *harness) eachCheckpoint(f func(lsn outbox.LSN, stored time.Time)) {
	for _, r := range w.js.revisions {
		rec, err := checkpoint.Decode(r.doc)
		must.Succeed(w.t, err)
		for _, p := range rec.Checkpoints {
			f(p.Due, r.at)
		}
	}
}

// metric is the value of a counter or gauge.
func metric(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	must.Succeed(t, err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		sum := 0.
		for _, m := range f.GetMetric() {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() +
				float64(m.GetHistogram().GetSampleCount())
		}
		return sum
	}
	t.Fatalf("no metric %s", name)
	return 0
}
