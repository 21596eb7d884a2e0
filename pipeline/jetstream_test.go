package pipeline

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// jetstream is a broker with one stream and one record. The harness's lock guards it.
type jetstream struct {
	w   *harness
	rnd *rand.Rand

	created    time.Time
	exists     bool
	messages   []*storedMessage // by sequence; lost ones stay as nil where the broker did not go back
	removed    int              // retention has removed all up to this sequence
	replicated bool
	moving     bool // its newest message is replaced before it can be read
	revisions  []revision
	kept       []revision // of what cluster 2 keeps for itself, in the same bucket
	gaps       string     // their names, beside the record
	last       uint64     // of the record's revisions

	ackEvery int              // a publisher asks for an acknowledgement with each so many messages
	limit    int              // messages in flight
	latency  time.Duration    // one way
	paused   time.Time        // it does nothing until then
	down     time.Time        // nothing can connect until then
	lostAcks time.Time        // acknowledgements are lost until then
	loseAcks int              // so many of the next acknowledgements are lost
	slow     time.Duration    // what acknowledgements take longer
	drop     int              // so many of the next messages are lost on the way
	recall   time.Duration    // how long the counters of its messages take to be read
	saves    saving           // what happens to the next record
	poison   string           // a payload that can't be published
	now      func() time.Time // what its clock says; nil: it does not
	onFull   func(int)        // called with the number of calls of a publisher's Full
	sound    bool             // it loses and removes nothing
	shared   bool             // clusters share it: there may be cuts
	onCut    func()           // called when one was stored
	deaf     bool             // nobody may watch who publishes

	lossAt  uint64 // the first revision after the last loss, 0 if there was none
	lost    int
	refused int
	holes   int
	resumed int // sessions that went on after a failure of the broker
	late    int // messages of dead sessions that were stored
	between int // messages of dead sessions that came between those of a living one
}

type storedMessage struct {
	line
	at       time.Time // when it was stored
	lost     uint64    // Outflow-Lost
	stranger bool      // it has no header of ours
	cut      *outbox.Cut
}

type revision struct {
	number uint64
	doc    []byte
	rec    *checkpoint.Record // what doc says
	at     time.Time
}

// record is what the revision says. It is nobody's own.
func (r *revision) record() (*checkpoint.Record, error) {
	if r.rec == nil {
		rec, err := checkpoint.Decode(r.doc)
		if err != nil {
			return nil, err
		}
		r.rec = rec
	}
	return r.rec, nil
}

// saving is what happens to a write of the record.
type saving uint8

const (
	saveWell    saving = iota
	saveUnheard        // it is stored, the answer is lost
	saveLate           // it is stored seconds later, if at all
	saveNever
)

// history is how many revisions the record's bucket keeps.
const history = 64

func newJetstream(w *harness, seed uint64) *jetstream {
	return &jetstream{
		w: w, rnd: rand.New(rand.NewPCG(seed, 2)), created: time.Now(), exists: true, ackEvery: 50,
		limit: 2000, latency: 200 * time.Microsecond,
	}
}

func (js *jetstream) newest() int {
	for q := len(js.messages); q > js.removed; q-- {
		if js.messages[q-1] != nil {
			return q
		}
	}
	return 0
}

// firm is how many messages, from the first, the broker can't lose any more.
func (js *jetstream) firm() int {
	now := time.Now()
	for q, m := range js.messages {
		if m != nil && now.Sub(m.at) < js.w.loses {
			return q
		}
	}
	return len(js.messages)
}

// arrive lets a message reach the broker, which stores it only at the sequence that its sender predicted.
func (js *jetstream) arrive(l *brokerConn, s sent) {
	if js.drop > 0 {
		js.drop--
		js.w.step("dropped", s.last+1)
		return
	}
	if l.dead || l.orphan {
		for _, o := range js.w.brokerConns() {
			if !o.orphan && o.sent > 0 {
				js.between++
				break
			}
		}
	}
	ok := js.accepts(&s)
	if ok {
		js.messages = append(js.messages, &storedMessage{line: s.line, at: time.Now(), lost: s.lost,
			cut: s.cut})
		if s.cut != nil && js.onCut != nil {
			js.onCut()
		}
		if l.dead {
			js.late++
		}
		js.w.step("stored", s.last+1)
	} else {
		js.refused++
		js.w.step("refused", s.last+1)
	}
	if !s.reply || l.dead || time.Now().Before(js.lostAcks) {
		return
	}
	if s.cut != nil {
		s.answer(ok)
		return
	}
	if js.loseAcks > 0 {
		js.loseAcks--
		js.w.step("ack lost", s.last+1)
		return
	}
	// Acknowledgements come one after the other, as on one connection.
	l.ackAt = later(later(time.Now(), l.frozen).Add(l.noise.about(js.latency+js.slow)),
		l.ackAt.Add(time.Nanosecond))
	time.AfterFunc(time.Until(l.ackAt), func() {
		js.w.mu.Lock()
		defer js.w.mu.Unlock()
		if !l.dead {
			l.pub.answered(s.last+1, ok)
			js.w.step("acknowledged", s.last+1)
		}
	})
}

// intrude lets a stranger publish a message. Connections that watch hear of it in the order of their
// acknowledgements.
func (js *jetstream) intrude() {
	js.messages = append(js.messages, &storedMessage{at: time.Now(), stranger: true})
	js.w.step("intruded", uint64(len(js.messages)))
	for _, l := range js.w.brokerConns() {
		if !l.watching {
			continue
		}
		l.ackAt = later(later(time.Now(), l.frozen).Add(l.noise.about(js.latency)),
			l.ackAt.Add(time.Nanosecond))
		time.AfterFunc(time.Until(l.ackAt), func() {
			js.w.mu.Lock()
			defer js.w.mu.Unlock()
			l.hears()
		})
	}
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// powerLoss makes the broker forget what it stored less than durable_after ago, from any point on, of the
// stream, of the record, or of each. It loses no more before that is durable which the first process to come
// stores.
func (js *jetstream) powerLoss(stream, record bool) bool {
	if js.sound {
		return false
	}
	now := time.Now()
	if js.lossAt != 0 {
		i := slices.IndexFunc(js.revisions, func(r revision) bool { return r.number >= js.lossAt })
		if i < 0 || now.Sub(js.revisions[i].at) < js.w.loses {
			return false
		}
	}
	for _, l := range js.w.brokerConns() {
		l.cut(js.rnd.IntN(2) == 0)
	}
	for _, l := range js.w.all { // what a sleeping process has yet to send goes to a server that is gone
		if js.shared && now.Before(l.frozen) {
			l.wire = nil
		}
	}
	cut := len(js.messages)
	if firm := js.firm(); stream {
		cut = firm + js.rnd.IntN(cut-firm+1)
	}
	js.lost += len(js.messages) - cut
	readable := false
	for q := js.removed; q < cut; q++ {
		readable = readable || js.messages[q] != nil
	}
	if readable && js.rnd.IntN(3) == 0 { // the index survived: the sequence does not go back
		if cut < len(js.messages) {
			js.holes++
		}
		for q := cut; q < len(js.messages); q++ {
			js.messages[q] = nil
		}
		for _, l := range js.w.all { // what was on its way to a server that died is gone
			l.wire = nil
		}
	} else {
		js.messages = js.messages[:cut]
	}
	js.removed = min(js.removed, cut)
	oldest := 0
	for i, r := range js.revisions {
		if now.Sub(r.at) >= js.w.loses {
			oldest = i
		}
	}
	if record {
		js.revisions = js.revisions[:oldest+js.rnd.IntN(len(js.revisions)-oldest)+1]
		left := js.loseKept(now)
		if js.rnd.IntN(2) == 0 { // the bucket's sequence goes back too
			js.last = left
		}
	}
	js.w.epoch++ // writes of the record that are on their way are gone
	for _, m := range js.messages[js.removed:] {
		if m != nil {
			m.at = minTime(m.at, now.Add(-js.w.loses))
		}
	}
	for _, all := range [][]revision{js.revisions, js.kept} {
		for i := range all {
			all[i].at = minTime(all[i].at, now.Add(-js.w.loses))
		}
	}
	js.lossAt = js.last + 1
	return true
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// retention removes from the front what is durable, sometimes all there is, but nothing that gap mode
// remembers at a checkpoint.
func (js *jetstream) retention() {
	if js.newest() == len(js.messages) && !js.sound {
		js.removed = max(js.removed, min(js.rnd.IntN(js.firm()+1), js.unremembered()))
	}
}

// unremembered is up to where nothing is remembered at any checkpoint that may be gone on from.
func (js *jetstream) unremembered() int {
	from := len(js.messages)
	for i := range js.revisions {
		rec, err := js.revisions[i].record()
		if err != nil {
			js.w.broken = err
			return 0
		}
		for _, p := range rec.Checkpoints {
			at := min(int(p.Seq), len(js.messages))
			for n := 0; n < p.Remembered && at > js.removed; at-- {
				if m := js.messages[at-1]; m != nil && m.packed() != nil {
					n++
				}
			}
			from = min(from, at)
		}
	}
	return from
}

// brokerConn is the JetStream side of a session.
type brokerConn struct {
	js   *jetstream
	of   *process
	lost chan struct{}
	gone chan struct{} // closed when it is dead
	dead bool
	pub  *publisher

	watching bool
	err      error // why it is lost, where it was no end of the connection

	wire    []sent
	running bool
	extra   time.Duration // what is on its way after the end takes so much longer
	gap     time.Duration // and comes this far apart
	// the process that owns it sleeps until then: nothing leaves it and nothing comes in
	frozen time.Time
	orphan bool      // it lost the slot and does not know
	ackAt  time.Time // when the last acknowledgement comes
	sent   int

	noise *noise
	lag   time.Duration // questions take up to so much longer
	// when the broker goes on after a pause, it comes to this connection a moment later
	off  time.Duration
	skew func() time.Duration // by how much the process's clock differs
}

// sent is a message on its way.
type sent struct {
	line
	last  uint64 // the expected last sequence
	reply bool
	at    time.Time // when it arrives
	lost  uint64    // Outflow-Lost
	fence uint64    // the newest cut that its sender knows
	cut   *outbox.Cut
	// of a cut: called with what became of it
	answer func(ok bool)
}

func (l *brokerConn) lock()   { l.js.w.mu.Lock() }
func (l *brokerConn) unlock() { l.js.w.mu.Unlock() }

// send puts a message on the wire. The lock is held.
func (l *brokerConn) send(s sent) {
	if l.dead {
		return
	}
	s.at = time.Now().Add(l.noise.about(l.js.latency))
	l.wire = append(l.wire, s)
	l.sent++
	l.js.w.step("sent", s.last+1)
	if !l.running {
		l.running = true
		go l.deliver()
	}
}

func (l *brokerConn) deliver() {
	l.lock()
	defer l.unlock()
	for len(l.wire) > 0 {
		at := later(later(l.wire[0].at.Add(l.extra), l.js.paused.Add(l.off)), l.frozen)
		if d := time.Until(at); d > 0 {
			l.unlock()
			time.Sleep(d)
			l.lock()
			continue
		}
		s := l.wire[0]
		l.wire = l.wire[1:]
		l.extra += l.gap
		l.js.arrive(l, s)
	}
	l.running = false
}

// cut ends the connection; what is on its way is lost, or comes late.
func (l *brokerConn) cut(dropped bool) {
	if l.dead {
		return
	}
	l.dead = true
	close(l.gone)
	if l.err == nil {
		close(l.lost)
	}
	if dropped {
		l.wire = nil
	} else if len(l.wire) > 0 {
		l.extra = time.Duration(l.js.rnd.Int64N(
			int64(pick(l.js.rnd, 20*time.Millisecond, 200*time.Millisecond, 1500*time.Millisecond))))
		if l.js.rnd.IntN(2) == 0 {
			l.gap = l.noise.about(time.Millisecond)
		}
	}
}

// hears lets the connection hear of a stranger. The lock is held.
func (l *brokerConn) hears() {
	if l.dead || l.err != nil {
		return
	}
	l.err = &outbox.Fault{Class: outbox.Gap, Code: "foreign_message", Observed: true,
		Message: "somebody else published"}
	close(l.lost)
	if l.pub != nil && l.pub.err == nil {
		l.pub.err = l.err
	}
	l.js.w.step("heard", 0)
}

// ask takes the time of one question and its answer.
func (l *brokerConn) ask(ctx context.Context) error {
	l.lock()
	d := l.noise.about(max(2*l.js.latency, time.Until(l.js.paused), time.Until(l.frozen)) +
		l.noise.upTo(l.lag))
	l.unlock()
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return ctx.Err()
	case <-l.gone:
	}
	l.lock()
	defer l.unlock()
	if l.dead {
		return errDown
	}
	return nil
}

func (l *brokerConn) Check(ctx context.Context) error { return l.ask(ctx) }

func (l *brokerConn) State(ctx context.Context) (relay.StreamState, error) {
	err := l.ask(ctx)
	l.lock()
	defer l.unlock()
	js := l.js
	s := relay.StreamState{
		Exists: js.exists, Created: js.created, LastSeq: uint64(len(js.messages)),
		NewestSeq: uint64(js.newest()), Replicated: js.replicated,
	}
	if js.now != nil {
		s.Now = js.now()
	}
	for _, m := range js.messages {
		if m != nil {
			s.Messages++
		}
	}
	if n := js.newest(); n > 0 {
		s.Newest, s.Cut = js.messages[n-1].packed(), js.messages[n-1].cut
	}
	return s, err
}

func (m *storedMessage) packed() *outbox.Header {
	if m.stranger || m.cut != nil {
		return nil
	}
	h := m.header
	return &h
}

func (l *brokerConn) Watch(ctx context.Context) error {
	if err := l.ask(ctx); err != nil {
		return err
	}
	l.lock()
	defer l.unlock()
	l.watching = !l.js.deaf
	return nil
}

func (l *brokerConn) Stored(ctx context.Context, above, upTo uint64) (all []relay.Stored, err error) {
	if above == upTo {
		return nil, nil
	}
	err = l.ask(ctx)
	l.lock()
	defer l.unlock()
	for q := upTo; q > above && upTo-q < uint64(l.js.limit); q-- {
		if q > uint64(len(l.js.messages)) || q <= uint64(l.js.removed) || l.js.messages[q-1] == nil {
			continue
		}
		m := l.js.messages[q-1]
		all = append(all, relay.Stored{Seq: q, Header: m.packed(), Cut: m.cut, Time: time.Now()})
	}
	slices.Reverse(all)
	return all, err
}

func (l *brokerConn) Recent(ctx context.Context, above, upTo uint64, n int) (all []outbox.Counter,
	err error) {
	select {
	case <-time.After(l.js.recall):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	err = l.ask(ctx)
	l.lock()
	defer l.unlock()
	for q := upTo; q > max(above, uint64(l.js.removed)) && len(all) < n; q-- {
		if m := l.js.messages[q-1]; m != nil && m.packed() != nil {
			all = append(all, m.header.Counter)
		}
	}
	return all, err
}

func (l *brokerConn) Tail(ctx context.Context) (relay.StreamState, error) {
	s, err := l.State(ctx)
	l.lock()
	defer l.unlock()
	if err == nil && l.js.moving { // as the real one, it says nothing else then
		return relay.StreamState{}, &outbox.Fault{Class: outbox.Transient, Code: relay.CodeStreamMoved,
			Message: "the stream changed while it was read"}
	}
	return s, err
}

func (l *brokerConn) Publisher(last, lost, fence uint64) Publisher {
	l.pub = &publisher{conn: l, last: last, acknowledged: last, lost: lost, lostTo: last, fence: fence,
		notify: make(chan struct{}, 1), since: l.js.ackEvery - 1}
	l.of.latest = l.pub
	return l.pub
}

func (l *brokerConn) Resume(last uint64) (Publisher, error) {
	old := l.of.latest
	p := l.Publisher(last, 0, 0)
	l.lock()
	defer l.unlock()
	l.pub.resume(old)
	l.js.w.step("resumed", last)
	l.js.resumed++
	return p, nil
}

func (l *brokerConn) Lost() <-chan struct{} { return l.lost }

func (l *brokerConn) Err() error {
	l.lock()
	defer l.unlock()
	if l.err != nil {
		return l.err
	}
	return errDown
}

func (l *brokerConn) Close() {
	l.lock()
	defer l.unlock()
	l.cut(false)
}

// Load reads the newest revision through the leader.
func (l *brokerConn) Load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	return l.load(ctx, &l.js.revisions)
}

func (l *brokerConn) load(ctx context.Context, from *[]revision) (*checkpoint.Record, uint64, error) {
	if err := l.ask(ctx); err != nil {
		return nil, 0, err
	}
	l.lock()
	defer l.unlock()
	if len(*from) == 0 {
		return nil, 0, nil
	}
	r := &(*from)[len(*from)-1]
	decoded, err := r.record()
	if err != nil {
		return nil, 0, err
	}
	rec := *decoded
	rec.Checkpoints = slices.Clone(rec.Checkpoints)
	rec.StoredAt(r.at)
	for i := range rec.Checkpoints { // this process's clock is the bubble's: the record's times are off
		rec.Checkpoints[i].Since = rec.Checkpoints[i].Since.Add(-l.skew())
	}
	return &rec, r.number, nil
}

// SaveGaps fails while nothing is answered.
func (l *brokerConn) SaveGaps(ctx context.Context, doc []byte) error {
	if err := l.ask(ctx); err != nil {
		return err
	}
	l.lock()
	defer l.unlock()
	l.js.gaps = string(doc)
	return nil
}

// Save compares and sets. The outcome may stay unknown, whether it was stored or not.
func (l *brokerConn) Save(ctx context.Context, rec *checkpoint.Record, last uint64) (uint64, error) {
	return l.save(ctx, &l.js.revisions, rec, last)
}

func (l *brokerConn) save(ctx context.Context, to *[]revision, rec *checkpoint.Record,
	last uint64) (uint64, error) {
	c := *rec
	c.Checkpoints = slices.Clone(rec.Checkpoints)
	l.lock()
	for i := range c.Checkpoints {
		c.Checkpoints[i].Since = c.Checkpoints[i].Since.Add(l.skew())
	}
	l.unlock()
	doc, err := c.Encode()
	if err != nil {
		return 0, err
	}
	type outcome struct {
		revision uint64
		err      error
	}
	done := make(chan outcome, 1)
	l.lock()
	how, epoch := l.js.saves, l.js.w.epoch
	l.js.saves = saveWell
	d := l.noise.about(max(l.js.latency, time.Until(l.js.paused), time.Until(l.frozen)))
	l.js.w.step("record sent", last)
	if how == saveLate {
		d += time.Duration(l.js.rnd.IntN(8000)) * time.Millisecond
	}
	if !l.dead && how != saveNever {
		time.AfterFunc(d, func() {
			l.lock()
			defer l.unlock()
			if epoch != l.js.w.epoch {
				return
			}
			var o outcome
			o.revision, o.err = l.js.landIn(to, doc, &c, last)
			if how == saveWell && !l.dead {
				done <- o
			}
		})
	}
	l.unlock()
	select {
	case o := <-done:
		return o.revision, o.err
	case <-ctx.Done():
	case <-l.gone:
	}
	return 0, errors.Join(checkpoint.ErrUnknown, ctx.Err())
}

// land lets a record reach the broker, which compares and sets. rec is what doc says; nil: that is read from
// it.
func (js *jetstream) land(doc []byte, rec *checkpoint.Record, last uint64) (uint64, error) {
	return js.landIn(&js.revisions, doc, rec, last)
}

func (js *jetstream) landIn(to *[]revision, doc []byte, rec *checkpoint.Record, last uint64) (uint64, error) {
	all, now := *to, uint64(0)
	if n := len(all); n > 0 {
		now = all[n-1].number
	}
	if now != last {
		return 0, checkpoint.ErrConflict
	}
	js.last++
	if js.shared && to == &js.revisions && now < js.lossAt && js.unchanged(rec) {
		// what was lost is still to be recorded
		js.lossAt = js.last + 1
	}
	all = append(all, revision{number: js.last, doc: doc, rec: rec, at: time.Now()})
	if n := len(all) - history; n > 0 {
		all = all[n:]
	}
	*to = all
	js.w.step("record stored", js.last)
	return js.last, nil
}

// unchanged reports whether a record has the checkpoints and holes of the one before it.
func (js *jetstream) unchanged(rec *checkpoint.Record) bool {
	was, err := js.revisions[len(js.revisions)-1].record()
	return err == nil && rec != nil && slices.Equal(was.Holes, rec.Holes) &&
		slices.EqualFunc(was.Checkpoints, rec.Checkpoints, func(a, b checkpoint.StoredCheckpoint) bool {
			return a.Same(b.Checkpoint)
		})
}
